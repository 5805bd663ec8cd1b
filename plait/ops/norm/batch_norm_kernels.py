"""Batch norm over channels of x, seen as (samples, C, spatial), any strides.

A tile is (CHANNELS, SAMPLES, SPACE); a block walks over every `num_parts`-th tile of its channels.
Statistics of parts are put together by every block that needs them, in one order, so results do not
depend on timing. Spatial offsets have up to two dims (column_place).
"""

import triton
import triton.language as tl

from plait.ops.norm.layer_norm_kernels import column_place, inverse_root


@triton.jit
def channels_of(block, num_channels, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """Channels of a block, and which exist."""
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    if WIDE:
        channels = channels.to(tl.int64)
    return channels, channels < num_channels


@triton.jit
def tile_of(
    tile, samples, space,
    SAMPLES: tl.constexpr, SPACE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Samples and places in space of tile number `tile`, which exist, and how many do."""
    per_sample = tl.cdiv(space, SPACE)
    first_sample = (tile // per_sample) * SAMPLES
    first_place = (tile % per_sample) * SPACE
    sample = first_sample + tl.arange(0, SAMPLES)
    place = first_place + tl.arange(0, SPACE)
    mask = (sample < samples)[:, None] & (place < space)[None, :]
    count = tl.minimum(samples - first_sample, SAMPLES) * tl.minimum(space - first_place, SPACE)
    if WIDE:
        sample = sample.to(tl.int64)
        place = place.to(tl.int64)
    return sample, place, mask[None, :, :], count


@triton.jit
def tile_place(
    channel, sample, place, c1, sc, sn, s0, s1,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile; `sc` is in units of SPACE_UNIT elements, `sn` in those of both."""
    inner = column_place(place, c1, s0, s1, COLUMN_DIMS)
    outer = (channel * sc * SPACE_UNIT)[:, None, None]
    return outer + (sample * sn * (CHANNEL_UNIT * SPACE_UNIT))[None, :, None] + inner[None, None, :]


@triton.jit
def load_tile(
    ptr, mask, channel, sample, place, c1, sc, sn, s0, s1,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """A tile in ACC; 0 where `mask` has none."""
    offsets = tile_place(
        channel, sample, place, c1, sc, sn, s0, s1, COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT
    )
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def store_tile(
    ptr, tile, mask, channel, sample, place, c1, sc, sn, s0, s1,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
):  # fmt: skip
    """Store a tile where `mask` allows it."""
    offsets = tile_place(
        channel, sample, place, c1, sc, sn, s0, s1, COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT
    )
    tl.store(ptr + offsets, tile, mask=mask)


@triton.jit
def sum_of_parts(
    partial_ptr, channels, mask, num_parts, num_channels, PARTS: tl.constexpr
):  # fmt: skip
    """The sum of a channel from those of its parts, (num_parts, C) in memory."""
    parts = tl.arange(0, PARTS)
    found = partial_ptr + parts[None, :] * num_channels + channels[:, None]
    both = mask[:, None] & (parts < num_parts)[None, :]
    return tl.sum(tl.load(found, mask=both, other=0.0), axis=1)


@triton.jit
def per_channel(ptr, step, channels, mask, ACC: tl.constexpr):
    """One value a channel, to be used with a tile."""
    return tl.load(ptr + channels * step, mask=mask, other=0.0).to(ACC)


@triton.jit
def both_axes(tile):
    """Sums over samples and space."""
    return tl.sum(tl.sum(tile, axis=2), axis=1)


@triton.jit
def moving_average(ptr, step, channels, mask, value, momentum, momentum_low, ACC: tl.constexpr):
    """running = (1 - momentum) * running + momentum * value."""
    weight = momentum.to(ACC) + momentum_low.to(ACC)
    before = tl.load(ptr + channels * step, mask=mask, other=0.0).to(ACC)
    tl.store(ptr + channels * step, value * weight + (1.0 - weight) * before, mask=mask)


@triton.jit
def keep_statistics(
    channels, mask, mean, squares, rstd, count, saved_mean_ptr, saved_rstd_ptr, mean_ptr, var_ptr,
    mean_step, var_step, momentum, momentum_low,
    SAVE: tl.constexpr, UPDATE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store what backward needs, and move running mean and (unbiased) variance."""
    if SAVE:
        tl.store(saved_mean_ptr + channels, mean, mask=mask)
        tl.store(saved_rstd_ptr + channels, rstd, mask=mask)
    if UPDATE:
        moving_average(mean_ptr, mean_step, channels, mask, mean, momentum, momentum_low, ACC)
        var = squares / (count - 1.0)
        moving_average(var_ptr, var_step, channels, mask, var, momentum, momentum_low, ACC)


@triton.jit
def batch_moments_kernel(
    x_ptr, partial_ptr, samples, num_channels, space, c1,
    x_sc, x_sn, x_s0, x_s1, num_parts, num_tiles,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`partial_ptr` (3, num_parts, C) gets mean, sum of squared distances from it, and count.
    Sums are taken of distances from the mean of the part's first tile."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    part = tl.program_id(0) % num_parts
    channels, mask_c = channels_of(tl.program_id(0) // num_parts, num_channels, CHANNELS, WIDE)
    exists = mask_c[:, None, None]
    sample, place, mask, count = tile_of(part, samples, space, SAMPLES, SPACE, WIDE)
    x = load_tile(
        x_ptr, mask & exists, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
        COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
    )  # fmt: skip
    # Rounded to what x is stored as, so that distances from it are exact for most of x.
    shift = (both_axes(x) / count).to(x_ptr.dtype.element_ty).to(ACC)
    sums = tl.zeros((CHANNELS, SAMPLES, SPACE), ACC)
    squares = tl.zeros((CHANNELS, SAMPLES, SPACE), ACC)
    total = count * 0
    for tile in range(part, num_tiles, num_parts):
        sample, place, mask, count = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        total += count
        x = load_tile(
            x_ptr, mask & exists, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        distance = tl.where(mask, x - shift[:, None, None], 0.0)
        sums += distance
        squares += distance * distance
    number = total.to(ACC)
    distance = both_axes(sums) / number
    spread = tl.maximum(both_axes(squares) - number * distance * distance, 0.0)
    spread = tl.where(distance == distance, spread, distance)  # a maximum may drop NaN
    out = partial_ptr + part * num_channels + channels
    tl.store(out, shift + distance, mask=mask_c)
    tl.store(out + num_parts * num_channels, spread, mask=mask_c)
    tl.store(out + 2 * num_parts * num_channels, distance * 0.0 + number, mask=mask_c)


@triton.jit
def batch_norm_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, saved_mean_ptr, saved_rstd_ptr,
    partial_ptr, eps, eps_low, momentum, momentum_low, samples, num_channels, space, c1,
    x_sc, x_sn, x_s0, x_s1, y_sc, y_sn, y_s0, y_s1,
    weight_step, bias_step, mean_step, var_step, num_parts, num_tiles, num_blocks,
    CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, SPACE: tl.constexpr, PARTS: tl.constexpr,
    COLUMN_DIMS: tl.constexpr, CHANNEL_UNIT: tl.constexpr, SPACE_UNIT: tl.constexpr,
    WIDE: tl.constexpr, TRAIN: tl.constexpr, WHOLE: tl.constexpr,
    SAVE: tl.constexpr, UPDATE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y. With TRAIN the statistics are those of the one tile (WHOLE) or of all parts, else the
    running ones."""
    num_channels *= CHANNEL_UNIT
    space *= SPACE_UNIT
    block = tl.program_id(0) % num_blocks
    channels, mask_c = channels_of(tl.program_id(0) // num_blocks, num_channels, CHANNELS, WIDE)
    exists = mask_c[:, None, None]
    number = tl.full((), samples * space, ACC)
    if WHOLE:
        sample, place, mask, _ = tile_of(0, samples, space, SAMPLES, SPACE, WIDE)
        x = load_tile(
            x_ptr, mask & exists, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
        )  # fmt: skip
        mean = both_axes(x) / number
        distance = tl.where(mask, x - mean[:, None, None], 0.0)
        squares = both_axes(distance * distance)
        rstd = inverse_root(squares / number, eps, eps_low, ACC)
    elif TRAIN:
        parts = tl.arange(0, PARTS)
        found = partial_ptr + parts[None, :] * num_channels + channels[:, None]
        mask_p = mask_c[:, None] & (parts < num_parts)[None, :]
        step = num_parts * num_channels
        means = tl.load(found, mask=mask_p, other=0.0)
        spreads = tl.load(found + step, mask=mask_p, other=0.0)
        counts = tl.load(found + 2 * step, mask=mask_p, other=0.0)
        mean = tl.sum(means * counts, axis=1) / number
        distances = tl.where(mask_p, means - mean[:, None], 0.0)
        squares = tl.sum(spreads + counts * distances * distances, axis=1)
        rstd = inverse_root(squares / number, eps, eps_low, ACC)
    else:
        mean = per_channel(mean_ptr, mean_step, channels, mask_c, ACC)
        squares = per_channel(var_ptr, var_step, channels, mask_c, ACC)
        rstd = inverse_root(squares, eps, eps_low, ACC)
    if block == 0:
        keep_statistics(
            channels, mask_c, mean, squares, rstd, number, saved_mean_ptr, saved_rstd_ptr,
            mean_ptr, var_ptr, mean_step, var_step, momentum, momentum_low, SAVE, UPDATE, ACC,
        )  # fmt: skip
    scale = rstd
    if WEIGHT:
        scale *= per_channel(weight_ptr, weight_step, channels, mask_c, ACC)
    if BIAS:
        bias = per_channel(bias_ptr, bias_step, channels, mask_c, ACC)
    else:
        bias = tl.zeros((CHANNELS,), ACC)
    for tile in range(block, num_tiles, num_blocks):
        sample, place, mask, _ = tile_of(tile, samples, space, SAMPLES, SPACE, WIDE)
        inside = mask & exists
        if not WHOLE:
            x = load_tile(
                x_ptr, inside, channels, sample, place, c1, x_sc, x_sn, x_s0, x_s1,
                COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT, ACC,
            )  # fmt: skip
        y = (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
        store_tile(
            y_ptr, y, inside, channels, sample, place, c1, y_sc, y_sn, y_s0, y_s1,
            COLUMN_DIMS, CHANNEL_UNIT, SPACE_UNIT,
        )  # fmt: skip


__all__ = [
    "batch_moments_kernel",
    "batch_norm_kernel",
    "both_axes",
    "channels_of",
    "load_tile",
    "per_channel",
    "store_tile",
    "sum_of_parts",
    "tile_of",
]
