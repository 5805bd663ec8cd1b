"""`plait.trace`: when each tile of the overlapped operators waited, multiplied, stored and summed.

Inside `with trace:` the operators' kernels get a buffer of time stamps each (see trace_kernels) and
calls are not planned; the trace keeps the buffers with what it takes to read them. Docs:
docs/design/trace.md.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from plait.backends.commands import Program
from plait.overlap.common.trace_events import (
    CallSummary,
    TileEvent,
    read_tiles,
    summarize,
    to_slices,
)
from plait.overlap.common.trace_link import PacerRun, Transfer, pacer_runs, read_transfers
from plait.runtime.perfetto import to_perfetto
from plait.symm.group import Group

_COLUMNS = 8  # of a row; see trace_kernels

Awaits = Callable[[int, int, int], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Stamps:
    """One launch's buffer, int64 [len(steps) * num_tiles, 8], and what its rows mean.

    `steps[i]` names what ends at each stamp in the kernel's loop i over its tiles. `awaits(loop,
    segment, tile)` are the words, counted from READY, that such a tile waits for.
    """

    buffer: torch.Tensor
    steps: tuple[tuple[str, ...], ...]
    awaits: Awaits


@dataclass(frozen=True, eq=False)
class TracedLaunch:
    """A launch that stamps, without the tensors of its call: `numbers` are its integers."""

    kernel: str
    grid: int
    context: int
    numbers: dict[str, int]
    stamps: Stamps


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One program that a rank ran: a slice of an operator's call."""

    rank: int
    index: int  # of this rank's programs in the trace, from 0
    operator: str
    launches: list[TracedLaunch]
    pacers: list[PacerRun]


class Trace:
    """The time stamps of the calls made inside `with` blocks on it, of one thread or several."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self._given: list[Stamps] = []

    def __enter__(self) -> Trace:
        """Trace what this thread calls from now on."""
        _local.active = (*_local.active, self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Trace what was traced before."""
        _local.active = _local.active[:-1]

    def events(self) -> list[TileEvent]:
        """One for each tile that ran, in the order of calls and of the kernels' loops.

        Waits for the current stream. A CUDA graph of a traced call writes its stamps again at every
        replay: these are the last one's.
        """
        return [tile for call in self.calls for tile in read_tiles(call)]

    def transfers(self) -> list[Transfer]:
        """What came over the paced link of emulated peers; of other groups nothing is known."""
        return [each for call in self.calls for each in read_transfers(call, read_tiles(call))]

    def summary(self) -> list[CallSummary]:
        """Of each call the waves, the first and last tile, and the shares of SM time."""
        calls = sorted(self.calls, key=lambda call: (call.rank, call.index))
        return [summarize(tiles) for call in calls if (tiles := read_tiles(call))]

    def to_perfetto(self) -> dict[str, Any]:
        """The JSON object of `write`."""
        return to_perfetto(*to_slices(self.events(), self.transfers()))

    def write(self, path: str | PathLike[str]) -> None:
        """Write a trace for https://ui.perfetto.dev: a process a rank, a thread an SM, the link."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_perfetto(), file)

    def _note(self, group: Group, program: Program) -> None:
        launches = []
        for launch in program.launches():
            buffer = launch.args.get("trace_ptr")
            stamps = next((each for each in self._given if each.buffer is buffer), None)
            if stamps is not None:
                self._given.remove(stamps)  # other ranks' threads wait for theirs
                launches.append(
                    TracedLaunch(
                        launch.kernel.fn.__name__,
                        launch.grid,
                        launch.args["ctx_ptr"].data_ptr(),
                        {name: n for name, n in launch.args.items() if isinstance(n, int)},
                        stamps,
                    )
                )
        index = sum(call.rank == group.rank for call in self.calls)
        pacers = pacer_runs(program)
        self.calls.append(TracedCall(group.rank, index, program.operator, launches, pacers))


class _Local(threading.local):
    active: tuple[Trace, ...] = ()


_local = _Local()


def trace() -> Trace:
    """Record when each tile of `ag_gemm`, `gemm_rs` and `gemm_ar` waits, multiplies and stores.

    Use it as `with plait.trace() as trace:` around calls, each of which is traced in the thread
    that enters; several ranks' threads may enter the same trace. Afterwards `trace.events()` lists
    the tiles with their SM and times in ns, `trace.summary()` says what SMs spent their time with,
    `trace.write(path)` writes JSON for https://ui.perfetto.dev. Traced calls are a little slower
    and take more host time: capture one in a CUDA graph and replay it to see its GPU time.
    """
    return Trace()


def is_tracing() -> bool:
    """Whether this thread's calls are traced."""
    return bool(_local.active)


def trace_args(
    group: Group, num_tiles: int, steps: tuple[tuple[str, ...], ...], awaits: Awaits
) -> dict[str, Any]:
    """What a launch over `num_tiles` tiles gets in addition: nothing, or a buffer of stamps."""
    if not _local.active:
        return {}
    rows = max(1, len(steps) * num_tiles)
    buffer = torch.zeros(rows, _COLUMNS, dtype=torch.int64, device=group.device)
    _local.active[-1]._given.append(Stamps(buffer, steps, awaits))
    return {"trace_ptr": buffer, "TRACE": True}


def note_program(group: Group, program: Program) -> None:
    """Remember a program that this thread has just enqueued, if it is traced."""
    if _local.active:
        _local.active[-1]._note(group, program)


__all__ = [
    "Awaits",
    "Stamps",
    "Trace",
    "TracedCall",
    "is_tracing",
    "note_program",
    "trace",
    "trace_args",
]
