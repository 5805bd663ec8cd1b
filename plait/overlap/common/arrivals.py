"""What peers' kernels store into this rank's region, tile by tile, for emulated peers.

Peers are mirror images: at each step peer rank-1-s stores for us what we store for rank+1+s, so a
tile is on its way when we have signalled its counterpart. Where segments differ in length, the
counterpart is the tile at the same share of the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.backends.commands import Arrival, Arrivals
from plait.ops.matmul.configs import Config
from plait.schedules.rank_rotation import departure_segment
from plait.schedules.raster import grouped_raster
from plait.symm.signals import READY
from plait.symm.workspace import Region


@dataclass(frozen=True)
class Tiles:
    """How every rank's segment of the result is cut; `words_per_rank` signal words a sender."""

    rows: tuple[int, ...]
    num_cols: int
    block_m: int
    block_n: int
    group_m: int
    words_per_rank: int

    @staticmethod
    def of(rows: Sequence[int], num_cols: int, config: Config, words_per_rank: int) -> Tiles:
        """Segments of `rows[p]` x num_cols in the tiles of a kernel's configuration."""
        return Tiles(
            tuple(rows), num_cols, config.block_m, config.block_n, config.group_m, words_per_rank
        )

    def in_order(self, segment: int) -> list[tuple[int, int]]:
        """(m * num_n + n, elements) of each tile of a segment as a kernel walks them."""
        rows = self.rows[segment]
        num_m, num_n = -(-rows // self.block_m), -(-self.num_cols // self.block_n)
        tiles: list[tuple[int, int]] = []
        for tile in range(num_m * num_n):
            m, n = grouped_raster(tile, num_m, num_n, self.group_m)
            height = min(self.block_m, rows - m * self.block_m)
            width = min(self.block_n, self.num_cols - n * self.block_n)
            tiles.append((m * num_n + n, height * width))
        return tiles


def partial_arrivals(
    region: Region, tiles: Tiles, itemsize: int, result_itemsize: int = 0
) -> Arrivals:
    """Partial tiles of `itemsize` bytes an element, sent to their owner (GEMM+RS); with
    `result_itemsize` every owner also sends its sums to all (two-shot GEMM+AR)."""

    def build() -> list[Arrival]:
        arrivals = _partials(region, tiles, itemsize)
        return arrivals + _results(region, tiles, result_itemsize) if result_itemsize else arrivals

    key = ("partials", region.index, tiles, itemsize, result_itemsize)
    return Arrivals(region.ctx, region.mirror, key, build)


def _partials(region: Region, tiles: Tiles, itemsize: int) -> list[Arrival]:
    rank, world_size, words = region.rank, len(tiles.rows), tiles.words_per_rank
    incoming = tiles.in_order(rank)
    arrivals: list[Arrival] = []
    for step in range(world_size - 1):
        receiver = departure_segment(step, rank, world_size)
        peer = (rank - 1 - step) % world_size
        sent = tiles.in_order(receiver)
        for index, (tile, elements) in enumerate(incoming):
            mirrored = sent[index * len(sent) // len(incoming)][0] if sent else None
            after = None
            if mirrored is not None:
                after = region.word(receiver, READY + rank * words + mirrored)
            word = region.word(rank, READY + peer * words + tile)
            arrivals.append(Arrival(peer, word, elements * itemsize, after=after))
    return arrivals


def _results(region: Region, tiles: Tiles, itemsize: int) -> list[Arrival]:
    """Sums of the other owners: on their way when we have signalled the sum at the same share."""
    rank, world_size, words = region.rank, len(tiles.rows), tiles.words_per_rank
    own = tiles.in_order(rank)
    found: list[tuple[int, Arrival]] = []
    for step in range(1, world_size):
        owner = (rank - step) % world_size
        theirs = tiles.in_order(owner)
        for index, (tile, elements) in enumerate(theirs):
            position = index * len(own) // len(theirs)
            after = None
            if own:
                after = region.word(owner, READY + (world_size + rank) * words + own[position][0])
            word = region.word(rank, READY + (world_size + owner) * words + tile)
            found.append((position, Arrival(owner, word, elements * itemsize, after=after)))
    return [arrival for _, arrival in sorted(found, key=lambda each: each[0])]


def broadcast_arrivals(region: Region, tiles: Tiles, itemsize: int) -> Arrivals:
    """Tiles that every rank sends to every peer, rank+1 first (one-shot GEMM+AR). The word of a
    tile is its place in the kernel's order, and every segment is the whole result."""
    rank, world_size, words = region.rank, len(tiles.rows), tiles.words_per_rank

    def build() -> list[Arrival]:
        arrivals: list[Arrival] = []
        for index, (_, elements) in enumerate(tiles.in_order(rank)):
            for step in range(1, world_size):
                receiver, peer = (rank + step) % world_size, (rank - step) % world_size
                after = region.word(receiver, READY + rank * words + index)
                word = region.word(rank, READY + peer * words + index)
                arrivals.append(Arrival(peer, word, elements * itemsize, after=after))
        return arrivals

    key = ("broadcast", region.index, tiles, itemsize)
    return Arrivals(region.ctx, region.mirror, key, build)


__all__ = ["Tiles", "broadcast_arrivals", "partial_arrivals"]
