"""Fused or unfused for one call: by what was measured near it, else by the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.model.predict import predict
from plait.model.problem import Link, Plan, Problem
from plait.model.rates import FixedCosts, Rates
from plait.model.schedule import Algorithm

_SAME_LINK = 0.15  # measurements count for a link up to this share of the larger figure away
_NEAR = 2.0  # and between two M of which one is at most this much of the wanted one


@dataclass(frozen=True)
class Measurement:
    """Measured times of one call over a link of `bandwidth_gb_s`, in microseconds."""

    problem: Problem
    bandwidth_gb_s: float
    fused_us: float
    unfused_us: float
    latency_us: float = 3.0

    def serves(self, problem: Problem, link: Link) -> bool:
        """Whether this says something about `problem`: all but M alike, and nearly the link."""
        alike = replace(self.problem, M=1) == replace(problem, M=1)
        return alike and self._distance(link) <= _SAME_LINK

    def _distance(self, link: Link) -> float:
        """The larger of what bandwidth and latency differ by, as a share of the larger figure."""
        pairs = (
            (self.bandwidth_gb_s, link.bandwidth_gb_s),
            (self.latency_us, link.latency_us),
        )
        return max(abs(a - b) / max(a, b) if max(a, b) else 0.0 for a, b in pairs)


@dataclass(frozen=True)
class Choice:
    """`impl`, why, and the two times that were compared (NaN where only their order is known)."""

    impl: Literal["fused", "unfused"]
    reason: str
    fused_us: float = math.nan
    unfused_us: float = math.nan


def choose(
    problem: Problem,
    link: Link,
    rates: Rates | None,
    *,
    measured: Sequence[Measurement] = (),
    plan: Plan | None = None,
    algorithm: Algorithm | None = None,
    fixed: FixedCosts | None = None,
) -> Choice:
    """Fused if its time is not longer than that of communication and product in turn.

    Args:
        problem: the call. link: what the ranks send through.
        rates: the GPU; None, where nobody measured it, is fused unless measurements say otherwise.
        measured: table entries, in any order. One for this call decides; otherwise the nearest
            ones of smaller and larger M (at most a factor of 2 away), between whose times those
            of this call are supposed to lie, in proportion to M. Of entries for the same M the
            one with the nearest link counts.
        plan: the fused kernel's tiles and chunks; None supposes the best.
        algorithm: the fused kernel's, of gemm_ar; None supposes the faster one.
        fixed: what a call costs beyond the model; None: what `rates` says.

    One rank has nothing to overlap: unfused.
    """
    if problem.world_size == 1:
        return Choice("unfused", "one rank: nothing to overlap")
    serving = [each for each in measured if each.serves(problem, link)]
    serving.sort(key=lambda each: each._distance(link), reverse=True)
    found = _from_table(problem, {each.problem.M: each for each in serving})
    if found is not None:
        return found
    if rates is None:
        return Choice("fused", "fused: neither rates of this GPU nor a measurement")
    fixed = fixed or rates.fixed_costs(problem.operator)
    predicted = predict(problem, link, rates, plan=plan, algorithm=algorithm)
    fused_us = predicted.overlapped_us + fixed.fused_us
    # In turn, the faster algorithm runs: one hop for few rows, two otherwise.
    unfused_us = predict(problem, link, rates, plan=plan).unfused_us + fixed.unfused_us
    reason = f"predicted {_times(fused_us, unfused_us)}"
    return Choice(_impl(fused_us, unfused_us), reason, fused_us, unfused_us)


def _from_table(problem: Problem, entries: dict[int, Measurement]) -> Choice | None:
    """By the entry of this M, or by those around it if they are near enough."""
    M = problem.M
    below = max((each for each in entries if M / _NEAR <= each <= M), default=None)
    above = min((each for each in entries if M <= each <= M * _NEAR), default=None)
    if below is None or above is None:
        return None
    first, last = entries[below], entries[above]
    if below == M:
        times = (first.fused_us, first.unfused_us)
        return Choice(_impl(*times), f"measured {_times(*times)}", *times)
    if _impl(first.fused_us, first.unfused_us) == _impl(last.fused_us, last.unfused_us):
        impl = _impl(first.fused_us, first.unfused_us)
        return Choice(impl, f"measured at M={below} and M={above}")
    share = (M - below) / (above - below)
    fused_us = first.fused_us + share * (last.fused_us - first.fused_us)
    unfused_us = first.unfused_us + share * (last.unfused_us - first.unfused_us)
    reason = f"between M={below} and M={above}: {_times(fused_us, unfused_us)}"
    return Choice(_impl(fused_us, unfused_us), reason, fused_us, unfused_us)


def _times(fused_us: float, unfused_us: float) -> str:
    """Such as `355 us fused, 498 us unfused`; tenths of times below 100 us."""
    fused, unfused = (f"{us:.{0 if us >= 100 else 1}f} us" for us in (fused_us, unfused_us))
    return f"{fused} fused, {unfused} unfused"


def _impl(fused_us: float, unfused_us: float) -> Literal["fused", "unfused"]:
    return "fused" if fused_us <= unfused_us else "unfused"


__all__ = ["Choice", "Measurement", "choose"]
