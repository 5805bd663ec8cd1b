"""Time stamps of tiles, for kernels that are traced.

A trace buffer is int64 [rows, 8] of zeros; a tile, or a tile in one of a kernel's loops, has one
row: SM, segment, tile within the segment, when it began, and up to four stamps after that, in ns.
Row numbers are the loop's own indices, so no two tiles share a row and blocks need not agree; the
block is the row modulo the grid. Each stamp is stored at once: held in registers until the tile
ends, they would spill beside the accumulator. Without TRACE nothing of this is compiled.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import globaltimer, smid

_ROW = tl.constexpr(8)
_BEGIN = tl.constexpr(3)


@triton.jit
def record_tile(trace_ptr, row, segment, tile, TRACE: tl.constexpr):
    """Begin a row: which tile it is, and that it begins now."""
    if TRACE:
        ptr = trace_ptr + row * _ROW
        tl.store(ptr, smid())
        tl.store(ptr + 1, segment)
        tl.store(ptr + 2, tile)
        tl.store(ptr + _BEGIN, globaltimer())


@triton.jit
def record(trace_ptr, row, STAMP: tl.constexpr, TRACE: tl.constexpr):
    """Stamp number STAMP (1 to 4) of the tile that began this row."""
    if TRACE:
        tl.store(trace_ptr + row * _ROW + (_BEGIN + STAMP), globaltimer())
