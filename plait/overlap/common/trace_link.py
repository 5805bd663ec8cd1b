"""The link's lane of a trace: what the pacer of emulated peers did.

A pacer leaves in its table when it released each signal, counted from its own start. It does not
say when that was on the clock of the tiles; no tile ends a wait before the words that it waits for
are released, so the latest start that no tile contradicts is taken. It is exact to the pacer's
round, 1 to 3 us, where some tile has waited for the link, and too late where none has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from plait.backends.commands import Program
from plait.symm import signals

if TYPE_CHECKING:
    from plait.overlap.common.trace import TracedCall
    from plait.overlap.common.trace_events import TileEvent

_WORD_BYTES = 4
_TARGET, _COST, _RELEASE = 1, 2, 3  # rows of the pacer's table


@dataclass(frozen=True)
class Transfer:
    """One piece on the link, from its first to its last byte; its signal follows a latency later.

    `word` counts from READY, times are on the clock of the tiles.
    """

    rank: int
    call: int
    peer: int
    word: int
    nbytes: int
    start_ns: float
    end_ns: float


@dataclass(frozen=True, eq=False)
class PacerRun:
    """A pacer's launch: its table as it was when the call ended, and the pieces by address."""

    context: torch.Tensor
    table: torch.Tensor
    latency: int
    pieces: dict[int, tuple[int, int]]  # address of a word -> peer, bytes


def pacer_runs(program: Program) -> list[PacerRun]:
    """The pacers of a program that was just enqueued; none without emulated peers.

    Only enqueues: the call may be under graph capture.
    """
    emulated = program.derived.get("emulated")
    if emulated is None:
        return []
    from plait.symm.transports.pacer_kernels import _pacer_kernel

    runs = []
    for launch in emulated.launches():
        if launch.kernel is not _pacer_kernel:
            continue
        context = launch.args["ctx_ptr"]
        pieces = {}
        for arrivals in program.arrivals:
            if arrivals.ctx.data_ptr() == context.data_ptr():
                for each in arrivals.build():
                    pieces[each.word.data_ptr()] = (each.peer, each.nbytes)
        # `main` has joined the pacer; the next call in this region writes the table again.
        table = launch.args["table_ptr"].clone()
        runs.append(PacerRun(context, table, launch.args["latency"], pieces))
    return runs


def _ready(context: torch.Tensor, rank: int) -> int:
    """Address of this rank's word READY in a context's region."""
    values = context.tolist()
    first = values[signals.CTX_REGION] + signals.READY
    return values[signals.CTX_WORDS + rank] + _WORD_BYTES * first


def read_transfers(call: TracedCall, tiles: Sequence[TileEvent]) -> list[Transfer]:
    """The transfers of one call whose tiles are `tiles`."""
    from plait.symm.transports.emulation import FRACTION

    found: list[Transfer] = []
    for run in call.pacers:
        table = run.table.cpu().tolist()
        entries = [
            (address, cost / FRACTION, (release - run.latency) / FRACTION)
            for address, cost, release in zip(
                table[_TARGET], table[_COST], table[_RELEASE], strict=True
            )
            if address in run.pieces
        ]
        if not entries or not tiles:
            continue
        latency, ready = run.latency / FRACTION, _ready(run.context, call.rank)
        released = {(address - ready) // _WORD_BYTES: end + latency for address, _, end in entries}
        own = [
            tile
            for tile in tiles
            if call.launches[tile.launch].context == run.context.data_ptr() and tile.awaits
        ]
        start = pacer_start_ns(own, released)
        if start is None:
            start = min(tile.start_ns for tile in tiles)
        for address, cost, end in entries:
            peer, nbytes = run.pieces[address]
            word = (address - ready) // _WORD_BYTES
            ends = start + end
            found.append(Transfer(call.rank, call.index, peer, word, nbytes, ends - cost, ends))
    return found


def pacer_start_ns(tiles: Sequence[TileEvent], released_ns: dict[int, float]) -> float | None:
    """The latest start of a pacer that no tile contradicts; None if no tile waits for its words.

    `released_ns` is when each word was set, counted from that start.
    """
    bounds = []
    for tile in tiles:
        times = [released_ns[word] for word in tile.awaits if word in released_ns]
        if times:
            ended = next(end for name, _, end in tile.steps if name == "wait")
            bounds.append(ended - max(times))
    return min(bounds, default=None)


__all__ = ["PacerRun", "Transfer", "pacer_runs", "pacer_start_ns", "read_transfers"]
