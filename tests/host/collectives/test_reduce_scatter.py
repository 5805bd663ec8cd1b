"""plait.reduce_scatter on virtual ranks: the bits of the reference, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.collectives.reference import reduce_scatter_reference
from plait.errors import ArgumentError, CapacityError, DtypeError, RankCountError, ShapeError
from plait.settings import override

UNEVEN = {1: [5], 2: [4, 1], 3: [2, 0, 5], 4: [3, 1, 0, 2], 5: [1, 0, 2, 4, 0]}


@pytest.mark.parametrize("world_size", UNEVEN)
def test_every_dim_even_and_uneven(world_size, ranks_on, bitwise):
    sizes = UNEVEN[world_size]
    cases = []  # (each rank's x, dim, rows_per_rank, sizes)
    for dim in (0, 1, 2, -1):
        for rows in (sizes, None):
            shape = [2, 3, 4]
            shape[dim] = sum(sizes) if rows else 2 * world_size
            xs = torch.randn(world_size, *shape)
            cases.append((xs, dim, rows, rows or [2] * world_size))

    def body(group):
        return [
            plait.reduce_scatter(xs[group.rank], group=group, dim=dim, rows_per_rank=rows)
            for xs, dim, rows, _ in cases
        ]

    for rank, results in enumerate(ranks_on(body, world_size)):
        for got, (xs, dim, _, shares) in zip(results, cases, strict=True):
            bitwise(got, reduce_scatter_reference(list(xs), rank, shares, dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_rounds_where_it_says(dtype, reduce_dtype, out_dtype, ranks_on, bitwise):
    xs = [torch.randn(6, 50).to(dtype) for _ in range(3)]

    def body(group):
        return plait.reduce_scatter(
            xs[group.rank], group=group, reduce_dtype=reduce_dtype, out_dtype=out_dtype
        )

    for rank, got in enumerate(ranks_on(body, 3)):
        bitwise(got, reduce_scatter_reference(xs, rank, [2] * 3, 0, reduce_dtype, out_dtype))


def test_adds_in_rank_order_in_fp32(ranks_on):
    # In fp32 (1e8 + 1) - 1e8 is 0 and 1e8 - 1e8 + 1 is 1; in bf16 256 + 1 would stay 256.
    values = torch.tensor([[1e8, 1e8], [1.0, -1e8], [-1e8, 1.0]])
    narrow = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)

    def body(group):
        x = values[group.rank].repeat(3, 1)
        y = narrow[group.rank].repeat(3, 1)
        return plait.reduce_scatter(x, group=group), plait.reduce_scatter(y, group=group)

    for wide, low in ranks_on(body, 3):
        assert wide.tolist() == [[0.0, 1.0]]
        assert low.tolist() == [[258.0]]


def test_sign_of_zero_and_special_values(ranks_on, bitwise):
    row = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), 1e-45, 3e38])
    xs = [row.repeat(2, 1), torch.full((2, 6), -0.0)]
    results = ranks_on(lambda group: plait.reduce_scatter(xs[group.rank], group=group), 2)
    for rank, got in enumerate(results):
        bitwise(got, reduce_scatter_reference(xs, rank, [1, 1]))


def test_strided_and_broadcast_inputs(ranks_on, bitwise):
    base = torch.randn(2, 8, 12)
    xs = [
        [b.t() for b in base],
        [b[::2, 1:7] for b in base],
        [b[:1].expand(4, 12) for b in base],
        [b[:, :1].expand(8, 6) for b in base],
    ]

    def body(group):
        return [
            plait.reduce_scatter(x[group.rank], group=group, dim=dim) for x in xs for dim in (0, 1)
        ]

    for rank, results in enumerate(ranks_on(body, 2)):
        wanted = [
            reduce_scatter_reference(x, rank, [x[0].shape[dim] // 2] * 2, dim)
            for x in xs
            for dim in (0, 1)
        ]
        for got, want in zip(results, wanted, strict=True):
            bitwise(got, want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_back_to_back(world_size, schedule, seed, ranks_on, bitwise):
    """Region reuse: six calls with new data, more than there are regions, one block at a time."""
    sizes = UNEVEN[world_size]
    xs = torch.randn(6, world_size, sum(sizes), 130)

    def body(group):
        return [plait.reduce_scatter(x[group.rank], group=group, rows_per_rank=sizes) for x in xs]

    results = ranks_on(body, world_size, seed, schedule=schedule, sm_slots=1)
    for rank, outs in enumerate(results):
        for x, got in zip(xs, outs, strict=True):
            bitwise(got, reduce_scatter_reference(list(x), rank, sizes))


def test_slices_of_a_small_workspace(small_workspace, ranks_on, bitwise):
    sizes = [7, 0, 3]
    xs = torch.randn(3, 2, 10, 33)

    def body(group):
        out = plait.reduce_scatter(xs[group.rank], group=group, dim=1, rows_per_rank=sizes)
        return out, group.memory()

    for rank, (got, memory) in enumerate(ranks_on(body, 3)):
        bitwise(got, reduce_scatter_reference(list(xs), rank, sizes, 1))
        assert 0 < memory["region 0"] <= 2048
        assert memory["region 1"], "only one region: the call was not sliced"


def test_workspace_without_room_for_one_element(ranks_on):
    with override(workspace_bytes=512), pytest.raises(CapacityError, match="PLAIT_WORKSPACE_BYTES"):
        ranks_on(lambda group: plait.reduce_scatter(torch.ones(8), group=group), 8)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (2, 0, 5)])
def test_empty(shape, ranks_on):
    def body(group):
        return plait.reduce_scatter(torch.empty(shape), group=group)

    for got in ranks_on(body, 2):
        assert got.shape == (shape[0] // 2, *shape[1:])


def test_only_one_rank_has_rows(ranks_on, bitwise):
    xs = torch.randn(3, 5, 4)

    def body(group):
        return plait.reduce_scatter(xs[group.rank], group=group, rows_per_rank=[0, 5, 0])

    for rank, got in enumerate(ranks_on(body, 3)):
        bitwise(got, reduce_scatter_reference(list(xs), rank, [0, 5, 0]))


@pytest.mark.parametrize("impl", ["auto", "unfused", "reference"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradient(impl, dim, ranks_on, bitwise):
    sizes = [3, 1]
    xs = torch.randn(2, 4, 4)
    weights = [torch.randn(size, 4) if dim == 0 else torch.randn(4, size) for size in sizes]

    def body(group):
        x = xs[group.rank].clone().requires_grad_()
        out = plait.reduce_scatter(x, group=group, dim=dim, rows_per_rank=sizes, impl=impl)
        (out * weights[group.rank]).sum().backward()
        return x.grad

    leaves = [x.clone().requires_grad_() for x in xs]
    loss = 0.0
    for rank, weight in enumerate(weights):
        loss = loss + (reduce_scatter_reference(leaves, rank, sizes, dim) * weight).sum()
    loss.backward()
    for got, leaf in zip(ranks_on(body, 2), leaves, strict=True):
        bitwise(got, leaf.grad)


def test_gradient_has_the_dtype_of_x(ranks_on):
    def body(group):
        x = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
        out = plait.reduce_scatter(x, group=group, out_dtype=torch.float32)
        (out * (1 + group.rank)).sum().backward()
        return out.dtype, x.grad

    for dtype, grad in ranks_on(body, 2):
        assert dtype == torch.float32
        assert grad.dtype == torch.bfloat16
        assert grad.tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int8])
def test_other_dtypes_only_by_reference(dtype, ranks_on, bitwise):
    xs = [torch.arange(8).to(dtype), 5 - torch.arange(8).to(dtype)]

    def body(group):
        with pytest.raises(DtypeError, match=f"x: expected dtype .*got {dtype}"):
            plait.reduce_scatter(xs[group.rank], group=group)
        return plait.reduce_scatter(xs[group.rank], group=group, impl="reference")

    for rank, got in enumerate(ranks_on(body, 2)):
        bitwise(got, reduce_scatter_reference(xs, rank, [4, 4]))


@pytest.mark.parametrize(
    ("impl", "served"), [("auto", "fused"), ("unfused", "unfused"), ("reference", "reference")]
)
def test_last_run_names_what_served(impl, served, ranks_on):
    def body(group):
        plait.reduce_scatter(torch.ones(2), group=group, impl=impl)
        return plait.last_run()

    for record in ranks_on(body, 2):
        assert (record.operator, record.impl) == ("reduce_scatter", served)


@pytest.mark.parametrize("rows", [[], [3, 1]])
def test_operator_passes_opcheck(rows, ranks_on):
    def body(group):
        args = (torch.randn(4, 3), group.name, 0, rows, None, "auto", torch.bfloat16)
        return torch.library.opcheck(
            torch.ops.plait.reduce_scatter,
            args,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    for outcome in ranks_on(body, 2):
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dim": 2}, ShapeError, "dim: expected an integer from -2 to 1"),
        (
            {"dim": 1},
            ShapeError,
            "x: expected a size along the scattered dim that 2 ranks divide, got 3",
        ),
        ({"rows_per_rank": [4]}, RankCountError, "rows_per_rank: expected one entry per rank"),
        ({"rows_per_rank": [4, 1]}, ShapeError, "rows_per_rank: expected a sum of 4"),
        ({"rows_per_rank": [5, -1]}, ArgumentError, "rows_per_rank.1.: expected"),
        ({"impl": "fast"}, ArgumentError, "impl: expected one of 'auto'"),
        ({"reduce_dtype": torch.float64}, DtypeError, "reduce_dtype: expected dtype"),
        ({"out_dtype": torch.int32}, DtypeError, "out_dtype: expected dtype"),
    ],
)
def test_bad_input(options, error, message, ranks_on):
    def body(group):
        with pytest.raises(error, match=message):
            plait.reduce_scatter(torch.ones(4, 3), group=group, **options)
        return plait.reduce_scatter(torch.ones(2), group=group).item()

    assert ranks_on(body, 2) == [2.0, 2.0]


def test_not_a_tensor_and_no_dims(ranks_on):
    def body(group):
        with pytest.raises(ArgumentError, match=r"x: expected a torch\.Tensor"):
            plait.reduce_scatter([1.0], group=group)
        with pytest.raises(ShapeError, match="x: expected at least 1 dim"):
            plait.reduce_scatter(torch.ones(()), group=group)

    ranks_on(body, 1)
