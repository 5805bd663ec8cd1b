"""Weight norm: w = v * (g / norm(v)), one norm a channel; tiles as in batch_norm_kernels.py.

With s = sum(dw * v): dg = s / norm, dv = (dw - v * s / norm**2) * g / norm.
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


@triton.jit
def weight_sums_kernel(
    v_ptr, dw_ptr, partial_ptr, samples, num_channels, space, c1,
    v_sc, v_sn, v_s0, v_s1, dw_sc, dw_sn, dw_s0, dw_s1, num_parts, num_tiles,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, GRADIENT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`partial_ptr` (num_parts, C) gets sums of v * v, or with GRADIENT of dw * v."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    part = tl.program_id(0) % num_parts
    channels, mask_c = channels_of(tl.program_id(0) // num_parts, num_channels, CHANNELS, WIDE)
    sums = tl.zeros((CHANNELS, SAMPLES, SPACE), ACC)
    for tile in range(part, num_tiles, num_parts):
        sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        mask = mask & mask_c[:, None, None]
        v = load_tile(
            v_ptr, mask, channels, sample, place, c1, v_sc, v_sn, v_s0, v_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        other = v
        if GRADIENT:
            other = load_tile(
                dw_ptr, mask, channels, sample, place, c1, dw_sc, dw_sn, dw_s0, dw_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
            )  # fmt: skip
        sums += v * other
    tl.store(partial_ptr + part * num_channels + channels, both_axes(sums), mask=mask_c)


@triton.jit
def weight_norm_kernel(
    v_ptr, g_ptr, w_ptr, norm_ptr, partial_ptr, samples, num_channels, space, c1,
    v_sc, v_sn, v_s0, v_s1, w_sc, w_sn, w_s0, w_s1, num_parts, num_tiles, num_blocks,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr, PARTS: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """w, and the norms."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    block = tl.program_id(0) % num_blocks
    channels, mask_c = channels_of(tl.program_id(0) // num_blocks, num_channels, CHANNELS, WIDE)
    exists = mask_c[:, None, None]
    if WHOLE:
        sample, place, mask, _ = tile_of(0, samples, space, SAMPLES, SPACE, WIDE)
        v = load_tile(
            v_ptr, mask & exists, channels, sample, place, c1, v_sc, v_sn, v_s0, v_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        squares = both_axes(v * v)
    else:
        squares = sum_of_parts(partial_ptr, channels, mask_c, num_parts, num_channels, PARTS)
    norm = tl.sqrt(squares)
    if block == 0:
        tl.store(norm_ptr + channels, norm, mask=mask_c)
    scale = (per_channel(g_ptr, 1, channels, mask_c, ACC) / norm)[:, None, None]
    for tile in range(block, num_tiles, num_blocks):
        sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        inside = mask & exists
        if not WHOLE:
            v = load_tile(
                v_ptr, inside, channels, sample, place, c1, v_sc, v_sn, v_s0, v_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
            )  # fmt: skip
        store_tile(
            w_ptr, v * scale, inside, channels, sample, place, c1, w_sc, w_sn, w_s0, w_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT,
        )  # fmt: skip


@triton.jit
def weight_norm_backward_kernel(
    v_ptr, dw_ptr, g_ptr, norm_ptr, dv_ptr, dg_ptr, partial_ptr, samples, num_channels, space, c1,
    v_sc, v_sn, v_s0, v_s1, dw_sc, dw_sn, dw_s0, dw_s1, dv_sc, dv_sn, dv_s0, dv_s1,
    num_parts, num_tiles, num_blocks,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr, PARTS: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dv and dg."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    block = tl.program_id(0) % num_blocks
    channels, mask_c = channels_of(tl.program_id(0) // num_blocks, num_channels, CHANNELS, WIDE)
    exists = mask_c[:, None, None]
    if WHOLE:
        sample, place, mask, _ = tile_of(0, samples, space, SAMPLES, SPACE, WIDE)
        mask = mask & exists
        v = load_tile(
            v_ptr, mask, channels, sample, place, c1, v_sc, v_sn, v_s0, v_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        dw = load_tile(
            dw_ptr, mask, channels, sample, place, c1, dw_sc, dw_sn, dw_s0, dw_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        total = both_axes(v * dw)
    else:
        total = sum_of_parts(partial_ptr, channels, mask_c, num_parts, num_channels, PARTS)
    inverse = 1.0 / per_channel(norm_ptr, 1, channels, mask_c, ACC)
    if block == 0:
        tl.store(dg_ptr + channels, total * inverse, mask=mask_c)
    scale = (per_channel(g_ptr, 1, channels, mask_c, ACC) * inverse)[:, None, None]
    slope = (total * inverse * inverse)[:, None, None]
    for tile in range(block, num_tiles, num_blocks):
        sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        mask = mask & exists
        if not WHOLE:
            v = load_tile(
                v_ptr, mask, channels, sample, place, c1, v_sc, v_sn, v_s0, v_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
            )  # fmt: skip
            dw = load_tile(
                dw_ptr, mask, channels, sample, place, c1, dw_sc, dw_sn, dw_s0, dw_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
            )  # fmt: skip
        store_tile(
            dv_ptr, (dw - v * slope) * scale, mask, channels, sample, place, c1,
            dv_sc, dv_sn, dv_s0, dv_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT,
        )  # fmt: skip


__all__ = ["weight_norm_backward_kernel", "weight_norm_kernel", "weight_sums_kernel"]
