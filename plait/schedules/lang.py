"""Device forms of the tile orders, for use inside `@triton.jit` kernels.

`grouped_raster`, `arrival_segment` and `departure_segment` are compiled from the very functions
that the host uses. A persistent kernel over several ranks' rows reads

    for tile in range(tl.program_id(0), num_tiles, num_blocks):
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, rows_table_ptr, num_n, BLOCK_M, GROUP_M, ARRIVAL)

with `num_tiles` from `plait.schedules.partition.num_segmented_tiles`.
"""

import types

import triton
import triton.language as tl

from plait.schedules import rank_rotation, raster


def _device_form(function):
    """The device form of a leaf function of plain arithmetic.

    Triton's own interpreter refuses functions whose module does not import triton.language, and
    the host modules must not need Triton: so this one sees `tl` among its globals.
    """
    namespace = {**function.__globals__, "tl": tl}
    return triton.jit(types.FunctionType(function.__code__, namespace, function.__name__))


grouped_raster = _device_form(raster.grouped_raster)
arrival_segment = _device_form(rank_rotation.arrival_segment)
departure_segment = _device_form(rank_rotation.departure_segment)


@triton.jit
def segment_at(step, rank, world_size, ARRIVAL: tl.constexpr):
    """Segment worked on at `step`: arrival order, or departure order if not ARRIVAL."""
    if ARRIVAL:
        segment = arrival_segment(step, rank, world_size)
    else:
        segment = departure_segment(step, rank, world_size)
    return segment


@triton.jit
def segmented_tile(
    tile,
    rank,
    world_size,
    rows_table_ptr,
    num_n,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    """(step, segment, m, n) of linear index `tile`; m counts tiles within the segment.

    rows_table_ptr: int32 [world_size], rows of each rank's segment, any of them 0.
    `tile` must be below the number of tiles of all segments: the search has no other end.

    Example: rows (3, 0, 4), BLOCK_M=2, num_n=1, rank 2, arrival order: segments are visited
    2, 1, 0, and the tiles are (0, 2, 0, 0) (0, 2, 1, 0) (2, 0, 0, 0) (2, 0, 1, 0).
    """
    local = tile
    step = 0
    segment = segment_at(step, rank, world_size, ARRIVAL)
    num_m = tl.cdiv(tl.load(rows_table_ptr + segment), BLOCK_M)
    while local >= num_m * num_n:
        local -= num_m * num_n
        step += 1
        segment = segment_at(step, rank, world_size, ARRIVAL)
        num_m = tl.cdiv(tl.load(rows_table_ptr + segment), BLOCK_M)
    m, n = grouped_raster(local, num_m, num_n, GROUP_M)
    return step, segment, m, n


__all__ = ["arrival_segment", "departure_segment", "grouped_raster", "segment_at", "segmented_tile"]
