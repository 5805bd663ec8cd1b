"""The kernels of the scan engine.

A block holds a tile of ROWS rows (combine_kernels.py) and walks along them, BLOCK elements at a
time, or along one chunk of them; what came before is one accumulator a row. Where few rows are cut
into chunks for many blocks, `totals_kernel` leaves one accumulator of each chunk, and `scan_kernel`
starts each chunk with those of the chunks before it, folded in an order that is always the same.
Rows are those of plait/ops/norm/rows.py.
"""

import triton
import triton.language as tl

from plait.ops.norm.rows_kernels import (
    block_rows,
    lane_offset,
    row_number,
    row_offset,
    rows_at,
)
from plait.ops.scan.combine_kernels import (
    across,
    chosen,
    combined,
    elements,
    folded,
    nothing,
    prefixes,
    value_of,
)


@triton.jit
def _rows(
    block, num_rows, n3, ROWS: tl.constexpr, BLOCK: tl.constexpr, SERIAL: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """`outer`, `inner`, `mask` of what is side by side in a tile: its rows, segment by segment."""
    if SERIAL == 0:
        return block_rows(block, num_rows, n3, ROWS, NDIM, TILED)
    else:
        lane = tl.arange(0, BLOCK // SERIAL * ROWS) % ROWS
        return rows_at(block, lane, num_rows, n3, ROWS, NDIM, TILED)


@triton.jit
def _places(ROWS: tl.constexpr, BLOCK: tl.constexpr, SERIAL: tl.constexpr):
    """Where in its row each element of the first tile is."""
    if SERIAL == 0:
        return tl.arange(0, BLOCK)[None, :]
    else:
        segment = tl.arange(0, BLOCK // SERIAL * ROWS) // ROWS
        return tl.arange(0, SERIAL)[:, None] + (segment * SERIAL)[None, :]


@triton.jit
def _none(
    COMBINE: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SERIAL: tl.constexpr,
):  # fmt: skip
    """A tile of accumulators of nothing."""
    if SERIAL == 0:
        return nothing(tl.zeros([ROWS, BLOCK], tl.int1), COMBINE, ACC, INDEX)
    else:
        like = tl.zeros([SERIAL, BLOCK // SERIAL * ROWS], tl.int1)
        return nothing(like, COMBINE, ACC, INDEX)


@triton.jit
def _load(x_ptr, row, mask, place, end, step, SERIAL: tl.constexpr, WIDE: tl.constexpr):
    """Elements at `place` of rows that start at `row`."""
    where = across(row, SERIAL) + lane_offset(place, step, WIDE)
    return tl.load(x_ptr + where, mask=across(mask, SERIAL) & (place < end))


@triton.jit
def _store(
    acc, out_ptr, index_ptr, row, mask, place, end, step,
    COMBINE: tl.constexpr, SERIAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    valid = across(mask, SERIAL) & (place < end)
    where = across(row, SERIAL) + lane_offset(place, step, WIDE)
    value = value_of(acc, COMBINE)
    tl.store(out_ptr + where, value.to(out_ptr.dtype.element_ty), mask=valid)
    if index_ptr is not None:
        tl.store(index_ptr + where, acc[1].to(tl.int64), mask=valid)


@triton.jit
def _chunk(block, row_blocks, chunk, size, CHUNKS: tl.constexpr, WIDE: tl.constexpr):
    """Number of the chunk of a block, number of its rows, where it begins and ends."""
    if CHUNKS == 0:
        return 0, block, 0, size
    else:
        index = block // row_blocks
        begin = index * chunk
        if WIDE:
            begin = index.to(tl.int64) * chunk
        return index, block % row_blocks, begin, tl.minimum(begin + chunk, size)


@triton.jit
def totals_kernel(
    x_ptr, first_ptr, second_ptr, num_rows, n1, n2, n3, size, chunk, row_blocks,
    x_s0, x_s1, x_s2, x_s3, x_step,
    COMBINE: tl.constexpr, THROUGH: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr,
    WIDE: tl.constexpr, SERIAL: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Accumulators of chunks, (chunks, num_rows); the last chunk has none."""
    program = tl.program_id(0)
    index, block, begin, end = _chunk(program, row_blocks, chunk, size, CHUNKS, WIDE)
    outer, inner, mask = _rows(block, num_rows, n3, ROWS, BLOCK, SERIAL, NDIM, TILED)
    row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    places = _places(ROWS, BLOCK, SERIAL)
    acc = _none(COMBINE, ACC, INDEX, ROWS, BLOCK, SERIAL)
    x = _load(x_ptr, row, mask, begin + places, end, x_step, SERIAL, WIDE)
    for start in range(begin, end, BLOCK):
        place = start + places
        ahead = _load(x_ptr, row, mask, place + BLOCK, end, x_step, SERIAL, WIDE)
        new = elements(x, place, COMBINE, THROUGH, ACC, INDEX)
        acc = chosen(place < end, combined(acc, new, COMBINE), acc, COMBINE)
        x = ahead
    total = folded(acc, ROWS, SERIAL, COMBINE)
    outer, inner, mask = block_rows(block, num_rows, n3, ROWS, NDIM, TILED)
    where = index * num_rows + row_number(outer, inner, n3, NDIM, WIDE)
    tl.store(first_ptr + where, total[0], mask=mask)
    if second_ptr is not None:
        tl.store(second_ptr + where, total[1], mask=mask)


@triton.jit
def _chunks_before(
    first_ptr, second_ptr, index, block, num_rows, n3,
    COMBINE: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, ROWS: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of each row of a block (ROWS,) the accumulator of all chunks before number `index`."""
    if CHUNKS == 0:
        return nothing(tl.zeros([ROWS], tl.int1), COMBINE, ACC, INDEX)
    else:
        outer, inner, mask = block_rows(block, num_rows, n3, ROWS, NDIM, TILED)
        row = row_number(outer, inner, n3, NDIM, WIDE)
        every = tl.arange(0, CHUNKS)
        valid = mask[:, None] & (every < index)[None, :]
        where = row[:, None] + (every * num_rows)[None, :]
        first = tl.load(first_ptr + where, mask=valid)
        if second_ptr is not None:
            totals = (first, tl.load(second_ptr + where, mask=valid))
        else:
            totals = (first,)
        none = nothing(valid, COMBINE, ACC, INDEX)
        return folded(chosen(valid, totals, none, COMBINE), ROWS, 0, COMBINE)


@triton.jit
def scan_kernel(
    x_ptr, out_ptr, index_ptr, first_ptr, second_ptr,
    num_rows, n1, n2, n3, size, chunk, row_blocks,
    x_s0, x_s1, x_s2, x_s3, x_step, out_s0, out_s1, out_s2, out_s3, out_step,
    COMBINE: tl.constexpr, THROUGH: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr,
    WIDE: tl.constexpr, SERIAL: tl.constexpr, WHOLE: tl.constexpr, CHUNKS: tl.constexpr,
    INPLACE: tl.constexpr,
):  # fmt: skip
    """Prefixes of rows, or of chunks of rows if CHUNKS, an upper bound of their number, is not 0.

    `index_ptr` is None or gets the indices, at strides of `out`. WHOLE: BLOCK covers a row.
    """
    program = tl.program_id(0)
    index, block, begin, end = _chunk(program, row_blocks, chunk, size, CHUNKS, WIDE)
    outer, inner, mask = _rows(block, num_rows, n3, ROWS, BLOCK, SERIAL, NDIM, TILED)
    row = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    out_row = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    places = _places(ROWS, BLOCK, SERIAL)
    x = _load(x_ptr, row, mask, begin + places, end, x_step, SERIAL, WIDE)
    carry = _chunks_before(
        first_ptr, second_ptr, index, block, num_rows, n3,
        COMBINE, ACC, INDEX, ROWS, NDIM, TILED, WIDE, CHUNKS,
    )  # fmt: skip
    if WHOLE:
        new = elements(x, places, COMBINE, THROUGH, ACC, INDEX)
        acc = prefixes(new, carry, False, ROWS, SERIAL, COMBINE, ACC, INDEX)
        if INPLACE:  # a thread may hold what another one has loaded, too
            tl.debug_barrier()
        _store(acc, out_ptr, index_ptr, out_row, mask, places, end, out_step, COMBINE, SERIAL, WIDE)
    else:
        for start in range(begin, end, BLOCK):
            place = start + places
            ahead = _load(x_ptr, row, mask, place + BLOCK, end, x_step, SERIAL, WIDE)
            new = elements(x, place, COMBINE, THROUGH, ACC, INDEX)
            acc = prefixes(new, carry, True, ROWS, SERIAL, COMBINE, ACC, INDEX)
            if INPLACE:
                tl.debug_barrier()
            _store(
                acc, out_ptr, index_ptr, out_row, mask, place, end, out_step, COMBINE, SERIAL, WIDE
            )
            # Past the end nobody reads it.
            carry = combined(carry, folded(new, ROWS, SERIAL, COMBINE), COMBINE)
            x = ahead


__all__ = ["scan_kernel", "totals_kernel"]
