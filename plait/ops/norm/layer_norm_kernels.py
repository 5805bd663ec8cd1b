"""Normalising rows: layer, root-mean-square and group norm forward.

Shapes: x, y (num_rows, size) with any strides; weight, bias (size,), or with GROUPS one a channel,
where row r is group r % groups of `channels` channels with `space` elements each; mean, rstd
(num_rows,). Sums are taken in ACC.
"""

import triton
import triton.language as tl


@triton.jit
def row_place(row, r1, r2, s0, s1, s2, ROW_DIMS: tl.constexpr, UNIT: tl.constexpr):
    """Where rows start, in elements; strides are in units of UNIT elements."""
    if ROW_DIMS == 1:
        return row * s2 * UNIT
    place = (row % r2) * s2
    row = row // r2
    if ROW_DIMS == 2:
        return (place + row * s1) * UNIT
    return (place + (row % r1) * s1 + (row // r1) * s0) * UNIT


@triton.jit
def column_place(column, c1, s0, s1, COLUMN_DIMS: tl.constexpr):
    """Where elements lie, counted from the start of their row."""
    if COLUMN_DIMS == 1:
        return column * s1
    return (column // c1) * s0 + (column % c1) * s1


@triton.jit
def parameter(
    ptr, step, rows, columns, mask, mask_c, groups, channels, space, GROUPS: tl.constexpr
):  # fmt: skip
    """A weight or bias for a tile with these masks of elements and columns; broadcastable."""
    if GROUPS:
        channel = (rows % groups)[:, None] * channels + (columns // space)[None, :]
        return tl.load(ptr + channel * step, mask=mask, other=0.0)
    return tl.load(ptr + columns * step, mask=mask_c, other=0.0)[None, :]


@triton.jit
def inverse_root(value, eps, eps_low, ACC: tl.constexpr):
    """1 / sqrt(value + eps), where eps is the sum of two fp32 numbers."""
    return 1.0 / tl.sqrt(value + (eps.to(ACC) + eps_low.to(ACC)))


@triton.jit
def norm_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    eps, eps_low, num_rows, size, r1, r2, c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    y_r0, y_r1, y_r2, y_c0, y_c1,
    residual_r0, residual_r1, residual_r2, residual_c0, residual_c1,
    weight_step, bias_step, groups, channels, space,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, GROUPS: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows that fit a block: BLOCK >= size. With RESIDUAL x + residual is normalised, and goes,
    rounded, to `sum_ptr`, which lies as y does."""
    size *= UNIT
    columns = tl.arange(0, BLOCK)
    mask_c = columns < size
    if WIDE:
        columns = columns.to(tl.int64)
    x_columns = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)[None, :]
    y_columns = column_place(columns, c1, y_c0, y_c1, COLUMN_DIMS)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        if WIDE:
            rows = rows.to(tl.int64)
        mask_r = rows < num_rows
        mask = mask_r[:, None] & mask_c[None, :]
        x_rows = row_place(rows, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)[:, None]
        y_rows = row_place(rows, r1, r2, y_r0, y_r1, y_r2, ROW_DIMS, UNIT)[:, None]
        x = tl.load(x_ptr + x_rows + x_columns, mask=mask, other=0.0).to(ACC)
        if RESIDUAL:
            add_rows = row_place(
                rows, r1, r2, residual_r0, residual_r1, residual_r2, ROW_DIMS, UNIT
            )[:, None]  # fmt: skip
            add_columns = column_place(columns, c1, residual_c0, residual_c1, COLUMN_DIMS)
            add = tl.load(residual_ptr + add_rows + add_columns[None, :], mask=mask, other=0.0)
            both = (x + add.to(ACC)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + y_rows + y_columns, both, mask=mask)
            x = both.to(ACC)
        if RMS:
            centred = x
        else:
            mean = tl.sum(x, axis=1) / size
            centred = tl.where(mask, x - mean[:, None], 0.0)
            tl.store(mean_ptr + rows, mean, mask=mask_r)
        rstd = inverse_root(tl.sum(centred * centred, axis=1) / size, eps, eps_low, ACC)
        tl.store(rstd_ptr + rows, rstd, mask=mask_r)
        y = centred * rstd[:, None]
        if WEIGHT:
            w = parameter(
                weight_ptr,
                weight_step,
                rows,
                columns,
                mask,
                mask_c,
                groups,
                channels,
                space,
                GROUPS,
            )
            y *= w.to(ACC)
        if BIAS:
            b = parameter(
                bias_ptr, bias_step, rows, columns, mask, mask_c, groups, channels, space, GROUPS
            )
            y += b.to(ACC)
        tl.store(y_ptr + y_rows + y_columns, y, mask=mask)


@triton.jit
def moments(
    x_ptr, begin, end, c1, c_outer, c_inner,
    BLOCK: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, RMS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared distances from it (with RMS: from 0) of elements begin to end of a
    row. Welford's update in each lane, Chan's formula for the lanes together."""
    lanes = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), ACC)
    squares = tl.zeros((BLOCK,), ACC)
    count = 0
    for start in range(begin, end, BLOCK):
        columns = start + lanes
        mask = columns < end
        if WIDE:
            columns = columns.to(tl.int64)
        place = column_place(columns, c1, c_outer, c_inner, COLUMN_DIMS)
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(ACC)
        if RMS:
            squares += x * x
        else:
            count += 1
            distance = tl.where(mask, x - mean, 0.0)
            mean += distance * (1.0 / count.to(ACC))
            squares += distance * tl.where(mask, x - mean, 0.0)
    if RMS:
        return tl.sum(mean, axis=0), tl.sum(squares, axis=0)
    counts = tl.maximum((end - begin - lanes + (BLOCK - 1)) // BLOCK, 0)
    return together(mean, squares, counts.to(ACC), (end - begin).to(ACC))


@triton.jit
def together(mean, squares, counts, total):
    """Mean and sum of squared distances of all, from those of parts with these counts."""
    overall = tl.sum(mean * counts, axis=0) / total
    distance = tl.where(counts > 0, mean - overall, 0.0)
    return overall, tl.sum(squares + counts * distance * distance, axis=0)


@triton.jit
def normalize(
    x_ptr, y_ptr, weight_ptr, bias_ptr, row, begin, end, mean, rstd,
    c1, x_c0, x_c1, y_c0, y_c1, weight_step, bias_step, groups, channels, space,
    BLOCK: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write elements begin to end of a row; the pointers are those of the row. With GROUPS these
    are whole channels, taken one after the other."""
    if GROUPS:
        num_stretches = (end - begin) // space
    else:
        num_stretches = 1
    for stretch in range(num_stretches):
        scale = rstd
        shift = mean
        first = begin
        last = end
        if GROUPS:
            first = begin + stretch * space
            last = first + space
            channel = (row % groups) * channels + first // space
            if WEIGHT:
                scale *= tl.load(weight_ptr + channel * weight_step).to(ACC)
        for start in range(first, last, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < last
            if WIDE:
                columns = columns.to(tl.int64)
            place = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)
            y = (tl.load(x_ptr + place, mask=mask, other=0.0).to(ACC) - shift) * scale
            if GROUPS:
                if BIAS:
                    y += tl.load(bias_ptr + channel * bias_step).to(ACC)
            else:
                if WEIGHT:
                    y *= tl.load(weight_ptr + columns * weight_step, mask=mask, other=0.0).to(ACC)
                if BIAS:
                    y += tl.load(bias_ptr + columns * bias_step, mask=mask, other=0.0).to(ACC)
            place = column_place(columns, c1, y_c0, y_c1, COLUMN_DIMS)
            tl.store(y_ptr + place, y, mask=mask)


@triton.jit
def norm_long_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps, eps_low, num_rows, size, r1, r2, c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    y_r0, y_r1, y_r2, y_c0, y_c1,
    weight_step, bias_step, groups, channels, space,
    BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row a block, read twice."""
    size *= UNIT
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    x_ptr += row_place(row, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)
    y_ptr += row_place(row, r1, r2, y_r0, y_r1, y_r2, ROW_DIMS, UNIT)
    mean, squares = moments(
        x_ptr, 0, size, c1, x_c0, x_c1, BLOCK, COLUMN_DIMS, WIDE, RMS, ACC
    )  # fmt: skip
    rstd = inverse_root(squares / size, eps, eps_low, ACC)
    if not RMS:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    normalize(
        x_ptr, y_ptr, weight_ptr, bias_ptr, row, 0, size, mean, rstd,
        c1, x_c0, x_c1, y_c0, y_c1, weight_step, bias_step, groups, channels, space,
        BLOCK, COLUMN_DIMS, WIDE, GROUPS, WEIGHT, BIAS, ACC,
    )  # fmt: skip


@triton.jit
def partial_moments_kernel(
    x_ptr, partial_ptr, num_rows, size, r1, r2, c1,
    x_r0, x_r1, x_r2, x_c0, x_c1, num_parts, part_size,
    BLOCK: tl.constexpr, ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr,
    UNIT: tl.constexpr, RMS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows in parts: `partial_ptr` (2, num_rows, num_parts) gets mean and squares of each."""
    size *= UNIT
    program = tl.program_id(0)
    row = program // num_parts
    begin = (program % num_parts) * part_size
    if WIDE:
        row = row.to(tl.int64)
    end = tl.minimum(begin + part_size, size)
    x_ptr += row_place(row, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)
    mean, squares = moments(
        x_ptr, begin, end, c1, x_c0, x_c1, BLOCK, COLUMN_DIMS, WIDE, RMS, ACC
    )  # fmt: skip
    tl.store(partial_ptr + program, mean)
    tl.store(partial_ptr + num_rows * num_parts + program, squares)


@triton.jit
def norm_parts_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, partial_ptr,
    eps, eps_low, num_rows, size, r1, r2, c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    y_r0, y_r1, y_r2, y_c0, y_c1,
    weight_step, bias_step, groups, channels, space, num_parts, part_size,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    RMS: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A part of a row a block; every block puts the row's moments together."""
    size *= UNIT
    program = tl.program_id(0)
    row = program // num_parts
    part = program % num_parts
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    squares = tl.load(
        partial_ptr + (num_rows + row) * num_parts + parts, mask=mask, other=0.0
    )  # fmt: skip
    if RMS:
        mean = tl.sum(tl.zeros((1,), ACC), axis=0)
        all_squares = tl.sum(squares, axis=0)
    else:
        means = tl.load(partial_ptr + row * num_parts + parts, mask=mask, other=0.0)
        counts = tl.maximum(tl.minimum(size - parts * part_size, part_size), 0).to(ACC)
        mean, all_squares = together(means, squares, counts, size.to(ACC))
    rstd = inverse_root(all_squares / size, eps, eps_low, ACC)
    if part == 0:
        if not RMS:
            tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    begin = part * part_size
    end = tl.minimum(begin + part_size, size)
    if WIDE:
        row = row.to(tl.int64)
    x_ptr += row_place(row, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)
    y_ptr += row_place(row, r1, r2, y_r0, y_r1, y_r2, ROW_DIMS, UNIT)
    normalize(
        x_ptr, y_ptr, weight_ptr, bias_ptr, row, begin, end, mean, rstd,
        c1, x_c0, x_c1, y_c0, y_c1, weight_step, bias_step, groups, channels, space,
        BLOCK, COLUMN_DIMS, WIDE, GROUPS, WEIGHT, BIAS, ACC,
    )  # fmt: skip


__all__ = [
    "column_place",
    "inverse_root",
    "moments",
    "norm_long_rows_kernel",
    "norm_parts_kernel",
    "norm_rows_kernel",
    "parameter",
    "partial_moments_kernel",
    "row_place",
    "together",
]
