"""The greedy schedules: by hand, against a plain heap, against an earlier model, and invariants."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ArgumentError
from plait.model.predict import calibrated, candidate_plans, plain_gemm_us, predict
from plait.model.problem import OPERATORS, Link, Plan, Problem
from plait.model.rates import H200, Rates, TileRate
from plait.model.schedule import Sms, gemm_rs_us

# Four SMs; a tile of 16x16 over K=100 takes 2 * 256 * 100 / 0.0512e6 = 1 us. Memory is no limit.
TOY = Rates("toy", 4, (TileRate(16, 16, 0.0512),), math.inf, math.inf, 0.0, 5.0, 1.0, "invented")
# 2 ranks; a row of x is 200 bytes: at 0.1 GB/s 2 us.
TOY_AG = Problem("ag_gemm", 64, 64, 100, 2)
# As an earlier model had them: one rate a tile, a reduction pass at 4 TB/s, memory no limit.
EARLIER = Rates(
    "NVIDIA H200",
    132,
    tuple(
        TileRate(m, n, rate / 132)
        for m, n, rate in ((256, 128, 731), (128, 256, 700), (128, 128, 640))
    ),
    copy_tb_s=4.0,
    read_tb_s=math.inf,
    start_us=0.0,
    launch_us=3.0,
    library_share=0.97,
    source="invented",
)


# By hand


def test_ag_gemm_waits_for_its_chunks():
    # 2 x 2 tiles of own rows: 1 us. The peer's 32 rows take 64 us; two chunks, at 33 and 65 us.
    link, plan = Link(0.1, latency_us=1.0), Plan(16, 16, 2)
    found = predict(TOY_AG, link, TOY, plan=plan)
    assert found.gemm_us == found.kernel_us == 2.0
    assert found.comm_us == 65.0
    assert found.unfused_us == 67.0
    assert found.overlapped_us == 66.0
    assert found.bound_ratio == pytest.approx(66 / 65)
    assert found.dominant == "communication"


def test_ag_gemm_on_a_fast_link_is_the_product():
    found = predict(TOY_AG, Link(1e6, latency_us=0.5), TOY, plan=Plan(16, 16, 1))
    assert found.overlapped_us == found.kernel_us == 2.0
    assert found.dominant == "computation"
    assert found.efficiency == pytest.approx(1.0)


def test_ag_gemm_pays_for_each_chunk():
    link = Link(0.1, latency_us=1.0, chunk_us=3.0)
    assert predict(TOY_AG, link, TOY, plan=Plan(16, 16, 2)).overlapped_us == 66.0 + 2 * 3.0


def test_gemm_rs_sends_chunks_and_waits_for_the_peers():
    # K is 100 a rank; 32 rows of 128 bytes go out: 2 chunks of 20.48 us, the first ready at 1 us.
    problem = Problem("gemm_rs", 64, 64, 200, 2)
    link, plan = Link(0.1, latency_us=1.0), Plan(16, 16, 2)
    found = predict(problem, link, TOY, plan=plan)
    assert found.comm_us == pytest.approx(1 + 40.96)
    assert found.overlapped_us == pytest.approx(1 + 40.96 + 1)
    later = predict(problem, link, TOY, plan=plan, reduction="pass")
    assert later.overlapped_us == pytest.approx(found.overlapped_us + TOY.launch_us)
    assert found.unfused_us == pytest.approx(4 + 41.96 + TOY.launch_us)


def test_gemm_rs_adds_in_the_epilogue():
    # Own tiles read 512 bytes of partials each; at 0.001 TB/s shared by 4 SMs: 2.048 us a tile.
    slow = replace(TOY, copy_tb_s=0.001)
    problem = Problem("gemm_rs", 64, 64, 200, 2)
    found = predict(problem, Link(1e6, latency_us=0.0), slow, plan=Plan(16, 16, 1))
    assert found.overlapped_us == pytest.approx(2 + 2 * (1 + 2.048))


def test_gemm_ar_has_two_hops_or_more_bytes():
    problem = Problem("gemm_ar", 64, 64, 400, 4)
    link, plan = Link(0.1, latency_us=1.0), Plan(16, 16, 1)
    two = predict(problem, link, TOY, plan=plan, algorithm="two_shot")
    one = predict(problem, link, TOY, plan=plan, algorithm="one_shot")
    shard_us = 16 * 128 / 100
    assert two.comm_us == pytest.approx(6 * shard_us + 1)  # the latency lies behind the transfers
    assert one.comm_us == pytest.approx(12 * shard_us + 1)
    # Two shots: first tiles at 1 us, three transfers, their latency, the sum, three transfers.
    assert two.overlapped_us == pytest.approx(1 + 3 * shard_us + 1 + 3 * shard_us + 1)
    assert one.overlapped_us == pytest.approx(4 + 12 * shard_us + 1)
    best = predict(problem, link, TOY, plan=plan)
    assert (best.algorithm, best.overlapped_us) == ("two_shot", two.overlapped_us)
    latency = predict(problem, Link(1e6, latency_us=50.0), TOY, plan=plan)
    assert latency.algorithm == "one_shot"


def test_reading_the_operands_takes_the_time_of_few_rows():
    found = predict(Problem("gemm_rs", 16, 12288, 49152, 8), Link(360.0), H200)
    weight_bytes = 12288 * 6144 * 2
    assert found.gemm_us == pytest.approx(H200.stream_us(weight_bytes), rel=0.01)
    assert found.gemm_us == pytest.approx(50.0, rel=0.1)  # measured: 49.6 us
    assert found.dominant == "memory"
    assert "memory dominates" in found.explain()


# Against an earlier model, whose figures these are


@pytest.mark.parametrize(
    ("problem", "bandwidth", "plan", "overlapped", "kernel", "comm", "gemm"),
    [
        (Problem("ag_gemm", 4096, 49152, 12288, 8), 360.0, Plan(128, 256, 4),
         922.8848, 911.1466, 247.6677, 833.5086),
        (Problem("ag_gemm", 4096, 49152, 12288, 8), 360.0, Plan(256, 128, 2),
         892.9833, 872.507, 247.6677, 833.5086),
        (Problem("ag_gemm", 8192, 28672, 8192, 8), 160.0, Plan(128, 128, 1),
         859.4769, 775.1074, 737.0032, 648.2845),
        (Problem("gemm_rs", 4096, 12288, 49152, 8), 360.0, Plan(128, 256, 2),
         942.4582, 911.1466, 247.6677, 833.5086),
        (Problem("gemm_rs", 8192, 8192, 28672, 8), 160.0, Plan(256, 128, 4),
         820.1655, 678.6166, 737.0032, 648.2845),
        (Problem("gemm_rs", 2048, 12288, 49152, 8), 360.0, Plan(256, 128, 2),
         465.1474, 436.2535, 125.3339, 416.7543),
    ],
)  # fmt: skip
def test_the_earlier_models_figures(problem, bandwidth, plan, overlapped, kernel, comm, gemm):
    found = predict(problem, Link(bandwidth), EARLIER, plan=plan, reduction="pass")
    assert found.overlapped_us == pytest.approx(overlapped, abs=1e-3)
    assert found.kernel_us == pytest.approx(kernel, abs=1e-3)
    assert found.comm_us == pytest.approx(comm, abs=1e-3)
    assert found.gemm_us == pytest.approx(gemm, abs=1e-3)


# Against a heap


@settings(deadline=None, max_examples=60)
@given(
    num_sms=st.integers(1, 7),
    groups=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=6),
    growth=st.integers(0, 3),
)
def test_sms_are_a_greedy_heap(num_sms, groups, growth):
    sms, heap, start, tile_us = Sms(num_sms), [0.0] * num_sms, 0.0, 4.0
    for count, later in groups:
        start += later
        last = start
        for _ in range(count):
            last = max(heapq.heappop(heap), start) + tile_us
            heapq.heappush(heap, last)
        assert sms.run(count, start, tile_us) == pytest.approx(last)
        tile_us += growth


# Invariants

problems = st.builds(
    lambda operator, world, rows, n, k, dtype_bytes: Problem(
        operator, rows, 64 * n * world, 64 * k * world, world, dtype_bytes
    ),
    st.sampled_from(OPERATORS),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.one_of(st.integers(1, 200), st.integers(1, 64).map(lambda each: 128 * each)),
    st.integers(1, 40),
    st.integers(1, 80),
    st.sampled_from([1, 2, 4]),
)
links = st.builds(Link, st.floats(5, 2000), st.floats(0, 10), st.sampled_from([0.0, 4.0]))


@settings(deadline=None, max_examples=150)
@given(problems, links, st.integers(100, 132))
def test_nothing_beats_the_bound(problem, link, num_sms):
    found = predict(problem, link, H200, num_sms=num_sms)
    assert found.overlapped_us >= found.bound_us * (1 - 1e-9)
    assert found.overlapped_us >= found.kernel_us * (1 - 1e-9)
    assert found.kernel_us >= found.gemm_us * (1 - 1e-9)
    assert found.unfused_us >= found.bound_us
    assert found.bound_ratio >= 1 - 1e-9
    assert found.comm_us == 0 or found.efficiency <= 1 + 1e-9
    every = [predict(problem, link, H200, plan=each) for each in candidate_plans(problem, H200)]
    assert all(each.overlapped_us >= each.bound_us * (1 - 1e-9) for each in every)


@settings(deadline=None, max_examples=100)
@given(problems, links, st.floats(1.0, 8.0))
def test_a_faster_link_is_never_slower(problem, link, factor):
    faster = replace(link, bandwidth_gb_s=link.bandwidth_gb_s * factor)
    sooner = replace(link, latency_us=link.latency_us / factor)
    before = predict(problem, link, H200)
    for other in (faster, sooner):
        after = predict(problem, other, H200)
        assert after.overlapped_us <= before.overlapped_us * (1 + 1e-9)
        assert after.comm_us <= before.comm_us * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(problems, links)
def test_one_rank_is_a_product(problem, link):
    alone = replace(problem, world_size=1)
    found = predict(alone, link, H200)
    assert found.comm_us == 0
    assert found.unfused_us == found.gemm_us
    assert found.overlapped_us == pytest.approx(found.kernel_us)
    assert math.isnan(found.efficiency)


@settings(deadline=None, max_examples=40)
@given(problems, links)
def test_an_endless_link_leaves_the_product(problem, link):
    ag = Problem("ag_gemm", problem.M, problem.N, problem.K, problem.world_size)
    found = predict(ag, Link(1e12, latency_us=0.0), H200)
    assert found.overlapped_us == pytest.approx(found.kernel_us, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(problems, links, st.floats(1.1, 4.0))
def test_a_faster_gpu_is_never_slower(problem, link, factor):
    plan = Plan(128, 128, 2)
    slow, fast = (predict(problem, link, H200.scaled(each), plan=plan) for each in (factor, 1.0))
    assert fast.overlapped_us <= slow.overlapped_us * (1 + 1e-9)
    assert fast.gemm_us <= slow.gemm_us


def test_every_word_of_the_rows_is_scheduled():
    # More tiles of the same kind take more waves: nothing is dropped by the cut into chunks.
    for chunks in (1, 3, 4, 7):
        for rows in (1, 5, 128, 1000):
            problem = Problem("gemm_rs", 8 * rows, 4096, 8 * 512, 8)
            plan = Plan(128, 128, chunks)
            fast = replace(H200, copy_tb_s=math.inf)
            end = gemm_rs_us(problem, Link(1e12, latency_us=0.0), fast, plan, 132)
            found = predict(problem, Link(1e12, latency_us=0.0), fast, plan=plan)
            assert end == pytest.approx(found.kernel_us)


# Calibration, text, errors


@pytest.mark.parametrize("measured", [650.0, 765.1, 900.0])
def test_calibration_meets_the_measured_product(measured):
    problem = Problem("ag_gemm", 4096, 49152, 12288, 8)
    rates = calibrated(H200, problem, measured)
    assert plain_gemm_us(problem, rates) == pytest.approx(measured)
    assert rates.copy_tb_s == H200.copy_tb_s


def test_calibration_leaves_what_memory_decides():
    problem = Problem("ag_gemm", 16, 49152, 12288, 8)
    assert calibrated(H200, problem, 40.0) is H200


def test_the_model_is_near_measured_products():
    # benchmarks/results/gemm_bf16_tuned_h200_2026-11-30.jsonl, torch.matmul.
    for M, N, K, measured in (
        (4096, 6144, 12288, 765.1),
        (8192, 6144, 12288, 1622.3),
        (4096, 3584, 8192, 318.1),
        (64, 6144, 12288, 52.5),
    ):
        problem = Problem("ag_gemm", M, N * 8, K, 8)
        assert plain_gemm_us(problem, H200) == pytest.approx(measured, rel=0.06)


def test_the_text_says_what_dominates():
    text = predict(Problem("ag_gemm", 4096, 49152, 12288, 8), Link(360.0), H200).explain()
    assert "computation dominates" in text
    assert "4096 49152 12288" in text
    assert "360 GB/s" in text
    assert "waves" in text
    text = predict(Problem("gemm_ar", 8192, 8192, 28672, 8), Link(55.0), H200).explain()
    assert "gemm_ar two_shot" in text
    assert "communication dominates" in text


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Problem("ag_gemm", 64, 100, 64, 8), "N: expected a multiple of the 8 ranks"),
        (lambda: Problem("gemm_rs", 64, 64, 100, 8), "K: expected a multiple"),
        (lambda: Problem("gemm", 64, 64, 64, 8), "operator"),
        (lambda: Problem("ag_gemm", 0, 64, 64, 8), "above 0"),
        (lambda: Link(0.0), "GB/s above 0"),
        (lambda: Link(1.0, latency_us=-1.0), "from 0 on"),
        (lambda: predict(TOY_AG, Link(1.0), TOY, num_sms=5), "num_sms"),
        (lambda: predict(TOY_AG, Link(1.0), TOY, algorithm="one_shot"), "algorithm"),
    ],
)
def test_mistakes_are_named(make, part):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert part in str(caught.value)


def test_rows_are_those_of_the_fullest_rank():
    assert Problem("ag_gemm", 13, 64, 64, 8).rows_per_rank == (2, 2, 2, 2, 2, 1, 1, 1)
    assert Problem("ag_gemm", 8, 64, 32, 8).local_shape == (8, 8, 32)
    assert Problem("gemm_rs", 8, 64, 32, 8).local_shape == (8, 64, 4)
