"""Gradients of batch norm over channels; shapes and tiles as in batch_norm_kernels.py.

With n = (x - mean) * rstd: dweight = sum(dy * n), dbias = sum(dy); dx is dy * weight * rstd with
running statistics, and (dy - mean(dy) - n * mean(dy * n)) * weight * rstd with those of the batch.
"""

import triton
import triton.language as tl

from plait.ops.norm.batch_norm_kernels import (
    both_axes,
    channels_of,
    per_channel,
    tile_of,
    tile_place,
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
        offsets = tile_place(
            channels,
            sample,
            place,
            c1,
            x_sc,
            x_sn,
            x_s0,
            x_s1,
            COLUMN_DIMS,
            CHANNEL_UNIT,
            SPACE_UNIT,
        )
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(ACC)
        offsets = tile_place(
            channels,
            sample,
            place,
            c1,
            dy_sc,
            dy_sn,
            dy_s0,
            dy_s1,
            COLUMN_DIMS,
            CHANNEL_UNIT,
            SPACE_UNIT,
        )
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(ACC)
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
        offsets = tile_place(
            channels,
            sample,
            place,
            c1,
            x_sc,
            x_sn,
            x_s0,
            x_s1,
            COLUMN_DIMS,
            CHANNEL_UNIT,
            SPACE_UNIT,
        )
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(ACC)
        offsets = tile_place(
            channels,
            sample,
            place,
            c1,
            dy_sc,
            dy_sn,
            dy_s0,
            dy_s1,
            COLUMN_DIMS,
            CHANNEL_UNIT,
            SPACE_UNIT,
        )
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(ACC)
        product = both_axes(tl.where(mask, dy * (x - mean[:, None, None]), 0.0)) * rstd
        total = both_axes(dy)
    elif SUMS:
        parts = tl.arange(0, PARTS)
        found = partial_ptr + parts[None, :] * num_channels + channels[:, None]
        mask_p = mask_c[:, None] & (parts < num_parts)[None, :]
        product = tl.sum(tl.load(found, mask=mask_p, other=0.0), axis=1)
        found += num_parts * num_channels
        total = tl.sum(tl.load(found, mask=mask_p, other=0.0), axis=1)
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
                offsets = tile_place(
                    channels,
                    sample,
                    place,
                    c1,
                    dy_sc,
                    dy_sn,
                    dy_s0,
                    dy_s1,
                    COLUMN_DIMS,
                    CHANNEL_UNIT,
                    SPACE_UNIT,
                )
                dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(ACC)
            dx = dy
            if TRAIN:
                if not WHOLE:
                    offsets = tile_place(
                        channels,
                        sample,
                        place,
                        c1,
                        x_sc,
                        x_sn,
                        x_s0,
                        x_s1,
                        COLUMN_DIMS,
                        CHANNEL_UNIT,
                        SPACE_UNIT,
                    )
                    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(ACC)
                distance = x - mean[:, None, None]
                dx = dy - offset[:, None, None] - distance * slope[:, None, None]
            offsets = tile_place(
                channels,
                sample,
                place,
                c1,
                dx_sc,
                dx_sn,
                dx_s0,
                dx_s1,
                COLUMN_DIMS,
                CHANNEL_UNIT,
                SPACE_UNIT,
            )
            tl.store(dx_ptr + offsets, dx * scale[:, None, None], mask=mask)


__all__ = ["batch_gradient_kernel", "batch_gradient_sums_kernel"]
