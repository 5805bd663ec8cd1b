"""Which rank's rows are worked on at which step, so that work follows the data on the link.

Both functions are Python on ints and Triton on scalars, like everything in `raster.py`.
"""

from __future__ import annotations


def arrival_segment(step: int, rank: int, world_size: int) -> int:
    """Segment that an AllGather by push delivers at `step`: own rows, then rank-1, rank-2, ...

    Every rank pushes to rank+1 first, so at step s the rows of rank-s arrive, and no two ranks
    send to the same receiver at the same time. 0 <= step < world_size.
    """
    return (rank + world_size - step) % world_size


def departure_segment(step: int, rank: int, world_size: int) -> int:
    """Segment a GEMM with ReduceScatter computes at `step`: rank+1, rank+2, ..., own rows last.

    What has to travel is computed first, and at each step all ranks compute for different
    receivers. The own segment, which needs the peers' partial sums, comes when they are there.
    """
    return (rank + 1 + step) % world_size


__all__ = ["arrival_segment", "departure_segment"]
