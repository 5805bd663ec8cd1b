"""Programs of the live rank with its peers' part added. Pure: nothing here touches a device.

`Emulation` decides what runs; where tables live and what runs programs is the executor's matter.
Docs: docs/design/emulation.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from plait.backends.commands import (
    Arrival,
    Arrivals,
    Command,
    Copy,
    Launch,
    Program,
    Signal,
    StreamWait,
)
from plait.errors import UnsupportedError
from plait.symm.transports.link import Link

FRACTION = 256  # times on the link are in 1/256 ns
PACER_BLOCK = 512  # entries looked at together; at least signals.MAX_RANKS
_TRAFFIC_BLOCKS = 128  # with 8 KiB in flight each: enough for 360 GB/s at 2.9 us a round
_TRAFFIC_WORDS = 2048


class Tables(Protocol):
    """Where the pacer's tables are kept."""

    def get(self, key: tuple[Any, ...], build: Callable[[], list[list[int]]]) -> torch.Tensor:
        """The int64 tensor [4, entries] made of `build()`, on the device."""
        ...


@dataclass
class EmulatedProgram(Program):
    """A program that has its peers' part already."""


@dataclass(frozen=True)
class Emulation:
    """The peers' part in every program: pacer launches or real copies on the stream "peers".

    `is_peer` says whether a tensor lies in an emulated peer's memory.
    """

    link: Link
    world_size: int
    tables: Tables
    is_peer: Callable[[torch.Tensor], bool]

    def emulate(self, program: Program) -> Program:
        """The program with its peers: what they send follows each prologue on "peers", which
        `main` joins at the end. A barrier is empty: mirror images arrive when the live rank does.

        UnsupportedError: a kernel that opens a region of which nobody says what peers put there.
        """
        return self._rewrite(program, alone=False)

    def communication_alone(self, program: Program) -> Program:
        """The same transfers without any computation: prologues, what comes and what goes by copy
        engine, a wait for all of it, and the close of each region. Every piece is ready when the
        call opens, and what the operator's kernels would store into peers does not travel."""
        return self._rewrite(program, alone=True)

    def _rewrite(self, program: Program, alone: bool) -> Program:
        result = EmulatedProgram(program.operator, members=program.members)
        if self.world_size == 1 and not alone:
            return result.add(*program.commands)
        opened: list[tuple[Launch, list[Arrivals]]] = []
        for command in program.commands:
            if isinstance(command, Launch) and _is_prologue(command):
                arrivals = _arrivals_of(program, command)
                opened.append((command, arrivals))
                result.add(_closed_by_one(command) if alone else command)
                if self.world_size > 1:
                    result.add(StreamWait("peers", on="main"), *self._incoming(arrivals, alone))
            elif not _is_barrier(command):
                result.add(*self._own(command, alone))
        if alone:
            result.add(*itertools.starmap(self._await, opened))
            if any(isinstance(c, StreamWait) and c.stream == "comm" for c in result.commands):
                result.add(StreamWait("main", on="comm"))
        if opened and self.world_size > 1:
            result.add(StreamWait("main", on="peers"))
        return result

    # --- what comes
    def _incoming(self, groups: Sequence[Arrivals], alone: bool) -> Iterator[Command]:
        for index, arrivals in enumerate(groups):
            last = index == len(groups) - 1
            if self.link.kind == "paced":
                yield self._pacer(arrivals, alone, None, last)
                continue
            pieces = arrivals.build()
            copies = [piece for piece in pieces if piece.dst is not None]
            for number, piece in enumerate(copies):
                yield from self._copied(arrivals, piece, number, alone)
            stored = tuple(i for i, piece in enumerate(pieces) if piece.dst is None)
            if stored or last:
                yield self._pacer(arrivals, alone, stored, last)

    def _copied(
        self, arrivals: Arrivals, piece: Arrival, number: int, alone: bool
    ) -> Iterator[Command]:
        assert piece.dst is not None
        assert piece.src is not None
        if piece.after is not None and not alone:
            gate = [piece.after.data_ptr(), 0, 0, 0]
            table = self.tables.get((*arrivals.key, "gate", number), lambda: [gate])
            yield self._launch_pacer(arrivals, table, latency_us=0.0, consume=False)
        yield Copy(piece.dst, piece.src, "peers")
        yield Signal(piece.word, arrivals.mirror, "peers")

    def _pacer(
        self, arrivals: Arrivals, alone: bool, chosen: tuple[int, ...] | None, consume: bool
    ) -> Launch:
        table = self._table(arrivals, alone, chosen)
        return self._launch_pacer(arrivals, table, self.link.latency_us, consume)

    def _launch_pacer(
        self, arrivals: Arrivals, table: torch.Tensor, latency_us: float, consume: bool
    ) -> Launch:
        from plait.symm.transports.pacer_kernels import _pacer_kernel

        args = {
            "ctx_ptr": arrivals.ctx,
            "table_ptr": table,
            "num_entries": table.shape[1],
            "latency": round(latency_us * 1000 * FRACTION),
            "BLOCK": PACER_BLOCK,
            "CONSUME": consume,
        }
        return Launch(_pacer_kernel, 1, args, num_warps=4, stream="peers")

    def _table(
        self, arrivals: Arrivals, alone: bool, chosen: tuple[int, ...] | None
    ) -> torch.Tensor:
        def rows() -> list[list[int]]:
            pieces = arrivals.build()
            if chosen is not None:
                pieces = [pieces[index] for index in chosen]
            return [self._entry(piece, alone) for piece in pieces]

        return self.tables.get((*arrivals.key, alone, chosen), rows)

    def _entry(self, piece: Arrival, alone: bool) -> list[int]:
        trigger = 0 if alone or piece.after is None else piece.after.data_ptr()
        cost = round(piece.nbytes / self.link.gb_s * FRACTION)  # bytes / (GB/s) = ns
        return [trigger, piece.word.data_ptr(), cost, 0]

    def _await(self, prologue: Launch, arrivals: list[Arrivals]) -> Launch:
        """Wait on `main` for all that comes, and close the region."""
        from plait.symm.transports.pacer_kernels import _await_kernel

        def rows() -> list[list[int]]:
            return [self._entry(piece, True) for each in arrivals for piece in each.build()]

        key = tuple(each.key for each in arrivals)
        table = self.tables.get(("await", *key), rows)
        args = {
            "ctx_ptr": prologue.args["ctx_ptr"],
            "table_ptr": table,
            "num_entries": table.shape[1],
            "BLOCK": PACER_BLOCK,
        }
        return Launch(_await_kernel, 1, args, num_warps=4)

    # --- what goes
    def _own(self, command: Command, alone: bool) -> Iterator[Command]:
        """The live rank's own command, as far as it runs."""
        copies = isinstance(command, (Copy, Signal)) and command.stream == "comm"
        if alone and not copies and not isinstance(command, StreamWait):
            return
        if self.link.kind == "paced" and isinstance(command, Copy) and self.is_peer(command.dst):
            if self.link.traffic:
                yield self._traffic(command)
            return
        yield command

    def _traffic(self, copy: Copy) -> Command:
        """The same copy at the link's rate, by blocks that run beside a GEMM."""
        from plait.symm.transports.pacer_kernels import _traffic_kernel

        nbytes = copy.src.numel() * copy.src.element_size()
        aligned = (nbytes | copy.src.data_ptr() | copy.dst.data_ptr()) % 4 == 0
        if not (aligned and copy.src.is_contiguous() and copy.dst.is_contiguous()):
            return copy
        round_bytes = _TRAFFIC_BLOCKS * _TRAFFIC_WORDS * 4
        args = {
            "dst_ptr": copy.dst.detach(),
            "src_ptr": copy.src.detach(),
            "num_words": nbytes // 4,
            "round_time": round(round_bytes / self.link.gb_s * FRACTION),
            "BLOCK": _TRAFFIC_WORDS,
        }
        return Launch(_traffic_kernel, _TRAFFIC_BLOCKS, args, num_warps=4, stream="comm")


def _is_prologue(launch: Launch) -> bool:
    from plait.symm.kernels import _prologue_kernel

    return launch.kernel is _prologue_kernel


def _is_barrier(command: Command) -> bool:
    from plait.symm.kernels import _barrier_kernel

    return isinstance(command, Launch) and command.kernel is _barrier_kernel


def _closed_by_one(prologue: Launch) -> Launch:
    """The prologue of a call that one block closes."""
    return dataclasses.replace(prologue, args={**prologue.args, "num_arrivals": 1})


def _arrivals_of(program: Program, prologue: Launch) -> list[Arrivals]:
    """What comes into the region that a prologue opens."""
    address = prologue.args["ctx_ptr"].data_ptr()
    found = [each for each in program.arrivals if each.ctx.data_ptr() == address]
    if not found:
        raise UnsupportedError(
            argument="group",
            expected="a program that says what its peers send (`Program.arrivals`)",
            got=f"{program.operator}, which does not, in a group with emulated peers",
            remedy="Use plait.run_virtual or real ranks for kernels of your own.",
        )
    return found


__all__ = ["FRACTION", "PACER_BLOCK", "EmulatedProgram", "Emulation", "Tables"]
