"""plait.all_reduce on virtual ranks: one result everywhere, the same bits by both algorithms."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.collectives.all_reduce import choose_algorithm, share_sizes
from plait.collectives.reference import all_reduce_reference
from plait.errors import ArgumentError, DtypeError
from plait.settings import override

ALGORITHMS = ("one_shot", "two_shot")
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (2, 0, 3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_any_shape_by_both_algorithms(world_size, ranks_on, bitwise):
    data = [torch.randn(world_size, *shape) for shape in SHAPES]

    def body(group):
        return [
            plait.all_reduce(xs[group.rank], group=group, algorithm=algorithm)
            for xs in data
            for algorithm in ALGORITHMS
        ]

    for results in ranks_on(body, world_size):
        wanted = [all_reduce_reference(list(xs)) for xs in data for _ in ALGORITHMS]
        for got, want in zip(results, wanted, strict=True):
            bitwise(got, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_rounds_where_it_says(algorithm, dtype, reduce_dtype, ranks_on, bitwise):
    xs = torch.randn(3, 101).to(dtype)

    def body(group):
        return plait.all_reduce(
            xs[group.rank], group=group, reduce_dtype=reduce_dtype, algorithm=algorithm
        )

    for got in ranks_on(body, 3):
        bitwise(got, all_reduce_reference(list(xs), reduce_dtype))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strided_input_stays_and_result_is_new(algorithm, ranks_on, bitwise):
    base = torch.randn(2, 6, 8)
    before = base.clone()

    def body(group):
        x = base[group.rank].t()[::2]
        out = plait.all_reduce(x, group=group, algorithm=algorithm)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return out

    for got in ranks_on(body, 2):
        bitwise(got, all_reduce_reference([b.t()[::2] for b in base]))
    bitwise(base, before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_back_to_back(algorithm, schedule, seed, ranks_on, bitwise):
    """Region reuse: new data in every call, more calls than regions, one block at a time."""
    xs = torch.randn(5, 3, 700)

    def body(group):
        return [plait.all_reduce(x[group.rank], group=group, algorithm=algorithm) for x in xs]

    for outs in ranks_on(body, 3, seed, schedule=schedule, sm_slots=1):
        for x, got in zip(xs, outs, strict=True):
            bitwise(got, all_reduce_reference(list(x)))


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_larger_than_the_workspace_and_small_again(algorithm, ranks_on, bitwise):
    large, small = torch.randn(2, 6000), torch.randn(2, 5)

    def body(group):
        results = [
            plait.all_reduce(xs[group.rank], group=group, algorithm=algorithm)
            for xs in (large, small, large)
        ]
        return results, group.memory()

    with override(workspace_bytes=16 * 1024):
        outcomes = ranks_on(body, 2)
    for (first, second, third), memory in outcomes:
        bitwise(first, all_reduce_reference(list(large)))
        bitwise(second, all_reduce_reference(list(small)))
        bitwise(third, first)
        assert memory["region 0"] + memory["region 1"] <= 16 * 1024


@pytest.mark.parametrize("impl", ["auto", "unfused", "reference"])
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_gradient(impl, shape, ranks_on, bitwise):
    xs, weights = torch.randn(2, *shape), torch.randn(2, *shape)

    def body(group):
        x = xs[group.rank].clone().requires_grad_()
        (plait.all_reduce(x, group=group, impl=impl) * weights[group.rank]).sum().backward()
        return x.grad

    for got in ranks_on(body, 2):
        bitwise(got, weights[0] + weights[1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_other_dtypes_only_by_reference(dtype, ranks_on, bitwise):
    xs = [torch.arange(8).to(dtype), 5 - torch.arange(8).to(dtype)]

    def body(group):
        with pytest.raises(DtypeError, match=f"x: expected dtype .*got {dtype}"):
            plait.all_reduce(xs[group.rank], group=group)
        return plait.all_reduce(xs[group.rank], group=group, impl="reference")

    for got in ranks_on(body, 2):
        bitwise(got, all_reduce_reference(xs))


def test_auto_takes_one_shot_for_small_tensors():
    room = 1 << 30
    assert choose_algorithm(1 << 10, 2, 8, room) == "one_shot"
    assert choose_algorithm(1 << 26, 2, 8, room) == "two_shot"
    assert choose_algorithm(1 << 26, 2, 2, room) == "one_shot"  # both send the same bytes
    assert choose_algorithm(1 << 10, 2, 8, 4096) == "two_shot"  # does not fit
    assert choose_algorithm(1 << 26, 2, 8, room, "one_shot") == "one_shot"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_elements", [1, 4, 127, 128, 129, 1000, 4096, 100_003])
def test_shares_cover_everything_and_start_aligned(num_elements, world_size):
    sizes = share_sizes(num_elements, world_size)
    assert len(sizes) == world_size
    assert sum(sizes) == num_elements
    assert min(sizes) >= 0
    if num_elements > 128 * world_size:
        assert all(sum(sizes[:rank]) % 128 == 0 for rank in range(world_size) if sizes[rank])


def test_last_run_names_what_served(ranks_on):
    def body(group):
        plait.all_reduce(torch.ones(2), group=group)
        first = plait.last_run()
        plait.all_reduce(torch.ones(2), group=group, impl="reference")
        return first, plait.last_run()

    for fused, reference in ranks_on(body, 2):
        assert (fused.operator, fused.impl) == ("all_reduce", "fused")
        assert (reference.operator, reference.impl) == ("all_reduce", "reference")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operator_passes_opcheck(algorithm, ranks_on):
    def body(group):
        return torch.library.opcheck(
            torch.ops.plait.all_reduce,
            (torch.randn(3, 2), group.name, torch.bfloat16, algorithm, "auto"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    for outcome in ranks_on(body, 2):
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": "ring"}, ArgumentError, "algorithm: expected one of 'auto'"),
        ({"impl": "fast"}, ArgumentError, "impl: expected one of 'auto'"),
        ({"reduce_dtype": torch.int32}, DtypeError, "reduce_dtype: expected dtype"),
    ],
)
def test_bad_input(options, error, message, ranks_on):
    def body(group):
        with pytest.raises(error, match=message):
            plait.all_reduce(torch.ones(4, 3), group=group, **options)
        return plait.all_reduce(torch.ones(()), group=group).item()

    assert ranks_on(body, 2) == [2.0, 2.0]
