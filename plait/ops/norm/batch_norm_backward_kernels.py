"""Gradients of batch norm over channels; shapes and tiles as in batch_norm_kernels.py.

With n = (x - mean) * rstd: dweight = sum(dy * n), dbias = sum(dy); dx is dy * weight * rstd with
running statistics, and (dy - mean(dy) - n * mean(dy * n)) * weight * rstd with those of the batch.
"""

import triton
import triton.language as tl

from plait.ops.norm.batch_norm_kernels import (
    both_axes,
    channels_of,
    load_tile,
    per_channel,
    store_tile,
    sum_of_parts,
    tile_of,
)
from plait.ops.norm.layer_norm_kernels import inverse_root


@triton.jit
def statistics(
    mean_ptr, rstd_ptr, mean_step, rstd_step, channels, mask, eps, eps_low,
    RUNNING: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation; RUNNING: `rstd_ptr` holds variances."""
    mean = per_channel(mean_ptr, mean_step, channels, mask, ACC)
    rstd = per_channel(rstd_ptr, rstd_step, channels, mask, ACC)
    if RUNNING:
        rstd = inverse_root(rstd, eps, eps_low, ACC)
    return mean, rstd


@triton.jit
def batch_gradient_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, partial_ptr, eps, eps_low,
    samples, num_channels, space, c1,
    dy_sc, dy_sn, dy_s0, dy_s1, x_sc, x_sn, x_s0, x_s1,
    mean_step, rstd_step, num_parts, num_tiles,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, RUNNING: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`partial_ptr` (2, num_parts, C) gets sums of dy * n and of dy."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    part = tl.program_id(0) % num_parts
    channels, mask_c = channels_of(tl.program_id(0) // num_parts, num_channels, CHANNELS, WIDE)
    mean, rstd = statistics(
        mean_ptr, rstd_ptr, mean_step, rstd_step, channels, mask_c, eps, eps_low, RUNNING, ACC
    )
    products = tl.zeros((CHANNELS, SAMPLES, SPACE), ACC)
    totals = tl.zeros((CHANNELS, SAMPLES, SPACE), ACC)
    for tile in range(part, num_tiles, num_parts):
        sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        mask = mask & mask_c[:, None, None]
        x = load_tile(
            x_ptr, mask, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        dy = load_tile(
            dy_ptr, mask, channels, sample, place, c1, dy_sc, dy_sn, dy_s0, dy_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        totals += dy
        products += tl.where(mask, dy * (x - mean[:, None, None]), 0.0)
    out = partial_ptr + part * num_channels + channels
    tl.store(out, both_axes(products) * rstd, mask=mask_c)
    tl.store(out + num_parts * num_channels, both_axes(totals), mask=mask_c)


@triton.jit
def batch_gradient_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    eps, eps_low, samples, num_channels, space, c1,
    dy_sc, dy_sn, dy_s0, dy_s1, x_sc, x_sn, x_s0, x_s1, dx_sc, dx_sn, dx_s0, dx_s1,
    mean_step, rstd_step, weight_step, dweight_step, dbias_step, num_parts, num_tiles, num_blocks,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr, PARTS: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, RUNNING: tl.constexpr, WHOLE: tl.constexpr,
    TRAIN: tl.constexpr, SUMS: tl.constexpr, WEIGHT: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of every `num_blocks`-th tile; the first block of some channels writes their sums. WHOLE:
    the sums are those of the one tile, else of all parts. SUMS: somebody needs them."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    block = tl.program_id(0) % num_blocks
    channels, mask_c = channels_of(tl.program_id(0) // num_blocks, num_channels, CHANNELS, WIDE)
    exists = mask_c[:, None, None]
    mean, rstd = statistics(
        mean_ptr, rstd_ptr, mean_step, rstd_step, channels, mask_c, eps, eps_low, RUNNING, ACC
    )
    if WHOLE:
        sample, place, mask, _ = tile_of(0, samples, space, SAMPLES, SPACE, WIDE)
        mask = mask & exists
        x = load_tile(
            x_ptr, mask, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        dy = load_tile(
            dy_ptr, mask, channels, sample, place, c1, dy_sc, dy_sn, dy_s0, dy_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        product = both_axes(tl.where(mask, dy * (x - mean[:, None, None]), 0.0)) * rstd
        total = both_axes(dy)
    elif SUMS:
        product = sum_of_parts(partial_ptr, channels, mask_c, num_parts, num_channels, PARTS)
        second = partial_ptr + num_parts * num_channels
        total = sum_of_parts(second, channels, mask_c, num_parts, num_channels, PARTS)
    if block == 0:
        if DWEIGHT:
            tl.store(dweight_ptr + channels * dweight_step, product, mask=mask_c)
        if DBIAS:
            tl.store(dbias_ptr + channels * dbias_step, total, mask=mask_c)
    if DX:
        scale = rstd
        if WEIGHT:
            scale *= per_channel(weight_ptr, weight_step, channels, mask_c, ACC)
        if TRAIN:
            number = tl.full((), samples * space, ACC)
            slope = product / number * rstd
            offset = total / number
        for tile in range(block, num_tiles, num_blocks):
            sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
            mask = mask & exists
            if not WHOLE:
                dy = load_tile(
                    dy_ptr, mask, channels, sample, place, c1, dy_sc, dy_sn, dy_s0, dy_s1,
                    COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
                )  # fmt: skip
            dx = dy
            if TRAIN:
                if not WHOLE:
                    x = load_tile(
                        x_ptr, mask, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
                        COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
                    )  # fmt: skip
                distance = x - mean[:, None, None]
                dx = dy - offset[:, None, None] - distance * slope[:, None, None]
            store_tile(
                dx_ptr, dx * scale[:, None, None], mask, channels, sample, place, c1,
                dx_sc, dx_sn, dx_s0, dx_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT,
            )  # fmt: skip


__all__ = ["batch_gradient_kernel", "batch_gradient_sums_kernel"]
