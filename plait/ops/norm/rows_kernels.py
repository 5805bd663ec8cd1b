"""Device functions that find the rows of a block (plait/ops/norm/rows.py).

A row is named by `inner`, its index in the last of the dims that number the rows, and `outer`, the
count over the dims before. `outer` is a scalar where TILED, so that offsets of neighbours are seen
to be contiguous and no division happens per row.
"""

import triton
import triton.language as tl


@triton.jit
def block_rows(block, num_rows, n3, ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr):
    """`outer`, `inner`, `mask` of the ROWS rows of a block; `inner` and `mask` are (ROWS,)."""
    return rows_at(block, tl.arange(0, ROWS), num_rows, n3, ROWS, NDIM, TILED)


@triton.jit
def rows_at(
    block, lane, num_rows, n3, ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr
):  # fmt: skip
    """The same of rows `lane` of a block; `inner` and `mask` have the shape of `lane`."""
    if TILED:
        per_outer = tl.cdiv(n3, ROWS)
        outer = block // per_outer
        inner = (block % per_outer) * ROWS + lane
        mask = inner < n3
    elif NDIM == 1:
        outer = 0
        inner = block * ROWS + lane
        mask = inner < num_rows
    else:
        row = block * ROWS + lane
        outer = row // n3
        inner = row % n3
        mask = row < num_rows
    return outer, inner, mask


@triton.jit
def row_number(outer, inner, n3, NDIM: tl.constexpr, WIDE: tl.constexpr):
    """The place of a row in the count over all dims, for one value a row."""
    if WIDE:
        inner = inner.to(tl.int64)
    if NDIM == 1:
        return inner
    return outer * n3 + inner


@triton.jit
def row_offset(
    outer, inner, n1, n2, s0, s1, s2, s3, NDIM: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Where rows start, in elements, in a tensor with strides s0 to s3."""
    if WIDE:
        inner = inner.to(tl.int64)
        if NDIM > 1:
            outer = outer.to(tl.int64)
    offset = inner * s3
    if NDIM == 2:
        offset += outer * s2
    if NDIM > 2:
        offset += (outer % n2) * s2
        outer = outer // n2
    if NDIM == 3:
        offset += outer * s1
    if NDIM > 3:
        offset += (outer % n1) * s1 + (outer // n1) * s0
    return offset


@triton.jit
def lane_offset(lane, step, WIDE: tl.constexpr):
    """Where elements `lane` of a row lie, counted from its start."""
    if WIDE:
        lane = lane.to(tl.int64)
    return lane * step


@triton.jit
def whole_vectors(first, length, VEC: tl.constexpr):
    """Of `length` elements from offset `first` on: how many precede the first offset that VEC
    divides, and how many make whole vectors from there."""
    head = tl.minimum((VEC - first % VEC) % VEC, length)
    return head, (length - head) // VEC * VEC


@triton.jit
def outside_vectors(head, middle, length, VEC: tl.constexpr):
    """Places, and their mask, of the elements before and after the whole vectors: (2 VEC,)."""
    lane = tl.arange(0, 2 * VEC)
    after = lane - VEC + head + middle
    return tl.where(lane < VEC, lane, after), tl.where(lane < VEC, lane < head, after < length)


__all__ = [
    "block_rows",
    "lane_offset",
    "outside_vectors",
    "row_number",
    "row_offset",
    "whole_vectors",
]
