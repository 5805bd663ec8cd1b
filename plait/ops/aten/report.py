"""What became of calls that reached an override while its key was on: counts, and times if asked.

Counting is one list element a call, under 0.2 us; calls of keys that are off are not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.ops.aten import thread_state

PLAIT = ""  # the reason that stands for a call which plait's own kernel served

_SLOT = "plait.aten.listener"
_lock = threading.Lock()
_cells: dict[tuple[str, str, str], list[float]] = {}  # key, dispatch key, reason: calls, seconds


class _Watching:
    """How many explanations and timings are under way; both cost, so calls look here first."""

    __slots__ = ("listeners", "timings")

    def __init__(self) -> None:
        self.listeners = 0
        self.timings = 0


WATCHING = _Watching()


class Counter:
    """The counts of one override: `count(reason)` adds a call.

    The list element is added to between two points where Python may switch threads, so no call is
    lost; on a Python without the global lock a few may be.
    """

    __slots__ = ("_mine", "_name")

    def __init__(self, key: str, dispatch_key: str) -> None:
        self._name = (key, dispatch_key)
        self._mine: dict[str, list[float]] = {}

    def count(self, reason: str) -> None:
        """Add one call; `reason` is why ATen serves it, or PLAIT."""
        try:
            self._mine[reason][0] += 1
        except KeyError:
            self.cell(reason)[0] += 1
        if WATCHING.listeners:
            tell(*self._name, reason)

    def timed(self, reason: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function`, and add the host seconds that it takes."""
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.cell(reason)[1] += time.perf_counter() - start

    def cell(self, reason: str) -> list[float]:
        """Where the calls of one reason are counted: [calls, seconds]."""
        with _lock:
            cell = _cells.setdefault((*self._name, reason), [0, 0.0])
        self._mine[reason] = cell
        return cell


@dataclass(frozen=True)
class Row:
    """Calls of one key that went one way; `reason` is empty where plait's kernel served them.

    `host_us` is the mean host time of a call in microseconds, None unless it was measured.
    """

    key: str
    dispatch_key: str
    reason: str
    calls: int
    host_us: float | None = None


class Report:
    """Counts since the process started, or those of a block, as in `with report() as counted`.

    In a block `rows` are what happened in the block, in all threads, once it has ended.
    """

    def __init__(self, timing: bool = False) -> None:
        self._timing = timing
        self._start: dict[tuple[str, str, str], tuple[float, float]] = {}
        self.rows = _rows({}, timing=False)

    def __enter__(self) -> Report:
        self._start = _snapshot()
        with _lock:
            WATCHING.timings += self._timing
        return self

    def __exit__(self, *raised: object) -> None:
        with _lock:
            WATCHING.timings -= self._timing
        self.rows = _rows(self._start, self._timing)

    @property
    def served(self) -> int:
        """Calls that plait's kernels served."""
        return sum(row.calls for row in self.rows if row.reason == PLAIT)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that went to ATen, by reason."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.reason != PLAIT:
                found[row.reason] = found.get(row.reason, 0) + row.calls
        return found

    def __str__(self) -> str:
        lines = [f"plait served {self.served} calls, ATen {sum(self.fallbacks.values())}"]
        for row in self.rows:
            way = f"aten: {row.reason}" if row.reason else "plait"
            time_us = "" if row.host_us is None else f"  {row.host_us:.1f} us"
            lines.append(f"{row.calls:>10}  {row.dispatch_key:<5} {row.key:<32} {way}{time_us}")
        return "\n".join(lines)


def report(*, timing: bool = False) -> Report:
    """How many calls plait's kernels served and how many fell back to ATen, by key and reason.

    Args:
        timing: in `with plait.report(timing=True) as counted`, measure the host time of each
            overridden call, too. That slows every one of them by about a microsecond.

    Returns:
        Counts of the process so far; after a `with` block, those of the block. `print` shows them,
        `rows`, `served` and `fallbacks` hold them. Calls of keys that are off are not counted.
    """
    return Report(timing)


def _snapshot() -> dict[tuple[str, str, str], tuple[float, float]]:
    with _lock:
        return {name: (cell[0], cell[1]) for name, cell in _cells.items()}


def _rows(start: dict[tuple[str, str, str], tuple[float, float]], timing: bool) -> list[Row]:
    found = []
    for name, (calls, seconds) in _snapshot().items():
        before = start.get(name, (0, 0.0))
        count = int(calls - before[0])
        if count > 0:
            host_us = (seconds - before[1]) / count * 1e6 if timing else None
            found.append(Row(*name, count, host_us))
    return sorted(found, key=lambda row: (-row.calls, row.key, row.reason))


def listen(listener: Callable[[str, str, str], None] | None) -> Any:
    """Let `listener(key, dispatch_key, reason)` hear of this thread's calls and their backward's.

    Returns who heard until now; None for nobody. Hand that back afterwards.
    """
    before = thread_state.get(_SLOT)
    thread_state.put(_SLOT, listener)
    with _lock:
        WATCHING.listeners += (listener is not None) - (before is not None)
    return before


def tell(key: str, dispatch_key: str, reason: str) -> None:
    """Say to this thread's listener, if it has one, which way a call goes."""
    listener = thread_state.get(_SLOT)
    if listener is not None:
        listener(key, dispatch_key, reason)


__all__ = ["PLAIT", "WATCHING", "Counter", "Report", "Row", "listen", "report", "tell"]
