"""Device form of `Segments`: where a row of a rank's segment lies in the whole."""

import triton
import triton.language as tl


@triton.jit
def whole_rows(table_ptr, segment, rows, world_size, total):
    """Rows (int64) of the whole for `rows` of a slice of `segment` (collectives.segments)."""
    length = tl.load(table_ptr + world_size + segment)
    start = tl.load(table_ptr + 2 * world_size + segment)
    within = rows + tl.load(table_ptr + 3 * world_size + segment)
    outer = within // length
    return outer.to(tl.int64) * total + start + (within - outer * length)
