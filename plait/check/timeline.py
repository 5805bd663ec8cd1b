"""Records what every rank did when, and writes it as a trace for https://ui.perfetto.dev.

Times are nanoseconds of the virtual clock: they show order, waiting and overlap, and are no
prediction for a GPU. A lane is one block index of a stream's kernels, the kernels themselves, or a
stream's copy engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

from plait.errors import ArgumentError
from plait.runtime.perfetto import Slice, to_perfetto
from plait.symm.virtual.observe import Block, Item, Observer

SpanKind = Literal["kernel", "compute", "wait", "copy", "signal", "call"]


@dataclass(frozen=True)
class Span:
    """What one lane of one rank did from `start_ns` to `end_ns`.

    `call` counts the rank's operator calls from 0. A "wait" lies inside the "compute" span of its
    block, a "compute" span beside the "kernel" span of its launch.
    """

    rank: int
    lane: str
    kind: SpanKind
    name: str
    operator: str
    call: int
    start_ns: int
    end_ns: int
    details: dict[str, Any] = field(default_factory=dict)


class TimelineRecorder(Observer):
    """Collects `spans` of the worlds it listens to; a new world begins a new timeline."""

    def __init__(self) -> None:
        self._clear(None)

    def _clear(self, world: Any) -> None:
        self._world = world
        self.spans: list[Span] = []
        self._items: dict[Item, tuple[int, int]] = {}  # enqueued and unfinished: call, start
        self._blocks: dict[Block, int] = {}
        self._last_end: dict[Item, int] = {}  # of the launch's blocks so far
        self._waits: dict[Block, tuple[int, int]] = {}  # start, address
        self._calls: dict[int, tuple[int, str]] = {}  # by rank: the call that is being enqueued
        self._ended: set[int] = set()  # ranks whose host has waited for its streams since

    # --- results
    def window_ns(self, operator: str | None = None, call: int = -1) -> tuple[int, int]:
        """Begin and end of the `call`-th call (from 0; -1 is the last) of `operator` on all ranks.

        `operator=None` takes calls of every operator. Raises `ArgumentError` if there is none.
        """
        begin, end = [], []
        for rank in {span.rank for span in self.spans}:
            spans = [s for s in self.spans if s.rank == rank and operator in (None, s.operator)]
            calls = sorted({s.call for s in spans})
            if not -len(calls) <= call < len(calls):
                continue
            begin += [s.start_ns for s in spans if s.call == calls[call]]
            end += [s.end_ns for s in spans if s.call == calls[call]]
        if not begin:
            known = sorted({span.operator for span in self.spans})
            raise ArgumentError(
                "operator and call",
                f"a recorded call (operators: {', '.join(known) or 'none'})",
                f"call {call} of {operator or 'any operator'}",
                "Run the operator in a world that this recorder listens to.",
            )
        return min(begin), max(end)

    def to_perfetto(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format: pid is the rank, tid the lane, times in us."""
        slices = [
            Slice(
                span.rank, span.lane, span.kind, span.name, span.start_ns, span.end_ns,
                {"operator": span.operator, "call": span.call, **span.details},
            )
            for span in self.spans
        ]  # fmt: skip
        return to_perfetto(
            slices, sorted({(span.rank, span.lane) for span in self.spans}, key=lane_order)
        )

    def save_json(self, path: str | PathLike[str]) -> None:
        """Write `to_perfetto()` to `path`."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_perfetto(), file)

    # --- events
    def world_started(self, world: Any) -> None:
        """Begin a new timeline."""
        self._clear(world)

    def world_ended(self, world: Any) -> None:
        """End what a stopped world left open, so that a deadlock shows too."""
        now = max([self._now(), *(span.end_ns for span in self.spans)])
        for block in list(self._waits):
            self._end_wait(block, now)
        for block in list(self._blocks):
            self._end_block(block, now)
        for item, (_, start) in list(self._items.items()):
            if start >= 0:
                self._end_item(item, now)
        self._items.clear()

    def enqueued(self, item: Item) -> None:
        """A call of a rank ends when its host has waited, or enqueues another operator's item."""
        call, operator = self._calls.get(item.rank, (-1, ""))
        if call < 0 or operator != item.operator or item.rank in self._ended:
            call += 1
            self._calls[item.rank] = (call, item.operator)
            self._ended.discard(item.rank)
        self._items[item] = (call, -1)

    def host_synchronized(self, rank: int, stream: str) -> None:
        """The next item that this rank enqueues begins a new call."""
        self._ended.add(rank)

    def item_started(self, item: Item) -> None:
        """Begin a kernel, copy, signal or call span."""
        self._items[item] = (self._items[item][0], self._now())

    def item_finished(self, item: Item) -> None:
        """End it."""
        self._end_item(item, self._now())

    def block_started(self, block: Block) -> None:
        """Begin a block's span."""
        self._blocks[block] = self._now()

    def block_finished(self, block: Block) -> None:
        """End it."""
        self._end_block(block, self._now())

    def block_asleep(self, block: Block, address: int) -> None:
        """Begin a wait."""
        self._waits[block] = (self._now(), address)

    def block_woken(self, block: Block) -> None:
        """End it."""
        self._end_wait(block, self._now())

    # --- spans
    def _now(self) -> int:
        return int(self._world.now_ns)

    def _add(
        self, item: Item, lane: str, kind: SpanKind, name: str, start: int, end: int, **details: Any
    ) -> None:
        call = self._items[item][0]
        end = max(start, end)
        lane = f"{item.stream} {lane}"
        self.spans.append(
            Span(item.rank, lane, kind, name, item.operator, call, start, end, details)
        )

    def _end_item(self, item: Item, now: int) -> None:
        start = self._items[item][1]
        if item.kind == "launch":
            # Blocks end in the schedule's order, not in that of their own times.
            end = max(now, self._last_end.pop(item, now))
            self._add(item, "kernel", "kernel", item.name, start, end)
        elif item.kind == "call":
            self._add(item, "kernel", "call", item.name, start, now)
        else:
            name = item.name if item.peer is None else f"{item.name} to rank {item.peer}"
            kind: SpanKind = "copy" if item.kind == "copy" else "signal"
            details = {"bytes": item.nbytes, "peer": item.peer}
            self._add(item, "copy engine", kind, name, start, now, **details)
        del self._items[item]

    def _end_block(self, block: Block, now: int) -> None:
        start = self._blocks.pop(block)
        self._end_wait(block, now)
        self._add(block.item, f"block {block.index}", "compute", block.item.name, start, now)
        self._last_end[block.item] = max(now, self._last_end.get(block.item, now))

    def _end_wait(self, block: Block, now: int) -> None:
        wait = self._waits.pop(block, None)
        if wait is not None:
            start, address = wait
            lane = f"block {block.index}"
            self._add(block.item, lane, "wait", "wait", start, now, address=hex(address))


def lane_order(lane: tuple[int, str]) -> tuple[int, bool, str, bool, int, str]:
    """Sort key of (rank, lane): `main` first, then other streams; kernels, blocks, copy engine."""
    rank, name = lane
    stream, _, rest = name.partition(" ")
    is_block = rest.startswith("block ")
    number = int(rest.split()[1]) if is_block else -1
    return (rank, stream != "main", stream, rest == "copy engine", number, rest)


__all__ = ["Span", "SpanKind", "TimelineRecorder", "lane_order"]
