"""Pushing rows to peers by copy engine: the communication half of every collective.

A region holds [world_size, slot rows, features], one slot for each sender. Each rank sends to
rank+1 first, then rank+2, ...; each chunk of rows is followed by its signal in the receiver's words
READY + sender * num_chunks + chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.backends.commands import (
    Arrival,
    Arrivals,
    Copy,
    Launch,
    Signal,
    Step,
    StreamWait,
)
from plait.collectives.segments import Segments, padded_rows
from plait.errors import CapacityError
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.regions import close_region, open_region
from plait.symm.workspace import Region

_CHUNK_BYTES = 4 << 20  # smaller copies do not fill a link
_MAX_CHUNKS = 4


@dataclass(frozen=True)
class Chunks:
    """How each rank's rows are cut: the same on every rank."""

    num: int
    rows: int

    @staticmethod
    def of(max_rows: int, row_bytes: int, device: torch.device) -> Chunks:
        """Up to four chunks a rank, none much under 4 MiB; on the CPU two, so cuts are tried."""
        wanted = 2 if device.type == "cpu" else max_rows * row_bytes // _CHUNK_BYTES
        num = max(1, min(_MAX_CHUNKS, wanted, max_rows))
        rows = -(-max(max_rows, 1) // num)
        if num > 1 and rows > 128:
            rows = -(-rows // 128) * 128
        return Chunks(num, rows)

    def pieces(self, rows: int) -> list[tuple[int, int, int]]:
        """(chunk, first row, rows) of a segment of `rows` rows."""
        return [
            (chunk, chunk * self.rows, min(self.rows, rows - chunk * self.rows))
            for chunk in range(self.num)
            if chunk * self.rows < rows
        ]


def gather_bytes(segments: Segments, row_bytes: int) -> int:
    """Bytes of a region that holds every rank's rows of one slice."""
    return segments.world_size * padded_rows(segments.max_rows) * row_bytes


def slice_rows(segments: Segments, row_bytes: int, capacity_bytes: int) -> int:
    """The most rows a slice may have so that its gather fits; CapacityError if not one fits."""
    rows = segments.max_rows
    while rows > 1 and segments.world_size * padded_rows(rows) * row_bytes > capacity_bytes:
        rows = rows // 2 if rows <= 128 else max(128, rows // 2 // 128 * 128)
    needed = segments.world_size * padded_rows(rows) * row_bytes
    if needed > capacity_bytes:
        raise CapacityError(
            argument="PLAIT_WORKSPACE_BYTES",
            expected=f"room for {needed} bytes in each of two regions",
            got=f"{capacity_bytes} bytes a region",
            remedy="Raise PLAIT_WORKSPACE_BYTES: not even one row a rank fits.",
        )
    return max(rows, 1)


def push_tensors(
    group: Group,
    region: Region,
    sends: Sequence[torch.Tensor],
    receives: Sequence[int],
    slot_rows: int,
    chunks: Chunks,
) -> list[Step]:
    """Send `sends[p]` [rows_p, features] to every peer p, into this rank's slot of p's region.

    A slot has `padded_rows(slot_rows)` rows; `slot_rows` and `chunks` are the same on every rank
    and no tensor has more rows. All have the same features and dtype; without rows nothing is sent
    and nothing signalled. `receives[p]` rows come from p meanwhile. Starts after what `main` holds
    now.
    """
    commands: list[Step] = [StreamWait("comm", on="main")]
    for step in range(1, group.world_size):
        peer = (group.rank + step) % group.world_size
        commands += push_to(region, peer, sends[peer], slot_rows, chunks)
    own = sends[group.rank]
    commands.append(
        pushed_arrivals(region, tuple(receives), own.shape[1], own.dtype, slot_rows, chunks)
    )
    return commands


def push_to(
    region: Region, peer: int, rows: torch.Tensor, slot_rows: int, chunks: Chunks
) -> list[Step]:
    """Send `rows` [rows, features] into this rank's slot of `peer`'s region, chunk by chunk."""
    commands: list[Step] = []
    row_bytes = rows.shape[1] * rows.element_size()
    slot = region.rank * padded_rows(slot_rows) * row_bytes
    for chunk, first, count in chunks.pieces(rows.shape[0]):
        piece = rows[first : first + count]
        there = region.data(peer, slot + first * row_bytes, tuple(piece.shape), piece.dtype)
        word = region.word(peer, signals.READY + region.rank * chunks.num + chunk)
        commands += [Copy(there, piece), Signal(word, region.mirror)]
    return commands


def pushed_arrivals(
    region: Region,
    receives: tuple[int, ...],
    features: int,
    dtype: torch.dtype,
    slot_rows: int,
    chunks: Chunks,
    sends: tuple[int, ...] | None = None,
) -> Arrivals:
    """The counterpart of pushes: at step s, what rank-s sends comes in here.

    All of it is there to be sent when the call opens, or, with `sends` (the rows that go to each
    rank), when this rank has sent the same share of what it sends at that step.
    """
    rank, world_size = region.rank, len(receives)
    row_bytes = features * dtype.itemsize

    def build() -> list[Arrival]:
        arrivals: list[Arrival] = []
        for step in range(1, world_size):
            peer, receiver = (rank - step) % world_size, (rank + step) % world_size
            slot = peer * padded_rows(slot_rows) * row_bytes
            incoming = chunks.pieces(receives[peer])
            sent = [] if sends is None else chunks.pieces(sends[receiver])
            for index, (chunk, first, count) in enumerate(incoming):
                place = (slot + first * row_bytes, (count, features), dtype)
                word = region.word(rank, signals.READY + peer * chunks.num + chunk)
                dst, src = region.data(rank, *place), region.data(peer, *place)
                after = None
                if sent:
                    mirrored = sent[index * len(sent) // len(incoming)][0]
                    after = region.word(receiver, signals.READY + rank * chunks.num + mirrored)
                arrivals.append(Arrival(peer, word, count * row_bytes, dst, src, after))
        return arrivals

    key = ("push", region.index, receives, row_bytes, slot_rows, chunks, sends)
    return Arrivals(region.ctx, region.mirror, key, build)


def push_rows(
    group: Group, region: Region, x: torch.Tensor, segments: Segments, chunks: Chunks
) -> list[Step]:
    """Send this rank's rows `x` [rows, features] of the slice to every peer's region.

    The region holds [world_size, padded_rows, features]. Starts after what `main` holds now.
    """
    sends = [x] * group.world_size
    return push_tensors(group, region, sends, segments.rows, segments.max_rows, chunks)


def await_rows(
    region: Region,
    slots: torch.Tensor,
    table: torch.Tensor,
    chunks: Chunks,
    operator: signals.Operator,
) -> Launch:
    """Wait on `main` for all rows that peers push into `slots` [world_size, slot rows, features].

    `table` (int32, on the device) begins with the rows that each rank sends here.
    """
    from plait.collectives.kernels import _arrive_kernel

    args = {
        "ctx_ptr": region.ctx,
        "table_ptr": table,
        "slots_ptr": slots.view(-1).view(torch.int32),
        "slot_words": slots[0].numel() * slots.element_size() // 4,
        "num_chunks": chunks.num,
        "chunk_rows": chunks.rows,
        "BLOCK": 1024,
        "OP": int(operator),
    }
    return Launch(_arrive_kernel, 1, args, num_warps=1)


def gathered_view(
    region: Region, segments: Segments, features: int, dtype: torch.dtype
) -> torch.Tensor:
    """This rank's region after `push_rows`, as [world_size, padded_rows, features]."""
    shape = (segments.world_size, padded_rows(segments.max_rows), features)
    return region.data(region.rank, 0, shape, dtype)


__all__ = [
    "Chunks",
    "await_rows",
    "close_region",
    "gather_bytes",
    "gathered_view",
    "open_region",
    "push_rows",
    "push_tensors",
    "push_to",
    "pushed_arrivals",
    "slice_rows",
]
