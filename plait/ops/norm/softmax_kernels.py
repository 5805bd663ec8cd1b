"""Kernels of softmax, log_softmax and softmax that gives 0 where a whole row is -inf.

A tile is (ROWS, BLOCK). Rows that fit in registers are read once. Longer ones are read twice: the
first time every lane keeps a running maximum and the sum of exponentials below it (one exponential
an element, nothing shared between lanes before the end; Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018), the second time results are written, last elements first, since
those are still in the cache. Few long rows are cut into chunks for many blocks: one kernel leaves
the two figures of each chunk, another combines those of all chunks and writes. With VEC, rows of
any length that lie one after the other are read by whole vectors, the few elements before and
after them apart.
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

# What KIND may be.
SOFTMAX = tl.constexpr(0)
LOG = tl.constexpr(1)
SAFE = tl.constexpr(2)  # 0 for rows of -inf, which are NaN otherwise


@triton.jit
def widened(x):
    """The value in the dtype of accumulators: fp64 for fp64, else fp32."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def exp_of(x, EXACT: tl.constexpr):
    """exp(x) for x <= 0. EXACT: to 2 ulp in fp32 also far from 0, where the instruction, which
    takes a rounded multiple of x, is off by |x| ulp."""
    if EXACT and x.dtype == tl.float32:
        x = tl.where(x < -104.0, -104.0, x)  # exp is 0 from there on; NaN stays
        whole = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
        half = tl.floor(whole * 0.5)  # the instruction gives 0 below 2^-126
        return tl.exp2(rest * 1.4426950408889634) * tl.exp2(half) * tl.exp2(whole - half)
    else:
        return tl.exp(x)


@triton.jit
def quotient(a, b):
    """a / b, rounded to nearest; `/` alone may be 2 ulp off in fp32."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def inverse(x):
    """1 / x, rounded to nearest."""
    return quotient(tl.full(x.shape, 1.0, x.dtype), x)


@triton.jit
def _results(x, power, top, total, KIND: tl.constexpr):
    """Of elements and exp(elements - maxima) (ROWS, BLOCK), maxima and sums (ROWS,)."""
    if KIND == LOG:
        return (x - top[:, None]) - tl.log(total)[:, None]
    else:
        scale = inverse(total)
        if KIND == SAFE:  # the sum of a row with NaN is NaN, of one with a number at least 1
            scale = tl.where(total == 0.0, 0.0, scale)
        return power * scale[:, None]


@triton.jit
def _softmax_kernel(
    x_ptr, out_ptr, num_rows, n1, n2, n3, size,
    x_s0, x_s1, x_s2, x_s3, x_step, out_s0, out_s1, out_s2, out_s3, out_step,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK covers a row."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    x_row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    lane = tl.arange(0, BLOCK)
    valid = mask[:, None] & (lane < size)[None, :]
    x_offs = x_row[:, None] + lane_offset(lane, x_step, WIDE)[None, :]
    x = widened(tl.load(x_ptr + x_offs, mask=valid, other=float("-inf")))
    top = tl.max(x, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    EXACT: tl.constexpr = (KIND != LOG) & (out_ptr.dtype.element_ty == tl.float32)
    power = exp_of(x - top[:, None], EXACT)
    result = _results(x, power, top, tl.sum(power, 1), KIND)
    out_offs = out_row[:, None] + lane_offset(lane, out_step, WIDE)[None, :]
    tl.store(out_ptr + out_offs, result.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _seen(x, top, total):
    """The running maxima and sums with x. Maxima begin finite: no difference from them is NaN."""
    above = x > top
    power = tl.exp(-tl.abs(x - top))  # of the smaller below the larger
    return tl.where(above, x, top), tl.where(above, total * power + 1.0, total + power)


@triton.jit
def _top_and_total(
    x_ptr, x_row, mask, begin, end, x_step, VEC: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Maximum, and sum of exponentials below it, of elements `begin` to `end` of each row."""
    lane = tl.arange(0, BLOCK)
    if x_ptr.dtype.element_ty == tl.float64:
        top = tl.full((x_row.shape[0], BLOCK), -1.7976931348623157e308, tl.float64)
    else:
        top = tl.full((x_row.shape[0], BLOCK), -3.4028234663852886e38, tl.float32)
    total = tl.zeros_like(top)
    if VEC:
        first = tl.sum(x_row, 0) + begin
        head, middle = whole_vectors(first, end - begin, VEC)
        others, outside = outside_vectors(head, middle, end - begin, VEC)
        rest = widened(tl.load(x_ptr + first + others, mask=outside, other=float("-inf")))
        base = tl.multiple_of(first + head, VEC)
        for start in range(0, middle, BLOCK):
            place = (start + lane)[None, :]
            x = tl.load(x_ptr + (base + place), mask=place < middle, other=float("-inf"))
            top, total = _seen(widened(x), top, total)
        row_top = tl.maximum(tl.max(top, 1), tl.max(rest, 0))
        row_total = tl.sum(total * tl.exp(top - row_top[:, None]), 1)
        row_total += tl.sum(tl.exp(rest[None, :] - row_top[:, None]), 1)
    else:
        for start in range(begin, end, BLOCK):
            place = start + lane
            valid = mask[:, None] & (place < end)[None, :]
            offs = x_row[:, None] + lane_offset(place, x_step, WIDE)[None, :]
            x = widened(tl.load(x_ptr + offs, mask=valid, other=float("-inf")))
            top, total = _seen(x, top, total)
        row_top = tl.max(top, 1)
        row_total = tl.sum(total * tl.exp(top - row_top[:, None]), 1)
    return row_top, row_total  # the sum is NaN if +inf is among the elements


@triton.jit
def _converted(x, top, total, out_ptr, KIND: tl.constexpr):
    """Results of elements (ROWS, n), as they are stored."""
    power = exp_of(x - top[:, None], out_ptr.dtype.element_ty == tl.float32)
    return _results(x, power, top, total, KIND).to(out_ptr.dtype.element_ty)


@triton.jit
def _write(
    x_ptr, out_ptr, x_row, out_row, mask, top, total, begin, end, x_step, out_step,
    KIND: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Results `begin` to `end` of each row, last ones first."""
    lane = tl.arange(0, BLOCK)
    if VEC:
        first = tl.sum(x_row, 0) + begin
        head, middle = whole_vectors(first, end - begin, VEC)
        base = tl.multiple_of(first + head, VEC)
        steps = tl.cdiv(middle, BLOCK)
        for index in range(0, steps):
            place = ((steps - 1 - index) * BLOCK + lane)[None, :]
            x = widened(tl.load(x_ptr + (base + place), mask=place < middle, other=0.0))
            result = _converted(x, top, total, out_ptr, KIND)
            tl.store(out_ptr + (base + place), result, mask=place < middle)
        others, outside = outside_vectors(head, middle, end - begin, VEC)
        rest = widened(tl.load(x_ptr + first + others, mask=outside, other=0.0))
        rest = _converted(rest[None, :], top, total, out_ptr, KIND)
        tl.store(out_ptr + (first + others)[None, :], rest, mask=outside[None, :])
    else:
        steps = tl.cdiv(end - begin, BLOCK)
        for index in range(0, steps):
            place = begin + (steps - 1 - index) * BLOCK + lane
            valid = mask[:, None] & (place < end)[None, :]
            offs = x_row[:, None] + lane_offset(place, x_step, WIDE)[None, :]
            x = widened(tl.load(x_ptr + offs, mask=valid, other=0.0))
            offs = out_row[:, None] + lane_offset(place, out_step, WIDE)[None, :]
            tl.store(out_ptr + offs, _converted(x, top, total, out_ptr, KIND), mask=valid)


@triton.jit
def _softmax_online_kernel(
    x_ptr, out_ptr, num_rows, n1, n2, n3, size,
    x_s0, x_s1, x_s2, x_s3, x_step, out_s0, out_s1, out_s2, out_s3, out_step,
    KIND: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block reads its rows twice."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    x_row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    top, total = _top_and_total(x_ptr, x_row, mask, 0, size, x_step, VEC, BLOCK, WIDE)
    _write(
        x_ptr, out_ptr, x_row, out_row, mask, top, total, 0, size, x_step, out_step,
        KIND, VEC, BLOCK, WIDE,
    )  # fmt: skip


@triton.jit
def _softmax_chunk_kernel(
    x_ptr, part_ptr, num_rows, n1, n2, n3, size, chunk, row_blocks,
    x_s0, x_s1, x_s2, x_s3, x_step,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of one chunk of ROWS rows, to part[chunk, 0 and 1, row]."""
    block = tl.program_id(0)
    index = block // row_blocks
    outer, inner, mask = block_rows(block % row_blocks, num_rows, n3, ROWS, NDIM, TILED)
    x_row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    begin = index * chunk
    end = tl.minimum(begin + chunk, size)
    top, total = _top_and_total(x_ptr, x_row, mask, begin, end, x_step, VEC, BLOCK, WIDE)
    row = row_number(outer, inner, n3, NDIM, WIDE)
    tl.store(part_ptr + index * 2 * num_rows + row, top, mask=mask)
    tl.store(part_ptr + (index * 2 + 1) * num_rows + row, total, mask=mask)


@triton.jit
def _softmax_combine_kernel(
    x_ptr, out_ptr, part_ptr, num_rows, n1, n2, n3, size, chunk, row_blocks, chunks,
    x_s0, x_s1, x_s2, x_s3, x_step, out_s0, out_s1, out_s2, out_s3, out_step,
    KIND: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Results of one chunk of ROWS rows, from the figures of all chunks."""
    block = tl.program_id(0)
    index = block // row_blocks
    outer, inner, mask = block_rows(block % row_blocks, num_rows, n3, ROWS, NDIM, TILED)
    row = row_number(outer, inner, n3, NDIM, WIDE)
    every = tl.arange(0, CHUNKS)
    valid = mask[:, None] & (every < chunks)[None, :]
    offs = (every * 2 * num_rows)[None, :] + row[:, None]
    tops = tl.load(part_ptr + offs, mask=valid, other=float("-inf"))
    totals = tl.load(part_ptr + offs + num_rows, mask=valid, other=0.0)
    top = tl.max(tops, 1)
    total = tl.sum(tl.where(valid, totals * tl.exp(tops - top[:, None]), 0.0), 1)
    x_row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    begin = index * chunk
    end = tl.minimum(begin + chunk, size)
    _write(
        x_ptr, out_ptr, x_row, out_row, mask, top, total, begin, end, x_step, out_step,
        KIND, VEC, BLOCK, WIDE,
    )  # fmt: skip


__all__ = ["LOG", "SAFE", "SOFTMAX", "exp_of", "inverse", "quotient", "widened"]
