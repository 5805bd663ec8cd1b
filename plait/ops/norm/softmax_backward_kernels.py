"""Kernels of the backward passes of softmax and log_softmax.

With result y and its gradient g along a row: softmax gives (g - sum(g y)) y, log_softmax gives
g - exp(y) sum(g). Tiles and ways as in softmax_kernels.py, with one figure a row: the sum.
"""

import triton
import triton.language as tl

from plait.ops.norm.rows_kernels import (
    block_rows,
    lane_offset,
    outside_vectors,
    row_number,
    row_offset,
    whole_vectors,
)
from plait.ops.norm.softmax_kernels import exp_of, widened


@triton.jit
def _term(g, y, LOG: tl.constexpr):
    if LOG:
        return g
    else:
        return g * y


@triton.jit
def _gradient(g, y, total, LOG: tl.constexpr, EXACT: tl.constexpr):
    if LOG:
        return g - exp_of(y, EXACT) * total[:, None]
    else:
        return (g - total[:, None]) * y


@triton.jit
def _softmax_backward_kernel(
    g_ptr, y_ptr, out_ptr, num_rows, n1, n2, n3, size,
    g_s0, g_s1, g_s2, g_s3, g_step, y_s0, y_s1, y_s2, y_s3, y_step,
    out_s0, out_s1, out_s2, out_s3, out_step,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK covers a row."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    g_row = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    y_row = row_offset(outer, inner, n1, n2, y_s0, y_s1, y_s2, y_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    lane = tl.arange(0, BLOCK)
    valid = mask[:, None] & (lane < size)[None, :]
    offs = g_row[:, None] + lane_offset(lane, g_step, WIDE)[None, :]
    g = widened(tl.load(g_ptr + offs, mask=valid, other=0.0))
    offs = y_row[:, None] + lane_offset(lane, y_step, WIDE)[None, :]
    y = widened(tl.load(y_ptr + offs, mask=valid, other=0.0))
    total = tl.sum(_term(g, y, LOG), 1)
    result = _gradient(g, y, total, LOG, out_ptr.dtype.element_ty == tl.float32)
    offs = out_row[:, None] + lane_offset(lane, out_step, WIDE)[None, :]
    tl.store(out_ptr + offs, result.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _terms(g_ptr, y_ptr, g_offs, y_offs, valid, LOG: tl.constexpr):
    g = widened(tl.load(g_ptr + g_offs, mask=valid, other=0.0))
    if LOG:
        return g
    else:
        return g * widened(tl.load(y_ptr + y_offs, mask=valid, other=0.0))


@triton.jit
def _total(
    g_ptr, y_ptr, g_row, y_row, mask, begin, end, g_step, y_step,
    LOG: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum over elements `begin` to `end` of each row."""
    lane = tl.arange(0, BLOCK)
    if g_ptr.dtype.element_ty == tl.float64:
        total = tl.zeros((g_row.shape[0], BLOCK), tl.float64)
    else:
        total = tl.zeros((g_row.shape[0], BLOCK), tl.float32)
    if VEC:
        first = tl.sum(y_row, 0) + begin
        head, middle = whole_vectors(first, end - begin, VEC)
        others, outside = outside_vectors(head, middle, end - begin, VEC)
        rest = _terms(g_ptr, y_ptr, first + others, first + others, outside, LOG)
        base = tl.multiple_of(first + head, VEC)
        for start in range(0, middle, BLOCK):
            place = (start + lane)[None, :]
            offs = base + place
            total += _terms(g_ptr, y_ptr, offs, offs, place < middle, LOG)
        return tl.sum(total, 1) + tl.sum(rest, 0)
    else:
        for start in range(begin, end, BLOCK):
            place = start + lane
            valid = mask[:, None] & (place < end)[None, :]
            g_offs = g_row[:, None] + lane_offset(place, g_step, WIDE)[None, :]
            y_offs = y_row[:, None] + lane_offset(place, y_step, WIDE)[None, :]
            total += _terms(g_ptr, y_ptr, g_offs, y_offs, valid, LOG)
        return tl.sum(total, 1)


@triton.jit
def _convert(
    g_ptr, y_ptr, out_ptr, g_offs, y_offs, out_offs, valid, total, LOG: tl.constexpr
):  # fmt: skip
    """Read elements (ROWS, n) and write their gradients."""
    g = widened(tl.load(g_ptr + g_offs, mask=valid, other=0.0))
    y = widened(tl.load(y_ptr + y_offs, mask=valid, other=0.0))
    result = _gradient(g, y, total, LOG, out_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + out_offs, result.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _write(
    g_ptr, y_ptr, out_ptr, g_row, y_row, out_row, mask, total, begin, end, g_step, y_step, out_step,
    LOG: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients `begin` to `end` of each row, last ones first."""
    lane = tl.arange(0, BLOCK)
    if VEC:
        first = tl.sum(y_row, 0) + begin
        head, middle = whole_vectors(first, end - begin, VEC)
        base = tl.multiple_of(first + head, VEC)
        steps = tl.cdiv(middle, BLOCK)
        for index in range(0, steps):
            place = ((steps - 1 - index) * BLOCK + lane)[None, :]
            offs = base + place
            _convert(g_ptr, y_ptr, out_ptr, offs, offs, offs, place < middle, total, LOG)
        others, outside = outside_vectors(head, middle, end - begin, VEC)
        apart = (first + others)[None, :]
        _convert(g_ptr, y_ptr, out_ptr, apart, apart, apart, outside[None, :], total, LOG)
    else:
        steps = tl.cdiv(end - begin, BLOCK)
        for index in range(0, steps):
            place = begin + (steps - 1 - index) * BLOCK + lane
            valid = mask[:, None] & (place < end)[None, :]
            g_offs = g_row[:, None] + lane_offset(place, g_step, WIDE)[None, :]
            y_offs = y_row[:, None] + lane_offset(place, y_step, WIDE)[None, :]
            out_offs = out_row[:, None] + lane_offset(place, out_step, WIDE)[None, :]
            _convert(g_ptr, y_ptr, out_ptr, g_offs, y_offs, out_offs, valid, total, LOG)


@triton.jit
def _softmax_backward_online_kernel(
    g_ptr, y_ptr, out_ptr, num_rows, n1, n2, n3, size,
    g_s0, g_s1, g_s2, g_s3, g_step, y_s0, y_s1, y_s2, y_s3, y_step,
    out_s0, out_s1, out_s2, out_s3, out_step,
    LOG: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block reads its rows twice."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    g_row = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    y_row = row_offset(outer, inner, n1, n2, y_s0, y_s1, y_s2, y_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    total = _total(
        g_ptr, y_ptr, g_row, y_row, mask, 0, size, g_step, y_step, LOG, VEC, BLOCK, WIDE
    )  # fmt: skip
    _write(
        g_ptr, y_ptr, out_ptr, g_row, y_row, out_row, mask, total, 0, size, g_step, y_step,
        out_step, LOG, VEC, BLOCK, WIDE,
    )  # fmt: skip


@triton.jit
def _softmax_backward_chunk_kernel(
    g_ptr, y_ptr, part_ptr, num_rows, n1, n2, n3, size, chunk, row_blocks,
    g_s0, g_s1, g_s2, g_s3, g_step, y_s0, y_s1, y_s2, y_s3, y_step,
    LOG: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of one chunk of ROWS rows, to part[chunk, row]."""
    block = tl.program_id(0)
    index = block // row_blocks
    outer, inner, mask = block_rows(block % row_blocks, num_rows, n3, ROWS, NDIM, TILED)
    g_row = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    y_row = row_offset(outer, inner, n1, n2, y_s0, y_s1, y_s2, y_s3, NDIM, WIDE)
    begin = index * chunk
    end = tl.minimum(begin + chunk, size)
    total = _total(
        g_ptr, y_ptr, g_row, y_row, mask, begin, end, g_step, y_step, LOG, VEC, BLOCK, WIDE
    )  # fmt: skip
    row = row_number(outer, inner, n3, NDIM, WIDE)
    tl.store(part_ptr + index * num_rows + row, total, mask=mask)


@triton.jit
def _softmax_backward_combine_kernel(
    g_ptr, y_ptr, out_ptr, part_ptr, num_rows, n1, n2, n3, size, chunk, row_blocks, chunks,
    g_s0, g_s1, g_s2, g_s3, g_step, y_s0, y_s1, y_s2, y_s3, y_step,
    out_s0, out_s1, out_s2, out_s3, out_step,
    LOG: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of ROWS rows, from the sums of all chunks."""
    block = tl.program_id(0)
    index = block // row_blocks
    outer, inner, mask = block_rows(block % row_blocks, num_rows, n3, ROWS, NDIM, TILED)
    row = row_number(outer, inner, n3, NDIM, WIDE)
    every = tl.arange(0, CHUNKS)
    valid = mask[:, None] & (every < chunks)[None, :]
    offs = (every * num_rows)[None, :] + row[:, None]
    total = tl.sum(tl.load(part_ptr + offs, mask=valid, other=0.0), 1)
    g_row = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    y_row = row_offset(outer, inner, n1, n2, y_s0, y_s1, y_s2, y_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    begin = index * chunk
    end = tl.minimum(begin + chunk, size)
    _write(
        g_ptr, y_ptr, out_ptr, g_row, y_row, out_row, mask, total, begin, end, g_step, y_step,
        out_step, LOG, VEC, BLOCK, WIDE,
    )  # fmt: skip


__all__: list[str] = []
