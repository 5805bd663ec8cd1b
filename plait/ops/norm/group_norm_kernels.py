"""Gradients of group norm. A channel row is the (size,) elements of one channel of one sample.

With n = (x - mean) * rstd and g = dy * weight, sums over a group of `channels` channels:
dx = rstd * (g - mean(n * g) * n - mean(g)). `sums_ptr` (2, samples * num_channels) gets the sums of
dy * n and of dy over each channel row; gradients of weight and bias are their sums over samples.
"""

import triton
import triton.language as tl

from plait.ops.norm.layer_norm_kernels import column_place, row_place


@triton.jit
def groups_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, sums_ptr,
    num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    dx_r0, dx_r1, dx_r2, dx_c0, dx_c1,
    weight_step, channels, num_channels, num_groups,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WEIGHT: tl.constexpr, DX: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Whole groups, GROUPS a block: CHANNELS >= channels, BLOCK >= size. `num_groups` is that of
    all samples, `num_rows` the number of channel rows."""
    size *= UNIT
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    channel = tl.arange(0, CHANNELS)
    columns = tl.arange(0, BLOCK)
    if WIDE:
        groups = groups.to(tl.int64)
        columns = columns.to(tl.int64)
    mask_g = groups < num_groups
    rows = groups[:, None] * channels + channel[None, :]
    mask_r = mask_g[:, None] & (channel < channels)[None, :]
    mask = mask_r[:, :, None] & (columns < size)[None, None, :]
    dy_rows = row_place(rows, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)[:, :, None]
    x_rows = row_place(rows, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)[:, :, None]
    dy_columns = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)[None, None, :]
    x_columns = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)[None, None, :]
    dy = tl.load(dy_ptr + dy_rows + dy_columns, mask=mask, other=0.0).to(ACC)
    x = tl.load(x_ptr + x_rows + x_columns, mask=mask, other=0.0).to(ACC)
    mean = tl.load(mean_ptr + groups, mask=mask_g, other=0.0).to(ACC)[:, None, None]
    rstd = tl.load(rstd_ptr + groups, mask=mask_g, other=0.0).to(ACC)[:, None, None]
    normed = tl.where(mask, (x - mean) * rstd, 0.0)
    products = tl.sum(dy * normed, axis=2)
    totals = tl.sum(dy, axis=2)
    if SUMS:
        tl.store(sums_ptr + rows, products, mask=mask_r)
        tl.store(sums_ptr + num_rows + rows, totals, mask=mask_r)
    if DX:
        g = dy
        if WEIGHT:
            place = (rows % num_channels) * weight_step
            weight = tl.load(weight_ptr + place, mask=mask_r, other=0.0).to(ACC)
            products *= weight
            totals *= weight
            g *= weight[:, :, None]
        # Of constant g nothing is left, whatever rounding the saved mean has seen.
        offset = tl.sum(tl.sum(normed, axis=2), axis=1) / (channels * size)
        total = tl.sum(totals, axis=1)
        product = (tl.sum(products, axis=1) - total * offset) / (channels * size)
        product = product[:, None, None]
        total = (total / (channels * size))[:, None, None]
        dx_rows = row_place(rows, r1, r2, dx_r0, dx_r1, dx_r2, ROW_DIMS, UNIT)[:, :, None]
        dx_columns = column_place(columns, c1, dx_c0, dx_c1, COLUMN_DIMS)[None, None, :]
        dx = (g - normed * product - total) * rstd
        tl.store(dx_ptr + dx_rows + dx_columns, dx, mask=mask)


@triton.jit
def channel_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The sums of ROWS channel rows a block."""
    size *= UNIT
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        rows = rows.to(tl.int64)
    mask_r = rows < num_rows
    dy_rows = row_place(rows, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)[:, None]
    x_rows = row_place(rows, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)[:, None]
    mean = tl.load(mean_ptr + rows // channels, mask=mask_r, other=0.0).to(ACC)[:, None]
    rstd = tl.load(rstd_ptr + rows // channels, mask=mask_r, other=0.0).to(ACC)[:, None]
    products = tl.zeros((ROWS, BLOCK), ACC)
    totals = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = mask_r[:, None] & (columns < size)[None, :]
        if WIDE:
            columns = columns.to(tl.int64)
        dy_columns = column_place(columns, c1, dy_c0, dy_c1, COLUMN_DIMS)[None, :]
        x_columns = column_place(columns, c1, x_c0, x_c1, COLUMN_DIMS)[None, :]
        dy = tl.load(dy_ptr + dy_rows + dy_columns, mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + x_rows + x_columns, mask=mask, other=0.0).to(ACC)
        totals += dy
        products += tl.where(mask, dy * ((x - mean) * rstd), 0.0)
    tl.store(sums_ptr + rows, tl.sum(products, axis=1), mask=mask_r)
    tl.store(sums_ptr + num_rows + rows, tl.sum(totals, axis=1), mask=mask_r)


@triton.jit
def channel_gradient_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, sums_ptr,
    num_rows, size, r1, r2, c1,
    dy_r0, dy_r1, dy_r2, dy_c0, dy_c1,
    x_r0, x_r1, x_r2, x_c0, x_c1,
    dx_r0, dx_r1, dx_r2, dx_c0, dx_c1,
    weight_step, channels, num_channels, num_parts, part_size,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_DIMS: tl.constexpr, COLUMN_DIMS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WEIGHT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of a part of a channel row, from the sums of all channel rows of its group."""
    size *= UNIT
    program = tl.program_id(0)
    row = program // num_parts
    begin = (program % num_parts) * part_size
    group = row // channels
    channel = tl.arange(0, CHANNELS)
    mask_c = channel < channels
    neighbours = group * channels + channel
    products = tl.load(sums_ptr + neighbours, mask=mask_c, other=0.0)
    totals = tl.load(sums_ptr + num_rows + neighbours, mask=mask_c, other=0.0)
    if WEIGHT:
        place = (neighbours % num_channels) * weight_step
        weights = tl.load(weight_ptr + place, mask=mask_c, other=0.0).to(ACC)
        products *= weights
        totals *= weights
        weight = tl.load(weight_ptr + (row % num_channels) * weight_step).to(ACC)
    product = tl.sum(products, axis=0) / channels / size
    total = tl.sum(totals, axis=0) / channels / size
    mean = tl.load(mean_ptr + group).to(ACC)
    rstd = tl.load(rstd_ptr + group).to(ACC)
    if WIDE:
        row = row.to(tl.int64)
    dy_ptr += row_place(row, r1, r2, dy_r0, dy_r1, dy_r2, ROW_DIMS, UNIT)
    x_ptr += row_place(row, r1, r2, x_r0, x_r1, x_r2, ROW_DIMS, UNIT)
    dx_ptr += row_place(row, r1, r2, dx_r0, dx_r1, dx_r2, ROW_DIMS, UNIT)
    end = tl.minimum(begin + part_size, size)
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
            g *= weight
        dx = (g - (x - mean) * rstd * product - total) * rstd
        dx_place = column_place(columns, c1, dx_c0, dx_c1, COLUMN_DIMS)
        tl.store(dx_ptr + dx_place, dx, mask=mask)


__all__ = ["channel_gradient_kernel", "channel_sums_kernel", "groups_backward_kernel"]
