"""plait.all_to_all on virtual ranks: bitwise, with equal and ragged splits."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.collectives.reference import all_to_all_reference
from plait.errors import ArgumentError, RankCountError, RanksDisagreeError, ShapeError
from plait.settings import override

# splits[s][r]: rows that rank s sends to rank r. Some send or receive nothing at all.
RAGGED = {
    1: [[3]],
    2: [[1, 4], [0, 2]],
    3: [[2, 0, 5], [0, 0, 0], [1, 3, 0]],
    4: [[0, 1, 2, 3], [4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 2]],
}


def columns(splits):
    return [list(column) for column in zip(*splits, strict=True)]


def inputs(splits, *rest):
    return [torch.randn(sum(rows), *rest) for rows in splits]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_equal_parts(world_size, ranks_on, bitwise):
    xs = torch.randn(world_size, 3 * world_size, 2, 3)
    results = ranks_on(lambda group: plait.all_to_all(xs[group.rank], group=group), world_size)
    for rank, got in enumerate(results):
        bitwise(got, all_to_all_reference(list(xs), rank, [[3] * world_size] * world_size))


@pytest.mark.parametrize("world_size", RAGGED)
@pytest.mark.parametrize("max_rows", [None, 6])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_ragged_parts(world_size, max_rows, impl, ranks_on, bitwise):
    splits = RAGGED[world_size]
    receives = columns(splits)
    xs = inputs(splits, 7)

    def body(group):
        return plait.all_to_all(
            xs[group.rank],
            group=group,
            input_splits=splits[group.rank],
            output_splits=receives[group.rank],
            max_rows=max_rows,
            impl=impl,
        )

    for rank, got in enumerate(ranks_on(body, world_size)):
        bitwise(got, all_to_all_reference(xs, rank, splits))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
def test_any_dtype_keeps_its_bits(dtype, ranks_on, bitwise):
    nbytes = 2 * 4 * 5 * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    xs = torch.randint(0, high, (nbytes,), dtype=torch.uint8).view(dtype).view(2, 4, 5)
    results = ranks_on(lambda group: plait.all_to_all(xs[group.rank], group=group), 2)
    for rank, got in enumerate(results):
        bitwise(got, all_to_all_reference(list(xs), rank, [[2, 2]] * 2))


def test_strided_and_broadcast_inputs(ranks_on, bitwise):
    base = torch.randn(2, 6, 8)
    xs = [
        [b.t() for b in base],
        [b[1:5, 1:7] for b in base],
        [b[:1].expand(4, 8) for b in base],
        [b[:, 2] for b in base],
    ]

    def body(group):
        return [plait.all_to_all(x[group.rank], group=group) for x in xs]

    for rank, results in enumerate(ranks_on(body, 2)):
        for got, x in zip(results, xs, strict=True):
            bitwise(got, all_to_all_reference(x, rank, [[len(x[0]) // 2] * 2] * 2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_back_to_back(world_size, schedule, seed, ranks_on, bitwise):
    splits = RAGGED[world_size]
    receives = columns(splits)
    rounds = [inputs(splits, 9) for _ in range(6)]

    def body(group):
        return [
            plait.all_to_all(
                xs[group.rank],
                group=group,
                input_splits=splits[group.rank],
                output_splits=receives[group.rank],
                max_rows=5,
            )
            for xs in rounds
        ]

    results = ranks_on(body, world_size, seed, schedule=schedule, sm_slots=1)
    for rank, outs in enumerate(results):
        for xs, got in zip(rounds, outs, strict=True):
            bitwise(got, all_to_all_reference(xs, rank, splits))


@pytest.mark.parametrize("max_rows", [None, 40])
def test_slices_of_a_small_workspace(max_rows, small_workspace, ranks_on, bitwise):
    splits = [[2, 30, 0], [0, 0, 11], [37, 1, 1]]
    receives = columns(splits)
    xs = inputs(splits, 8)

    def body(group):
        out = plait.all_to_all(
            xs[group.rank],
            group=group,
            input_splits=splits[group.rank],
            output_splits=receives[group.rank],
            max_rows=max_rows,
        )
        return out, group.memory()

    for rank, (got, memory) in enumerate(ranks_on(body, 3)):
        bitwise(got, all_to_all_reference(xs, rank, splits))
        assert 0 < memory["region 0"] <= 2048
        assert memory["region 1"], "only one region: the call was not sliced"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (2, 0, 5)])
def test_empty(shape, ranks_on):
    for got in ranks_on(lambda group: plait.all_to_all(torch.empty(shape), group=group), 2):
        assert got.shape == shape


@pytest.mark.parametrize("max_rows", [None, 3])
def test_nobody_sends_anything(max_rows, ranks_on):
    def body(group):
        splits = {"input_splits": [0, 0], "output_splits": [0, 0], "max_rows": max_rows}
        return plait.all_to_all(torch.empty(0, 4), group=group, **splits)

    assert [list(got.shape) for got in ranks_on(body, 2)] == [[0, 4]] * 2


@pytest.mark.parametrize("impl", ["auto", "unfused", "reference"])
@pytest.mark.parametrize("max_rows", [None, 5])
def test_gradient_comes_back_the_same_way(impl, max_rows, ranks_on, bitwise):
    splits = RAGGED[3]
    receives = columns(splits)
    xs = inputs(splits, 2)
    weights = [torch.randn(sum(rows), 2) for rows in receives]

    def body(group):
        x = xs[group.rank].clone().requires_grad_()
        out = plait.all_to_all(
            x,
            group=group,
            input_splits=splits[group.rank],
            output_splits=receives[group.rank],
            max_rows=max_rows,
            impl=impl,
        )
        (out * weights[group.rank]).sum().backward()
        return x.grad

    leaves = [x.clone().requires_grad_() for x in xs]
    loss = torch.zeros(())
    for rank, weight in enumerate(weights):
        loss = loss + (all_to_all_reference(leaves, rank, splits) * weight).sum()
    loss.backward()
    for got, leaf in zip(ranks_on(body, 3), leaves, strict=True):
        bitwise(got, leaf.grad)


@pytest.mark.parametrize(
    ("impl", "served"), [("auto", "fused"), ("unfused", "unfused"), ("reference", "reference")]
)
def test_last_run_names_what_served(impl, served, ranks_on):
    def body(group):
        plait.all_to_all(torch.ones(2), group=group, impl=impl)
        return plait.last_run()

    for record in ranks_on(body, 2):
        assert (record.operator, record.impl) == ("all_to_all", served)


@pytest.mark.parametrize("ragged", [False, True])
def test_operator_passes_opcheck(ragged, ranks_on):
    splits = [[1, 3], [2, 0]]

    def body(group):
        sends = splits[group.rank] if ragged else []
        receives = columns(splits)[group.rank] if ragged else []
        x = torch.randn(sum(sends) if ragged else 4, 3)
        return torch.library.opcheck(
            torch.ops.plait.all_to_all,
            (x, group.name, sends, receives, 3 if ragged else None, "auto"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    for outcome in ranks_on(body, 2):
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ShapeError, "x: expected a size along dim 0 that 2 ranks divide, got 3"),
        ({"impl": "fast"}, ArgumentError, "impl: expected one of 'auto'"),
        ({"input_splits": [2, 1]}, ArgumentError, "input_splits: expected both"),
        ({"input_splits": [3], "output_splits": [3]}, RankCountError, "input_splits: expected one"),
        (
            {"input_splits": [2, 1], "output_splits": [3]},
            RankCountError,
            "output_splits: expected one",
        ),
        (
            {"input_splits": [2, 2], "output_splits": [2, 2]},
            ShapeError,
            "input_splits: expected a sum of 3",
        ),
        ({"input_splits": [4, -1], "output_splits": [4, 0]}, ArgumentError, "input_splits.1.: exp"),
        (
            {"input_splits": [2, 1], "output_splits": [2, 1], "max_rows": 1},
            ShapeError,
            "max_rows: expected at least 2",
        ),
    ],
)
def test_bad_input(options, error, message, ranks_on):
    """Found before any rank waits: the group works afterwards."""

    def body(group):
        x = torch.ones(3, 2)
        mine = dict(options)
        if group.rank == 1 and len(mine.get("input_splits", ())) == 2:
            mine["input_splits"] = mine["input_splits"][::-1]
            if len(mine.get("output_splits", ())) == 2:
                mine["output_splits"] = mine["output_splits"][::-1]
            message_here = message.replace(".1.", ".0.")
        else:
            message_here = message
        with pytest.raises(error, match=message_here):
            plait.all_to_all(x, group=group, **mine)
        return plait.all_to_all(torch.full((2,), group.rank), group=group).tolist()

    assert ranks_on(body, 2) == [[0, 1], [0, 1]]


def test_keeping_other_rows_than_one_sends_oneself(ranks_on):
    def body(group):
        splits = {"input_splits": [2, 2], "output_splits": [3, 3]}
        with pytest.raises(ShapeError, match="output_splits: expected 2 for rank"):
            plait.all_to_all(torch.ones(4), group=group, **splits)

    ranks_on(body, 2)


@pytest.mark.parametrize(("max_rows", "debug"), [(None, False), (9, True)])
def test_ranks_whose_splits_differ_all_raise(max_rows, debug, ranks_on):
    def body(group):
        receives = [[1, 2], [2, 1]][group.rank]  # rank 0 sends 1 row to rank 1, which expects 2
        splits = {"input_splits": [1, 1], "output_splits": receives, "max_rows": max_rows}
        with pytest.raises(
            ShapeError, match="output_splits: expected 1 rows of rank 0 on rank 1, got 2"
        ):
            plait.all_to_all(torch.ones(2), group=group, **splits)
        return plait.all_to_all(torch.ones(2), group=group).tolist()

    with override(debug=debug):
        assert ranks_on(body, 2) == [[1.0, 1.0]] * 2


def test_ranks_whose_bounds_differ_are_told(ranks_on):
    def body(group):
        splits = {"input_splits": [1, 1], "output_splits": [1, 1]}
        plait.all_to_all(torch.ones(2), group=group, max_rows=5 + group.rank, **splits)

    with pytest.raises(RanksDisagreeError, match="max_rows=5"):
        ranks_on(body, 2)
