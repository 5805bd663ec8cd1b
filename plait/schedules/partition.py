"""How rows are split over ranks and into tiles, and the tile order over several ranks' segments.

A *segment* is the rows of one rank. It is tiled on its own: a tile never spans two segments, so
the wait for one segment is one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

from plait.schedules.rank_rotation import arrival_segment, departure_segment
from plait.schedules.raster import grouped_raster

Order = Literal["arrival", "departure"]

_SEGMENT_AT: dict[str, Callable[[int, int, int], int]] = {
    "arrival": arrival_segment,
    "departure": departure_segment,
}


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of `multiple` not below `a`."""
    return ceil_div(a, multiple) * multiple


def split_rows(total: int, world_size: int) -> tuple[int, ...]:
    """Rows of each rank: as equal as possible, the first `total % world_size` ranks one more."""
    base, extra = divmod(total, world_size)
    return tuple(base + (rank < extra) for rank in range(world_size))


def row_offsets(rows_per_rank: Sequence[int]) -> tuple[int, ...]:
    """First row of each segment, and the total: `world_size + 1` numbers."""
    return (0, *accumulate(rows_per_rank))


def segment_tile_counts(rows_per_rank: Sequence[int], num_n: int, block_m: int) -> tuple[int, ...]:
    """Output tiles of each segment, `num_n` tile columns wide."""
    return tuple(ceil_div(rows, block_m) * num_n for rows in rows_per_rank)


def num_segmented_tiles(rows_per_rank: Sequence[int], num_n: int, block_m: int) -> int:
    """Output tiles of all segments together: the bound of a persistent kernel's tile loop."""
    return sum(segment_tile_counts(rows_per_rank, num_n, block_m))


def segmented_tile(
    tile: int,
    rank: int,
    rows_per_rank: Sequence[int],
    num_n: int,
    block_m: int,
    group_m: int,
    order: Order,
) -> tuple[int, int, int, int]:
    """(step, segment, m, n) of linear index `tile` on `rank`; m counts tiles within the segment.

    The host form of `plait.schedules.lang.segmented_tile`. Segments without rows take no index.
    """
    world_size = len(rows_per_rank)
    local = tile
    for step in range(world_size):
        segment = _SEGMENT_AT[order](step, rank, world_size)
        num_m = ceil_div(rows_per_rank[segment], block_m)
        if local < num_m * num_n:
            m, n = grouped_raster(local, num_m, num_n, group_m)
            return step, segment, m, n
        local -= num_m * num_n
    raise IndexError(
        f"tile {tile} of {num_segmented_tiles(rows_per_rank, num_n, block_m)} tiles; "
        "bound the loop by num_segmented_tiles(...)"
    )


def segmented_tiles(
    rows_per_rank: Sequence[int],
    num_n: int,
    block_m: int,
    group_m: int,
    rank: int,
    order: Order,
) -> Iterator[tuple[int, int, int]]:
    """(segment, m, n) of every output tile in the order in which `rank` computes them.

    Args:
        rows_per_rank: rows of each of the `world_size` segments, any of them 0.
        num_n: tile columns.
        block_m: rows of one tile.
        group_m: rows of tiles that are walked together within a segment.
        order: "arrival" (AllGather before the GEMM) or "departure" (ReduceScatter after it).
    """
    for tile in range(num_segmented_tiles(rows_per_rank, num_n, block_m)):
        yield segmented_tile(tile, rank, rows_per_rank, num_n, block_m, group_m, order)[1:]


__all__ = [
    "Order",
    "ceil_div",
    "num_segmented_tiles",
    "round_up",
    "row_offsets",
    "segment_tile_counts",
    "segmented_tile",
    "segmented_tiles",
    "split_rows",
]
