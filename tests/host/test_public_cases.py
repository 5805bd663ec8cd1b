"""Mistakes that users of other libraries reported in public, as tests: a name and a report each.

D01 (stale flags between calls), D19 (tail tiles) and D21 for AG+GEMM are in test_ag_gemm.py.
"""

import pytest
import torch
import triton
import triton.language as tl

import plait
from plait.collectives.reference import all_reduce_reference
from plait.errors import RaceError, ShapeError, UnsupportedError
from plait.settings import override
from plait.symm.lang import (
    READY,
    USER,
    data_ptr,
    get,
    get_epoch,
    get_rank,
    put,
    signal,
    wait,
)
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap.sum_cases import (
    call,
    check_results,
    compare_all,
    integers,
    make_case,
    repeat,
    run_case,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("late", [0, 1])
def test_D02_the_next_call_does_not_overwrite_what_a_peer_still_reads(late):
    """lightseekorg/tokenspeed#1017: "ready" does not say that the peer has consumed the payload."""

    def fn(group):
        x, sums = group.empty(1, 4), []  # one symmetric input for all calls
        for index in range(100):
            x.fill_(2.0 * index + group.rank)
            sums.append(plait.all_reduce(x, group=group)[0, 0].item())
        return sums

    for sums in run_virtual(fn, 2, schedule=f"late:{late}", check=False):
        assert sums == [4.0 * index + 1 for index in range(100)]


@pytest.mark.parametrize("late", [0, 1])
def test_D02_a_rank_that_only_sends_does_not_run_ahead(late):
    """The same report, where nothing but "consumed" holds the sender back: all rows are the late
    rank's, so that the other one never waits for data."""
    rows = [0, 0]
    rows[late] = 2
    make = lambda: make_case("gemm_rs", 2, 2, 8, 4, exact=True, rows_per_rank=rows)  # noqa: E731
    repeat(make, 60, 2, schedule=f"late:{late}", check=False)


@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_D04_every_call_uses_what_the_input_holds_now(operator):
    """meta-pytorch/torchcomms#1177, eager half: an old signal satisfied a later wait."""
    rounds = torch.stack([integers(2, 4, 16) for _ in range(20)])  # round, rank, rows, K
    weights = torch.stack([integers(6, 16) for _ in range(2)])

    def fn(group):
        x, outs = torch.empty(4, 16), []
        for each in rounds:
            x.copy_(each[group.rank])
            outs.append(getattr(plait, operator)(x, weights[group.rank], group=group))
        return outs

    for rank, outs in enumerate(run_virtual(fn, 2, schedule="consumer_first")):
        for xs, out in zip(rounds, outs, strict=True):
            total = xs[0] @ weights[0].t() + xs[1] @ weights[1].t()
            expected = {
                "ag_gemm": xs.flatten(0, 1) @ weights[rank].t(),
                "gemm_rs": total[2 * rank : 2 * rank + 2],
                "gemm_ar": total,
            }[operator]
            assert_bitwise(out, expected)


@pytest.mark.parametrize(("m", "rows"), [(8, [1] * 8), (1, [0, 1]), (2, [1, 1]), (3, [2, 1])])
def test_D17_fewer_rows_than_any_tile_has(m, rows):
    """ByteDance-Seed/Triton-distributed#63: GEMM+RS failed for the smallest M of 8 on 8 ranks."""
    world_size = len(rows)
    case = make_case("gemm_rs", world_size, m, 16, 12, BF16, exact=True, rows_per_rank=rows)
    run_case(case)
    case.options = {}
    if m % world_size == 0:
        run_case(case)
    else:
        with pytest.raises(ShapeError, match=rf"2 ranks divide, got {m}\. Pass rows_per_rank"):
            run_virtual(lambda group: call(case, group), world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_D20_the_number_of_ranks_comes_from_the_group(world_size):
    """ByteDance-Seed/Triton-distributed#79: AG+GEMM hung on two GPUs; the default was eight."""
    xs = [integers(4, 16) for _ in range(world_size)]
    weights = [integers(8, 16) for _ in range(world_size)]
    cases = [
        make_case(operator, world_size, 2 * world_size, 16, 8, exact=True)
        for operator in ("gemm_rs", "gemm_ar")
    ]

    def fn(group):
        gathered = plait.ag_gemm(xs[group.rank], weights[group.rank], group=group)
        return [gathered, *(call(case, group) for case in cases)]

    results = run_virtual(fn, world_size, schedule="waiter_first")
    for outs, weight in zip(results, weights, strict=True):
        assert_bitwise(outs[0], torch.cat(xs) @ weight.t())
    compare_all(cases, [outs[1:] for outs in results])


def test_D21_no_column_is_dropped_where_ranks_do_not_divide():
    """pytorch/pytorch#165653: shapes were divided by three ranks and the rest forgotten."""
    options = {"exact": True, "scatter_dim": 1}
    run_case(make_case("gemm_rs", 3, 4, 8, 33, **options), "unfused")
    run_case(make_case("gemm_rs", 3, 4, 8, 32, rows_per_rank=[11, 11, 10], **options), "unfused")
    case = make_case("gemm_rs", 3, 4, 8, 32, **options)
    with pytest.raises(ShapeError, match="3 ranks divide, got 32"):
        run_virtual(lambda group: call(case, group), 3)
    weight = integers(6, 32)
    gather = lambda g: plait.ag_gemm(integers(4, 11), weight, group=g, gather_dim=1)  # noqa: E731
    with pytest.raises(ShapeError, match=r"weight: expected shape \[N, 33\]"):
        run_virtual(gather, 3)


@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "two_shot"])
def test_D22_tensors_larger_than_the_symmetric_buffer(algorithm):
    """sgl-project/sglang#24548: a tensor of 224 MiB was copied into a buffer of 64 MiB."""
    large, small = integers(2, 56, 64), integers(2, 3, 5)
    gemm = make_case("gemm_ar", 2, 56, 8, 64, exact=True, algorithm=algorithm)

    def fn(group):
        outs = [
            plait.all_reduce(xs[group.rank], group=group, algorithm=algorithm)
            for xs in (large, small, large)
        ]
        return outs, call(gemm, group), group.memory()

    with override(workspace_bytes=2 * 4096):  # one large tensor has 14 KiB
        results = run_virtual(fn, 2)
    for outs, _, memory in results:
        for out, xs in zip(outs, (large, small, large), strict=True):
            assert_bitwise(out, all_reduce_reference(list(xs)))
        assert memory["region 0"] + memory["region 1"] <= 2 * 4096
    check_results(gemm, [out for _, out, _ in results])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scatter_dim", [0, 1])
def test_D26_a_scattered_dim_that_is_not_the_first(world_size, scatter_dim):
    """pytorch/pytorch#153595: dims were swapped for the scatter and not swapped back."""
    shape = (2, 8) if scatter_dim else (world_size, 5)
    run_case(make_case("gemm_rs", world_size, shape, 16, 12, exact=True, scatter_dim=scatter_dim))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_D27_scattering_columns_is_not_scattering_rows(dtype):
    """pytorch/pytorch#162736: mm + split(N) + cat + reduce_scatter was fused as if it split M."""
    case = make_case("gemm_rs", 2, 6, 16, 8, dtype, exact=True, scatter_dim=-1)

    def fn(group):
        product = case.xs[group.rank] @ case.weights[group.rank].t()
        rows = torch.cat(product.split(4, dim=-1), dim=0)
        return call(case, group), plait.reduce_scatter(rows, group=group)

    for out, expected in run_virtual(fn, 2):
        assert_bitwise(out, expected)
    case.options["impl"] = "fused"
    with pytest.raises(UnsupportedError, match="last dim"):
        run_virtual(lambda group: call(case, group), 2)


@triton.jit
def _send_kernel(ctx_ptr, x_ptr, out_ptr, n, SIGNAL_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Two ranks, one block: the out [n] of rank 1 becomes the x [n] of rank 0."""
    epoch = get_epoch(ctx_ptr)
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    if get_rank(ctx_ptr) == 0:
        if SIGNAL_FIRST:
            signal(ctx_ptr, 1, READY, epoch)
        there = data_ptr(ctx_ptr, 1, tl.float32)
        put(ctx_ptr, 1, there, offs, tl.load(x_ptr + offs, mask=mask), mask)
        if not SIGNAL_FIRST:
            signal(ctx_ptr, 1, READY, epoch)
    else:
        arrived = wait(ctx_ptr, READY, epoch, 0, USER)
        values = get(data_ptr(ctx_ptr, 1, tl.float32), offs, mask, 0.0)
        tl.store(out_ptr + offs, tl.where(arrived, values, float("nan")), mask=mask)


def send(x, group, signal_first=False):
    out = torch.zeros_like(x)
    region = group.take_region(x.numel() * x.element_size())
    options = {"n": len(x), "SIGNAL_FIRST": signal_first, "BLOCK": 8}
    group.launch(_send_kernel, 1, region=region, x_ptr=x, out_ptr=out, **options)
    return out


@pytest.mark.parametrize("schedule", ["random", "late:0", "late:1"])
def test_D29_data_before_its_flag(schedule):
    """pytorch/pytorch#158167: no fence between data and signal, and a wait of another kind."""
    rounds = torch.randn(50, 5)
    zeros, outs = run_virtual(lambda g: [send(x, g) for x in rounds], 2, schedule=schedule)
    assert_bitwise(torch.stack(outs), rounds)
    assert_bitwise(torch.stack(zeros), torch.zeros(50, 5))


def test_D29_a_flag_before_its_data_is_found():
    """The same report: the checker names the race, whatever values came out."""
    with pytest.raises(RaceError, match="_send_kernel"):
        run_virtual(lambda group: send(torch.ones(5), group, signal_first=True), 2)
