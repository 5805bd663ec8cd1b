"""plait.all_gather on virtual ranks: bitwise, whatever the dtype, strides and schedule."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.collectives.reference import all_gather_reference
from plait.errors import ArgumentError, CapacityError, RankCountError, ShapeError
from plait.settings import override

UNEVEN = {1: [5], 2: [4, 1], 3: [2, 0, 5], 4: [3, 1, 0, 2], 5: [1, 0, 2, 4, 0]}


@pytest.mark.parametrize("world_size", UNEVEN)
def test_every_dim_even_and_uneven(world_size, ranks_on, bitwise):
    cases = []  # (each rank's x, dim, rows_per_rank)
    for dim in (0, 1, 2, -1):
        for rows in (UNEVEN[world_size], None):
            xs = []
            for rank in range(world_size):
                shape = [2, 3, 4]
                shape[dim] = rows[rank] if rows else 2
                xs.append(torch.randn(shape))
            cases.append((xs, dim, rows))

    def body(group):
        return [
            plait.all_gather(xs[group.rank], group=group, dim=dim, rows_per_rank=rows)
            for xs, dim, rows in cases
        ]

    for results in ranks_on(body, world_size):
        for got, (xs, dim, _) in zip(results, cases, strict=True):
            bitwise(got, all_gather_reference(xs, dim))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64,
        torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_any_dtype_keeps_its_bits(dtype, ranks_on, bitwise):
    # Random bits: NaNs with payloads among them.
    nbytes = 2 * 30 * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    xs = torch.randint(0, high, (nbytes,), dtype=torch.uint8).view(dtype).view(2, 5, 6)

    def body(group):
        x = xs[group.rank]
        return [plait.all_gather(x, group=group, dim=dim) for dim in (0, 1)]

    for results in ranks_on(body, 2):
        for dim, got in enumerate(results):
            bitwise(got, all_gather_reference(list(xs), dim))


def test_strided_and_broadcast_inputs(ranks_on, bitwise):
    base = torch.randn(2, 6, 8)
    xs = [
        [b.t() for b in base],
        [b[::2, 1:7] for b in base],
        [b[:1].expand(4, 8) for b in base],
        [b[:, 2] for b in base],
    ]

    def body(group):
        return [plait.all_gather(x[group.rank], group=group) for x in xs]

    for results in ranks_on(body, 2):
        for got, x in zip(results, xs, strict=True):
            bitwise(got, all_gather_reference(x))


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_back_to_back(world_size, schedule, seed, ranks_on, bitwise):
    sizes = UNEVEN[world_size]
    rounds = [[torch.randn(size, 9) for size in sizes] for _ in range(6)]

    def body(group):
        return [plait.all_gather(xs[group.rank], group=group, rows_per_rank=sizes) for xs in rounds]

    for outs in ranks_on(body, world_size, seed, schedule=schedule, sm_slots=1):
        for xs, got in zip(rounds, outs, strict=True):
            bitwise(got, all_gather_reference(xs))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_a_small_workspace(dim, small_workspace, ranks_on, bitwise):
    sizes = [9, 0, 4]
    xs = []
    for size in sizes:
        shape = [5, 5, 5]
        shape[dim] = size
        xs.append(torch.randn(shape))

    def body(group):
        x = xs[group.rank]
        return plait.all_gather(x, group=group, dim=dim, rows_per_rank=sizes), group.memory()

    for got, memory in ranks_on(body, 3):
        bitwise(got, all_gather_reference(xs, dim))
        assert 0 < memory["region 0"] <= 2048
        assert memory["region 1"], "only one region: the call was not sliced"


def test_workspace_without_room_for_one_row(ranks_on):
    with override(workspace_bytes=512), pytest.raises(CapacityError, match="PLAIT_WORKSPACE_BYTES"):
        ranks_on(lambda group: plait.all_gather(torch.ones(2, 64), group=group), 2)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (2, 0, 5)])
def test_empty(shape, ranks_on):
    for got in ranks_on(lambda group: plait.all_gather(torch.empty(shape), group=group), 2):
        assert got.shape == (2 * shape[0], *shape[1:])


@pytest.mark.parametrize("impl", ["auto", "unfused", "reference"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradient(impl, dim, ranks_on, bitwise):
    sizes = [3, 1]
    xs = [torch.randn(size, 4) if dim == 0 else torch.randn(4, size) for size in sizes]
    weights = torch.randn(2, 4, 4)

    def body(group):
        x = xs[group.rank].clone().requires_grad_()
        out = plait.all_gather(x, group=group, dim=dim, rows_per_rank=sizes, impl=impl)
        (out * weights[group.rank]).sum().backward()
        return x.grad

    total = weights[0] + weights[1]
    for got, want in zip(ranks_on(body, 2), total.split(sizes, dim), strict=True):
        bitwise(got, want.contiguous())


@pytest.mark.parametrize(
    ("impl", "served"), [("auto", "fused"), ("unfused", "unfused"), ("reference", "reference")]
)
def test_last_run_names_what_served(impl, served, ranks_on):
    def body(group):
        plait.all_gather(torch.ones(2), group=group, impl=impl)
        return plait.last_run()

    for record in ranks_on(body, 2):
        assert (record.operator, record.impl) == ("all_gather", served)


@pytest.mark.parametrize("rows", [[], [3, 3]])
def test_operator_passes_opcheck(rows, ranks_on):
    def body(group):
        return torch.library.opcheck(
            torch.ops.plait.all_gather,
            (torch.randn(3, 2), group.name, 0, rows, "auto"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    for outcome in ranks_on(body, 2):
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dim": 2}, ShapeError, "dim: expected an integer from -2 to 1"),
        ({"rows_per_rank": [4]}, RankCountError, "rows_per_rank: expected one entry per rank"),
        ({"rows_per_rank": [3, 3]}, ShapeError, "rows_per_rank: expected 4 for rank"),
        ({"impl": "fast"}, ArgumentError, "impl: expected one of 'auto'"),
    ],
)
def test_bad_input(options, error, message, ranks_on):
    def body(group):
        with pytest.raises(error, match=message):
            plait.all_gather(torch.ones(4, 3), group=group, **options)
        return plait.all_gather(torch.ones(1), group=group).tolist()

    assert ranks_on(body, 2) == [[1.0, 1.0]] * 2
