"""Host time of small operator calls: planned, handed back to ATen, and without plait.

Wall time of calls that only enqueue, in turns, each the best average of its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import plait
from plait.cli.bench_ops_cases import Arrangement, Case
from plait.cli.bench_ops_measure import ask, operands_of
from plait.cli.bench_ops_points import Point
from plait.cli.tune import geometric_mean
from plait.ops.aten import gate, registration, spec, wins
from plait.runtime.timing import host_us

ELEMENTS = 32
_CALLS = 200
TURNS = 5
HostTimer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class HostTimes:
    """Microseconds of one call of `point`.

    aten: nothing of plait is registered. planned: plait serves it. fallback: its key is on in
    default mode and the table leaves it to ATen. off: its key is registered and off. unregistered:
    other keys are. `reason` says why there is no planned time.
    """

    point: Point
    aten: float
    unregistered: float
    planned: float | None = None
    fallback: float | None = None
    off: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Of the planned call over ATen's: below 1 plait is faster."""
        return None if self.planned is None else self.planned / self.aten


def host_points(cases: Sequence[Case], dtype: str) -> list[Point]:
    """Each case once, at 32 elements."""
    points = []
    for case in cases:
        layout = "r" if "r" in case.layouts else case.layouts[0]
        at = Arrangement(layout, 1, ELEMENTS)
        points.append(Point(f"{case.name}_small", case, at, case.dtypes_of((dtype,))[0]))
    return points


def best_of_a_turn(call: Callable[[], object]) -> float:
    """The average of one turn; its first call, which plans, is not in it."""
    for _ in range(3):
        call()
    return host_us(call, _CALLS, repeats=1)


def measure_host(
    point: Point, device: torch.device, timer: HostTimer = best_of_a_turn, turns: int = TURNS
) -> HostTimes:
    """All ways of one call in turns. Registers and uninstalls: no other thread may compute."""
    keys = tuple(dict.fromkeys(each.key for each in ask(point, device)))
    others = sorted(spec.served().difference(keys))
    plait.uninstall()
    operands = operands_of(point, device)

    def call() -> Any:
        return point.case.call(point.at.dim, *operands)

    with torch.no_grad():
        reason = _why_not_planned(keys, device, call)
        ways: dict[str, Callable[[], float]] = {
            "aten": lambda: timer(call),
            "unregistered": lambda: _registered(others[:1], device, call, timer),
        }
        if keys:
            ways["fallback"] = lambda: _left_to_aten(keys, device, call, timer)
            ways["off"] = lambda: _registered(keys, device, call, timer)
        if not reason:
            ways["planned"] = lambda: _forced(keys, device, call, timer)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                found[name].append(way())
                plait.uninstall()
    best = {name: min(times) for name, times in found.items()}
    return HostTimes(point=point, reason=reason, **best)


def _why_not_planned(keys: Sequence[str], device: torch.device, call: Callable[[], Any]) -> str:
    if not keys:
        return "plait has no kernel for it"
    with plait.use(keys, device=device), plait.report() as counted:
        call()
    plait.uninstall()
    return "; ".join(counted.fallbacks)


def _forced(keys: Any, device: torch.device, call: Any, timer: HostTimer) -> float:
    # Everywhere, as `enable` does: an open block costs each call the look-up of its selection.
    plait.enable(keys, device=device)
    return timer(call)


def _left_to_aten(keys: Any, device: torch.device, call: Any, timer: HostTimer) -> float:
    registration.install(keys, registration.dispatch_key_of(device))
    with wins.only(wins.WinTable()):
        gate.turn(gate.if_faster(keys), frozenset())
        return timer(call)


def _registered(keys: Any, device: torch.device, call: Any, timer: HostTimer) -> float:
    registration.install(keys, registration.dispatch_key_of(device))
    return timer(call)


def host_row(times: HostTimes, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of a result file."""
    names = ("aten", "planned", "fallback", "off", "unregistered")
    found = {f"{name}_us": getattr(times, name) for name in names}
    return {
        "benchmark": "ops_host",
        "name": times.point.name,
        "case": times.point.case.name,
        "family": times.point.case.family,
        "elements": times.point.at.numel,
        "dtype": times.point.dtype,
        **{name: None if value is None else round(value, 3) for name, value in found.items()},
        "ratio": times.ratio,
        "reason": times.reason,
        **facts,
    }


def host_table(results: Sequence[HostTimes]) -> Any:
    """A rich table with one line a call and the means below."""
    from rich.table import Table

    table = Table(title="host time in microseconds, over ATen in brackets", title_justify="left")
    table.add_column("call")
    for name in ("ATen", "planned", "ratio", "fallback", "off", "unregistered"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for each in results:
        more = [
            "" if value is None else f"{value:.2f} ({value - each.aten:+.2f})"
            for value in (each.fallback, each.off, each.unregistered)
        ]
        ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
        extra = each.planned
        planned = "" if extra is None else f"{extra:.2f} ({extra - each.aten:+.2f})"
        table.add_row(each.point.name, f"{each.aten:.2f}", planned, ratio, *more, each.reason)
    ratios = [each.ratio for each in results if each.ratio is not None]
    added = [each.planned - each.aten for each in results if each.planned is not None]
    if ratios:
        table.add_section()
        worst = f"worst {max(added):+.2f}"
        table.add_row("geometric mean", "", worst, f"{geometric_mean(ratios):.3f}")
    return table


__all__ = ["TURNS", "HostTimes", "host_points", "host_row", "host_table", "measure_host"]
