"""Gradients of row normalisation: of x row by row, of weight and bias as sums over rows.

With g = dy * weight and n = (x - mean) * rstd:
dx = rstd * (g - mean(n * g) * n - mean(g)), dweight = sum over rows of dy * n, dbias = that of dy.
For root-mean-square norm mean is 0 and mean(g) is left out. Sums over rows are taken in two stages,
without atomics: `partial_ptr` is (2, num_parts, size), weight's sums before bias's.
"""

import triton
import triton.language as tl

from plait.ops.norm.layer_norm_kernels import column_place, row_place


@triton.jit
def rows_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, add_ptr, dx_ptr, partial_ptr,
    dweight_ptr, dbias_ptr,
    num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    dx_r0, dx_r1, dx_r2, dx_c0, dx_c1,
    add_r0, add_r1, add_r2, add_c0, add_c1,
    weight_step, dweight_step, dbias_step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, ADD: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ALONE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Rows that fit a block. With ADD another gradient of x is added to dx. ALONE: a single block
    writes the gradients of weight and bias themselves."""
    size *= UNIT
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask_c = columns < size
    if WIDE:
        columns = columns.to(tl.int64)
    dy_columns = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)[None, :]
    x_columns = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)[None, :]
    dx_columns = column_place(columns, c1, dx_c0, dx_c1, COLUMN_DIMS)[None, :]
    add_columns = column_place(columns, c1, add_c0, add_c1, COLUMN_DIMS)[None, :]
    if WEIGHT:
        weight = tl.load(weight_ptr + columns * weight_step, mask=mask_c, other=0.0)[None, :]
    if DWEIGHT:
        dweight = tl.zeros((ROWS, BLOCK), ACC)
    if DBIAS:
        dbias = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        if WIDE:
            rows = rows.to(tl.int64)
        mask_r = rows < num_rows
        mask = mask_r[:, None] & mask_c[None, :]
        dy_rows = row_place(rows, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)[:, None]
        x_rows = row_place(rows, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)[:, None]
        dy = tl.load(dy_ptr + dy_rows + dy_columns, mask=mask, other=0.0).to(ACC)
        normed = tl.load(x_ptr + x_rows + x_columns, mask=mask, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + rows, mask=mask_r, other=0.0).to(ACC)[:, None]
        if not RMS:
            normed -= tl.load(mean_ptr + rows, mask=mask_r, other=0.0).to(ACC)[:, None]
        normed = tl.where(mask, normed * rstd, 0.0)
        if DWEIGHT:
            dweight += dy * normed
        if DBIAS:
            dbias += dy
        if DX:
            g = dy
            if WEIGHT:
                g = dy * weight.to(ACC)
            dx = g - normed * (tl.sum(g * normed, axis=1) / size)[:, None]
            if not RMS:
                dx -= (tl.sum(g, axis=1) / size)[:, None]
            dx *= rstd
            if ADD:
                add_rows = row_place(rows, r1, r2, add_r0, add_r1, add_r2, ROW_DIMS, UNIT)[:, None]
                dx += tl.load(add_ptr + add_rows + add_columns, mask=mask, other=0.0).to(ACC)
            dx_rows = row_place(rows, r1, r2, dx_r0, dx_r1, dx_r2, ROW_DIMS, UNIT)[:, None]
            tl.store(dx_ptr + dx_rows + dx_columns, dx, mask=mask)
    place = program.to(tl.int64) * size + columns
    if DWEIGHT:
        total = tl.sum(dweight, axis=0)
        if ALONE:
            tl.store(dweight_ptr + columns * dweight_step, total, mask=mask_c)
        else:
            tl.store(partial_ptr + place, total, mask=mask_c)
    if DBIAS:
        total = tl.sum(dbias, axis=0)
        if ALONE:
            tl.store(dbias_ptr + columns * dbias_step, total, mask=mask_c)
        else:
            place += tl.num_programs(0).to(tl.int64) * size
            tl.store(partial_ptr + place, total, mask=mask_c)


@triton.jit
def row_sums(
    dy_ptr, x_ptr, weight_ptr, begin, end, mean, rstd, c1, dy_c0, dy_c1, x_c0, x_c1, weight_step,
    BLOCK: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Sums of n * g and of g over elements begin to end of a row."""
    products = tl.zeros((BLOCK,), ACC)
    sums = tl.zeros((BLOCK,), ACC)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < end
        if WIDE:
            columns = columns.to(tl.int64)
        dy_place = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)
        x_place = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)
        g = tl.load(dy_ptr + dy_place, mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + x_place, mask=mask, other=0.0).to(ACC)
        if WEIGHT:
            g *= tl.load(weight_ptr + columns * weight_step, mask=mask, other=0.0).to(ACC)
        sums += g
        products += g * tl.where(mask, (x - mean) * rstd, 0.0)
    return tl.sum(products, axis=0), tl.sum(sums, axis=0)


@triton.jit
def long_rows_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, sums_ptr,
    num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    dx_r0, dx_r1, dx_r2, dx_c0, dx_c1,
    weight_step, num_parts, part_size,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SUM: tl.constexpr, WRITE: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, WEIGHT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of rows that do not fit a block. SUM and WRITE: a row a block, read twice. SUM alone:
    sums of a part of a row a block, to `sums_ptr` (2, num_rows, num_parts). WRITE alone: dx of such
    a part, from the sums of all."""
    size *= UNIT
    program = tl.program_id(0)
    row = program // num_parts
    begin = (program % num_parts) * part_size
    end = tl.minimum(begin + part_size, size)
    if WIDE:
        row = row.to(tl.int64)
    dy_ptr += row_place(row, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)
    x_ptr += row_place(row, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)
    rstd = tl.load(rstd_ptr + row).to(ACC)
    if RMS:
        mean = tl.sum(tl.zeros((1,), ACC), axis=0)
    else:
        mean = tl.load(mean_ptr + row).to(ACC)
    if SUM:
        product, total = row_sums(
            dy_ptr, x_ptr, weight_ptr, begin, end, mean, rstd,
            c1, dy_c0, dy_c1, x_c0, x_c1, weight_step, BLOCK, COLUMN_DIMS, WIDE, WEIGHT, ACC,
        )  # fmt: skip
        if not WRITE:
            tl.store(sums_ptr + program, product)
            tl.store(sums_ptr + num_rows * num_parts + program, total)
    else:
        parts = tl.arange(0, PARTS)
        mask_p = parts < num_parts
        place = row * num_parts + parts
        product = tl.sum(tl.load(sums_ptr + place, mask=mask_p, other=0.0), axis=0)
        place += num_rows * num_parts
        total = tl.sum(tl.load(sums_ptr + place, mask=mask_p, other=0.0), axis=0)
    if WRITE:
        dx_ptr += row_place(row, r1, r2, dx_r0, dx_r1, dx_r2, ROW_DIMS, UNIT)
        product /= size
        total /= size
        for start in range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < end
            if WIDE:
                columns = columns.to(tl.int64)
            dy_place = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)
            x_place = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)
            g = tl.load(dy_ptr + dy_place, mask=mask, other=0.0).to(ACC)
            x = tl.load(x_ptr + x_place, mask=mask, other=0.0).to(ACC)
            if WEIGHT:
                g *= tl.load(weight_ptr + columns * weight_step, mask=mask, other=0.0).to(ACC)
            dx = g - (x - mean) * rstd * product
            if not RMS:
                dx -= total
            dx_place = column_place(columns, c1, dx_c0, dx_c1, COLUMN_DIMS)
            tl.store(dx_ptr + dx_place, dx * rstd, mask=mask)


@triton.jit
def column_partials_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, partial_ptr, dweight_ptr, dbias_ptr,
    num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    dweight_step, dbias_step, num_parts,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ALONE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Sums over every num_parts-th tile of rows, BLOCK columns a block. ALONE: there is one part,
    and the sums are the gradients."""
    size *= UNIT
    program = tl.program_id(0)
    part = program % num_parts
    columns = (program // num_parts) * BLOCK + tl.arange(0, BLOCK)
    mask_c = columns < size
    if WIDE:
        columns = columns.to(tl.int64)
    dy_columns = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)[None, :]
    x_columns = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), ACC)
    dbias = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(part, tl.cdiv(num_rows, ROWS), num_parts):
        rows = tile * ROWS + tl.arange(0, ROWS)
        if WIDE:
            rows = rows.to(tl.int64)
        mask_r = rows < num_rows
        mask = mask_r[:, None] & mask_c[None, :]
        dy_rows = row_place(rows, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)[:, None]
        dy = tl.load(dy_ptr + dy_rows + dy_columns, mask=mask, other=0.0).to(ACC)
        if DWEIGHT:
            x_rows = row_place(rows, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)[:, None]
            normed = tl.load(x_ptr + x_rows + x_columns, mask=mask, other=0.0).to(ACC)
            rstd = tl.load(rstd_ptr + rows, mask=mask_r, other=0.0).to(ACC)[:, None]
            if not RMS:
                normed -= tl.load(mean_ptr + rows, mask=mask_r, other=0.0).to(ACC)[:, None]
            dweight += dy * tl.where(mask, normed * rstd, 0.0)
        if DBIAS:
            dbias += dy
    place = part.to(tl.int64) * size + columns
    if DWEIGHT:
        total = tl.sum(dweight, axis=0)
        if ALONE:
            tl.store(dweight_ptr + columns * dweight_step, total, mask=mask_c)
        else:
            tl.store(partial_ptr + place, total, mask=mask_c)
    if DBIAS:
        total = tl.sum(dbias, axis=0)
        if ALONE:
            tl.store(dbias_ptr + columns * dbias_step, total, mask=mask_c)
        else:
            place += num_parts.to(tl.int64) * size
            tl.store(partial_ptr + place, total, mask=mask_c)


@triton.jit
def sum_partials_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, size, num_parts, dweight_step, dbias_step,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK columns a block from the partial sums; zero if there are none."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_c = columns < size
    dweight = tl.zeros((PARTS, BLOCK), ACC)
    dbias = tl.zeros((PARTS, BLOCK), ACC)
    for first in range(0, num_parts, PARTS):
        parts = first + tl.arange(0, PARTS)
        mask = (parts < num_parts)[:, None] & mask_c[None, :]
        place = parts.to(tl.int64)[:, None] * size + columns[None, :]
        if DWEIGHT:
            dweight += tl.load(partial_ptr + place, mask=mask, other=0.0)
        if DBIAS:
            place = (parts.to(tl.int64) + num_parts)[:, None] * size + columns[None, :]
            dbias += tl.load(partial_ptr + place, mask=mask, other=0.0)
    if DWEIGHT:
        tl.store(dweight_ptr + columns * dweight_step, tl.sum(dweight, axis=0), mask=mask_c)
    if DBIAS:
        tl.store(dbias_ptr + columns * dbias_step, tl.sum(dbias, axis=0), mask=mask_c)


__all__ = [
    "column_partials_kernel",
    "long_rows_backward_kernel",
    "rows_backward_kernel",
    "sum_partials_kernel",
]
