"""Traces for https://ui.perfetto.dev (Chrome's JSON format): a process a rank, a thread a lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slice:
    """What one lane of a rank did from `start_ns` to `end_ns`; `details` are shown beside it."""

    rank: int
    lane: str
    category: str
    name: str
    start_ns: float
    end_ns: float
    details: dict[str, Any] = field(default_factory=dict)


def to_perfetto(slices: Iterable[Slice], lanes: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """The trace as a JSON object; `lanes` are (rank, lane) in the order in which they are shown.

    pid is the rank, tid the lane's number, times are in us. Slices of one lane either do not
    overlap or lie one inside the other.
    """
    numbers = {lane: number for number, lane in enumerate(lanes)}
    events = [
        _metadata("process_name", rank, 0, name=f"rank {rank}")
        for rank in sorted({rank for rank, _ in lanes})
    ]
    for (rank, lane), number in numbers.items():
        events.append(_metadata("thread_name", rank, number, name=lane))
        events.append(_metadata("thread_sort_index", rank, number, sort_index=number))
    for each in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        events.append(
            {
                "ph": "X",
                "name": each.name,
                "cat": each.category,
                "pid": each.rank,
                "tid": numbers[each.rank, each.lane],
                "ts": each.start_ns / 1000,
                "dur": (each.end_ns - each.start_ns) / 1000,
                "args": each.details,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _metadata(what: str, rank: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}


__all__ = ["Slice", "to_perfetto"]
