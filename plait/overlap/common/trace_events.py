"""What a trace says: tiles with their times, the lanes of SMs, and a summary of each call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.runtime.perfetto import Slice

if TYPE_CHECKING:
    from plait.overlap.common.trace import TracedCall, TracedLaunch
    from plait.overlap.common.trace_link import Transfer

STEPS = ("wait", "compute", "store", "sum")
LINK_LANE = "link"
_SM, _SEGMENT, _TILE, _BEGIN = range(4)  # columns of a row; see trace_kernels


@dataclass(frozen=True)
class TileEvent:
    """One tile, or a part of one, in one loop of a kernel on one SM.

    `call` counts the rank's traced programs, `launch` the kernels of one. `loop` is 1 in the second
    loop over the tiles of GEMM+AR, else 0. `segment` is the rank whose rows these are (in one-shot
    GEMM+AR, where they are everybody's, this rank), `tile` is m * num_n + n within it. `index` is
    the place in the loop, and `piece` the part where the last wave is cut. `steps` are (name,
    start, end) in ns of a clock that all SMs share, one after the other.
    """

    rank: int
    call: int
    operator: str
    kernel: str
    launch: int
    sm: int
    block: int
    loop: int
    index: int
    segment: int
    tile: int
    piece: int
    steps: tuple[tuple[str, int, int], ...]
    awaits: tuple[int, ...] = ()

    @property
    def start_ns(self) -> int:
        """When the tile began."""
        return self.steps[0][1]

    @property
    def end_ns(self) -> int:
        """When its last step ended."""
        return self.steps[-1][2]


@dataclass(frozen=True)
class CallSummary:
    """One call of one rank, from the first tile's begin to the last one's end (`span_ns`).

    `shares` of SM time: "wait", "compute", "store", "sum" and "idle" (not in a tile), 1 together.
    SM time is span_ns for each of the `num_lanes` blocks that were resident side by side. `waves`
    is the largest number of tiles of one block.
    """

    rank: int
    call: int
    operator: str
    num_tiles: int
    num_lanes: int
    waves: int
    span_ns: int
    shares: dict[str, float]
    first: TileEvent
    last: TileEvent


def read_tiles(call: TracedCall) -> list[TileEvent]:
    """The tiles of one call that have run."""
    found = []
    for number, launch in enumerate(call.launches):
        rows = launch.stamps.buffer.cpu().tolist()
        per_loop = len(rows) // len(launch.stamps.steps)
        for index, row in enumerate(rows):
            if row[_BEGIN]:
                found.append(_tile(call, number, launch, row, *divmod(index, per_loop)))
    return found


def _tile(
    call: TracedCall, number: int, launch: TracedLaunch, row: list[int], loop: int, index: int
) -> TileEvent:
    names = launch.stamps.steps[loop]
    stamps = row[_BEGIN : _BEGIN + 1 + len(names)]
    steps = [
        (name, start, end)
        for name, start, end in zip(names, stamps, stamps[1:], strict=False)
        if end  # a tile of another rank's rows has fewer steps
    ]
    segment, tile = row[_SEGMENT], row[_TILE]
    waits = any(name == "wait" for name, _, _ in steps)
    pieces = launch.numbers.get("PIECES", 1)
    return TileEvent(
        call.rank,
        call.index,
        call.operator,
        launch.kernel,
        number,
        sm=row[_SM],
        block=index % launch.grid,
        loop=loop,
        index=launch.numbers.get("first_tile", 0) + index // pieces,
        segment=segment,
        tile=tile,
        piece=index % pieces,
        steps=tuple(steps) or (("compute", stamps[0], stamps[0]),),
        awaits=tuple(launch.stamps.awaits(loop, segment, tile)) if waits else (),
    )


# --- lanes


def lanes_of(tiles: Sequence[TileEvent]) -> dict[tuple[int, int, int, int], tuple[int, int]]:
    """(SM, lane of it) of each (rank, call, launch, block): blocks that overlap on an SM take
    different lanes."""
    runs: dict[tuple[int, int, int, int], list[TileEvent]] = defaultdict(list)
    for tile in tiles:
        runs[tile.rank, tile.call, tile.launch, tile.block].append(tile)
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    lanes = {}
    for key, own in sorted(runs.items(), key=lambda run: min(t.start_ns for t in run[1])):
        busy = ends[own[0].rank, own[0].sm]
        start, end = min(tile.start_ns for tile in own), max(tile.end_ns for tile in own)
        lane = next((i for i, until in enumerate(busy) if until <= start), len(busy))
        busy[lane : lane + 1] = [end]
        lanes[key] = (own[0].sm, lane)
    return lanes


def to_slices(
    tiles: Sequence[TileEvent], transfers: Sequence[Transfer]
) -> tuple[list[Slice], list[tuple[int, str]]]:
    """Slices for Perfetto, from the first one's begin on, and the order of their lanes."""
    places = lanes_of(tiles)
    starts = [tile.start_ns for tile in tiles] + [each.start_ns for each in transfers]
    origin = min(starts, default=0)
    slices = []
    order: set[tuple[int, int, int]] = set()
    for tile in tiles:
        sm, lane = places[tile.rank, tile.call, tile.launch, tile.block]
        order.add((tile.rank, sm, lane))
        for name, start, end in tile.steps:
            slices.append(
                Slice(
                    tile.rank, _lane_name(sm, lane), name, name, start - origin, end - origin,
                    _details(tile),
                )
            )  # fmt: skip
    for each in transfers:
        details = {"peer": each.peer, "word": each.word, "bytes": each.nbytes, "call": each.call}
        slices.append(
            Slice(
                each.rank, LINK_LANE, "transfer", f"from rank {each.peer}",
                each.start_ns - origin, each.end_ns - origin, details,
            )
        )  # fmt: skip
    names = [(rank, _lane_name(sm, lane)) for rank, sm, lane in sorted(order)]
    links = [(rank, LINK_LANE) for rank in sorted({each.rank for each in transfers})]
    return slices, links + names


def _lane_name(sm: int, lane: int) -> str:
    return f"SM {sm}" if lane == 0 else f"SM {sm} #{lane + 1}"


def _details(tile: TileEvent) -> dict[str, Any]:
    names = ("operator", "call", "segment", "tile", "piece", "index", "loop", "block", "launch")
    return {name: getattr(tile, name) for name in names}


# --- summary


def summarize(tiles: Sequence[TileEvent]) -> CallSummary:
    """The summary of the tiles of one call, at least one."""
    first = min(tiles, key=lambda tile: tile.start_ns)
    last = max(tiles, key=lambda tile: tile.end_ns)
    span = last.end_ns - first.start_ns
    num_lanes = len(set(lanes_of(tiles).values()))
    spent: dict[str, int] = dict.fromkeys(STEPS, 0)
    for tile in tiles:
        for name, start, end in tile.steps:
            spent[name] += end - start
    whole = span * num_lanes
    shares = {name: time / whole if whole else 0.0 for name, time in spent.items()}
    shares["idle"] = 1.0 - sum(shares.values())
    counts = Counter((tile.launch, tile.block) for tile in tiles if tile.loop == 0)
    launches = {launch for launch, _ in counts}
    waves = sum(max(n for (own, _), n in counts.items() if own == each) for each in launches)
    num_tiles = sum(tile.loop == 0 for tile in tiles)
    return CallSummary(
        first.rank, first.call, first.operator, num_tiles, num_lanes, waves, span, shares,
        first, last,
    )  # fmt: skip


__all__ = ["LINK_LANE", "STEPS", "CallSummary", "TileEvent", "read_tiles", "summarize", "to_slices"]
