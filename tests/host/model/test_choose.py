"""The chooser: measurements first, then the model, and never fused where that is slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.model.choose import Measurement, choose
from plait.model.predict import predict
from plait.model.problem import Link, Plan, Problem
from plait.model.rates import H200, FixedCosts, rates_of

LINK = Link(360.0)


def gpt3(M: int, world_size: int = 8) -> Problem:
    return Problem("ag_gemm", M, 49152, 12288, world_size)


def entry(M: int, fused: float, unfused: float, bandwidth: float = 360.0, **changes) -> Measurement:
    return Measurement(replace(gpt3(M), **changes), bandwidth, fused, unfused)


def test_the_model_decides_without_a_table():
    large = choose(gpt3(4096), LINK, H200)
    assert large.impl == "fused"
    assert large.fused_us < large.unfused_us
    assert large.reason == (
        f"predicted {large.fused_us:.0f} us fused, {large.unfused_us:.0f} us unfused"
    )
    assert choose(gpt3(16), LINK, H200).impl == "unfused"


def test_one_rank_is_unfused():
    assert choose(gpt3(4096, world_size=1), LINK, H200).impl == "unfused"


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8192), st.floats(20, 1000), st.floats(0, 200), st.floats(0, 200))
def test_fused_only_where_it_is_predicted_no_slower(M, bandwidth, fused_us, unfused_us):
    problem, link = gpt3(M), Link(bandwidth)
    found = choose(problem, link, H200, fixed=FixedCosts("ag_gemm", fused_us, unfused_us))
    predicted = predict(problem, link, H200)
    assert found.fused_us == predicted.overlapped_us + fused_us
    assert found.unfused_us == predicted.unfused_us + unfused_us
    assert found.impl == ("fused" if found.fused_us <= found.unfused_us else "unfused")


def test_fixed_costs_are_those_of_the_gpu():
    costs = H200.fixed_costs("ag_gemm")
    assert costs.operator == "ag_gemm"
    found, predicted = choose(gpt3(4096), LINK, H200), predict(gpt3(4096), LINK, H200)
    assert found.fused_us == predicted.overlapped_us + costs.fused_us > predicted.overlapped_us
    assert replace(H200, fixed=()).fixed_costs("ag_gemm") == FixedCosts("ag_gemm", 0.0, 0.0)
    assert rates_of("NVIDIA H200") is H200
    assert rates_of("another") is None


def test_without_rates_only_measurements_are_against_fusing():
    found = choose(gpt3(16), LINK, None)
    assert (found.impl, found.reason[:6]) == ("fused", "fused:")
    assert choose(gpt3(16), LINK, None, measured=[entry(16, 9.0, 8.0)]).impl == "unfused"


def test_a_named_algorithm_is_the_fused_kernels():
    problem = Problem("gemm_ar", 2048, 8192, 28672, 8)
    free, one_shot = choose(problem, LINK, H200), choose(problem, LINK, H200, algorithm="one_shot")
    assert one_shot.unfused_us == free.unfused_us
    assert one_shot.fused_us > free.fused_us
    assert (free.impl, one_shot.impl) == ("fused", "unfused")


def test_the_plan_counts():
    problem = gpt3(2048)
    assert choose(problem, LINK, H200).impl == "fused"
    assert choose(problem, LINK, H200, plan=Plan(16, 128, 1)).impl == "unfused"


def test_a_measurement_overrules_the_model():
    found = choose(gpt3(4096), LINK, H200, measured=[entry(4096, 900.0, 850.0)])
    assert found.impl == "unfused"
    assert (found.fused_us, found.unfused_us) == (900.0, 850.0)
    assert found.reason == "measured 900 us fused, 850 us unfused"
    short = choose(gpt3(4096), LINK, H200, measured=[entry(4096, 9.04, 8.0)])
    assert short.reason == "measured 9.0 us fused, 8.0 us unfused"
    tie = choose(gpt3(4096), LINK, H200, measured=[entry(4096, 850.0, 850.0)])
    assert tie.impl == "fused"


def test_two_near_measurements_decide_together():
    slower = [entry(8192, 9.0, 8.0), entry(4096, 9.0, 8.0), entry(64, 1.0, 8.0)]
    found = choose(gpt3(5000), LINK, H200, measured=slower)
    assert (found.impl, found.reason) == ("unfused", "measured at M=4096 and M=8192")


def test_between_measurements_that_disagree_times_are_interpolated():
    mixed = [entry(4096, 7.0, 8.0), entry(8192, 11.0, 8.0)]
    found = choose(gpt3(4608), LINK, None, measured=mixed)
    assert (found.fused_us, found.unfused_us) == (7.5, 8.0)
    assert found.reason == "between M=4096 and M=8192: 7.5 us fused, 8.0 us unfused"
    assert choose(gpt3(5120), LINK, H200, measured=mixed).impl == "fused"  # as long
    assert choose(gpt3(5248), LINK, H200, measured=mixed).impl == "unfused"


@pytest.mark.parametrize(
    "other",
    [
        entry(4096, 9.0, 8.0, bandwidth=160.0),
        entry(4096, 9.0, 8.0, dtype_bytes=4),
        entry(4096, 9.0, 8.0, travel_bytes=4),
        replace(entry(4096, 9.0, 8.0), latency_us=2.0),
        entry(4096, 9.0, 8.0, world_size=4),
        entry(4096, 9.0, 8.0, K=8192),
        entry(2048, 9.0, 8.0),  # near, but on one side only
        entry(1024, 9.0, 8.0),
    ],
)
def test_other_measurements_do_not_count(other):
    assert choose(gpt3(4096), LINK, H200, measured=[other]).reason.startswith("predicted")


def test_a_slightly_different_bandwidth_is_the_same_link():
    entries = [entry(4096, 9.0, 8.0)]
    assert choose(gpt3(4096), Link(345.0), H200, measured=entries).impl == "unfused"
    nearer = [entry(4096, 7.0, 8.0, bandwidth=340.0), *entries]
    for each in (nearer, nearer[::-1]):
        assert choose(gpt3(4096), Link(345.0), H200, measured=each).impl == "fused"
        assert choose(gpt3(4096), Link(355.0), H200, measured=each).impl == "unfused"
    silent = [replace(entry(4096, 9.0, 8.0), latency_us=0.0)]
    assert choose(gpt3(4096), Link(360.0, 0.0), H200, measured=silent).impl == "unfused"
