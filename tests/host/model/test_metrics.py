"""Metrics by hand, and the values where there is nothing to measure."""

from __future__ import annotations

import math

import pytest

from plait.model import metrics

# 100 us of product, 40 us of communication.


@pytest.mark.parametrize(
    ("overlapped", "efficiency", "hidden", "ratio"),
    [
        (100.0, 1.0, 1.0, 1.0),  # fully hidden
        (110.0, 0.75, 0.75, 1.1),
        (140.0, 0.0, 0.0, 1.4),  # one after the other
        (150.0, -0.25, -0.25, 1.5),  # worse than that
    ],
)
def test_communication_is_the_shorter(overlapped, efficiency, hidden, ratio):
    assert metrics.ect(overlapped, 100.0) == pytest.approx(overlapped - 100.0)
    assert metrics.overlap_efficiency(overlapped, 100.0, 40.0) == pytest.approx(efficiency)
    assert metrics.hidden_share(overlapped, 100.0, 40.0) == pytest.approx(hidden)
    assert metrics.bound_ratio(overlapped, 100.0, 40.0) == pytest.approx(ratio)


def test_communication_is_the_longer():
    # Product 50, communication 200, overlapped 210: 40 of the 50 are hidden, ECT is 160 of 200.
    assert metrics.ect(210.0, 50.0) == 160.0
    assert metrics.overlap_efficiency(210.0, 50.0, 200.0) == pytest.approx(0.2)
    assert metrics.hidden_share(210.0, 50.0, 200.0) == pytest.approx(0.8)
    assert metrics.bound_ratio(210.0, 50.0, 200.0) == pytest.approx(1.05)


def test_published_figures_come_out():
    # Flux, 8 H800, M=4096 N=49152 K=12288: 1.429 -> 0.957 ms.
    assert metrics.speedup(1.429, 0.957) == pytest.approx(1.493, abs=1e-3)


def test_nothing_to_hide():
    assert math.isnan(metrics.overlap_efficiency(10.0, 10.0, 0.0))
    assert math.isnan(metrics.hidden_share(10.0, 10.0, 0.0))
    assert math.isnan(metrics.bound_ratio(0.0, 0.0, 0.0))
    assert metrics.bound_ratio(10.0, 10.0, 0.0) == 1.0


def test_geometric_mean():
    assert metrics.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(metrics.geometric_mean([]))
