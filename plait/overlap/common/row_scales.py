"""Scales that travel with the rows of a gather: pushed to a peer ahead of its first chunk.

Behind the gathered rows a region holds fp32 [world_size, padded_rows, columns], one slot a sender:
one scale a row, or one for each 128 of K. A rank with one scale for all its rows sends only that,
to the start of its slot. No signal is added: a sender's copies are ordered, so whoever waits for
one of its chunks has its scales as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.backends.commands import Arrival, Arrivals, Copy, Step
from plait.collectives.push import Chunks, gather_bytes, push_rows
from plait.collectives.segments import Segments, padded_rows
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

SCALE_BYTES = 4


@dataclass(frozen=True)
class RowScales:
    """This rank's fp32 scales as they travel: `values` [rows, columns], or [1, 1] if `shared`.

    `copied`: they were laid out anew for this call.
    """

    values: torch.Tensor
    shared: bool
    copied: bool = False

    @staticmethod
    def of(x_scale: torch.Tensor, segments: Segments, rank: int) -> RowScales:
        """From a contiguous [rows], [1] or [rows, columns]; `segments` are whole, no slice.

        Ranks must agree on the layout without asking, and one scale for one row may be either. So
        where any rank has exactly one row, all ranks have a scale a row.
        """
        flat = x_scale.view(-1, x_scale.shape[-1] if x_scale.dim() == 2 else 1)
        if x_scale.numel() != 1:
            return RowScales(flat, False)
        if 1 not in segments.rows:
            return RowScales(flat, True)
        rows = segments.rows[rank]
        return RowScales(flat.expand(rows, 1).contiguous(), False, copied=rows != 1)

    @property
    def columns(self) -> int:
        """Scales of a row."""
        return self.values.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes that a row's scales take in a region."""
        return self.columns * SCALE_BYTES

    def rows(self, first: int, count: int) -> RowScales:
        """Those of `count` rows from `first` on."""
        return self if self.shared else RowScales(self.values[first : first + count], False)


def slot(
    region: Region, segments: Segments, row_bytes: int, scales: RowScales, peer: int, sender: int
) -> torch.Tensor:
    """`sender`'s scales in `peer`'s region, behind rows of `row_bytes`."""
    rows = 1 if scales.shared else segments.rows[sender]
    slot_bytes = padded_rows(segments.max_rows) * scales.row_bytes
    offset = gather_bytes(segments, row_bytes) + sender * slot_bytes
    return region.data(peer, offset, (rows, scales.columns), torch.float32)


def gathered_scales(
    region: Region, segments: Segments, row_bytes: int, scales: RowScales
) -> torch.Tensor:
    """All slots of this rank's region, [world_size, padded_rows, columns]."""
    shape = (segments.world_size, padded_rows(segments.max_rows), scales.columns)
    return region.data(region.rank, gather_bytes(segments, row_bytes), shape, torch.float32)


def push_scaled_rows(
    group: Group,
    region: Region,
    x: torch.Tensor,
    scales: RowScales,
    segments: Segments,
    chunks: Chunks,
) -> list[Step]:
    """`push_rows` of x [rows, K], each peer's copies preceded by one of this rank's scales."""
    row_bytes = x.shape[1] * x.element_size()
    begin, *pushes, arrivals = push_rows(group, region, x, segments, chunks)
    assert isinstance(arrivals, Arrivals), "push_rows ends with what arrives meanwhile"
    each = len(pushes) // max(group.world_size - 1, 1)  # copies and signals for one peer
    steps: list[Step] = [begin]
    for step in range(group.world_size - 1):
        peer = (group.rank + 1 + step) % group.world_size
        if each:
            there = slot(region, segments, row_bytes, scales, peer, group.rank)
            steps.append(Copy(there, scales.values))
        steps += pushes[step * each : (step + 1) * each]
    steps.append(_arrivals(region, arrivals, scales, segments, row_bytes, chunks))
    return steps


def _arrivals(
    region: Region,
    rows: Arrivals,
    scales: RowScales,
    segments: Segments,
    row_bytes: int,
    chunks: Chunks,
) -> Arrivals:
    """The counterpart: what emulated peers send. Their scales set words that nobody waits for."""

    def build() -> list[Arrival]:
        found: list[Arrival] = []
        begun: set[int] = set()
        for arrival in rows.build():
            peer = arrival.peer
            if peer not in begun:
                begun.add(peer)
                there, here = (
                    slot(region, segments, row_bytes, scales, each, peer)
                    for each in (region.rank, peer)
                )
                spare = signals.READY + segments.world_size * chunks.num + peer
                word = region.word(region.rank, spare)
                found.append(Arrival(peer, word, there.numel() * SCALE_BYTES, there, here))
            found.append(arrival)
        return found

    key = (*rows.key, "scales", scales.columns, scales.shared)
    return Arrivals(rows.ctx, rows.mirror, key, build)


__all__ = ["RowScales", "gathered_scales", "push_scaled_rows"]
