"""The order in which a persistent kernel walks the tiles of one output matrix.

The arithmetic here is at once Python on ints and Triton on scalars: `plait.schedules.lang` makes
the device form out of the same source. Everything stays non-negative, because `//` and `%` round
down in Python and towards zero in Triton.
"""

from __future__ import annotations


def grouped_raster(tile: int, num_m: int, num_n: int, group_m: int) -> tuple[int, int]:
    """Tile (m, n) of linear index `tile`, 0 <= tile < num_m * num_n.

    Walks down `group_m` rows of tiles before it moves one column on, so that the tiles in flight
    share rows of A and columns of B in the L2 cache. The last group may be lower.

    Example: 3 x 2 tiles, group_m=2 gives (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    tiles_per_group = group_m * num_n
    group = tile // tiles_per_group
    first_m = group * group_m
    height = min(num_m - first_m, group_m)
    within = tile - group * tiles_per_group
    n = within // height
    m = first_m + within - n * height
    return m, n


__all__ = ["grouped_raster"]
