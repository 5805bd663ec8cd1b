"""Which configs `plait tune gemm` measures for a shape: few enough to time all of them.

The list is what won or came close for some shape of one H200; `block_k` is 128 or 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from plait.ops.matmul.configs import Config, default_config, has_descriptors, is_valid

_FEW_ROWS = 512  # up to here small tiles and splits are tried as well
_DECODE_ROWS = 32  # up to here tiles of 16 and 32 rows
_SPLITS = (2, 3, 4, 8)
_MIN_SPLIT_K = 512  # a shorter part of K is over before its pipeline is full
_MAX_WAVES = 8  # a shorter last wave of more gains little
_LEAST_GAIN = 0.85  # of the last wave's time: splitting costs something
_WAVE = 132  # blocks of a large GPU; splitting more than two waves of tiles only costs traffic


def tuning_candidates(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    arch: str = "sm90",
    descriptors_allowed: bool = True,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
    batch: int = 0,
    fast_accum: bool = False,
) -> list[Config]:
    """Valid configs to measure for out [M, N] = x [M, K] @ weight [N, K]^T, `default_config` first.

    Without duplicates, also not of configs that differ only in what the shape cannot show. `batch`:
    so many products at once, 0 and 1 alike; `fast_accum`: fp8 sums stay in the short accumulator.
    """
    desc = descriptors_allowed and has_descriptors(arch)
    default = default_config(
        M, N, K, dtype, arch, descriptors_allowed, num_weights=num_weights, precision=precision
    )
    few_tiles = M <= _FEW_ROWS or _num_tiles(M, N, 128, 128, batch) < _WAVE
    if dtype is torch.float32 and precision == "ieee":
        tiles = list(_without_tensor_cores())
    else:
        tiles = list(_large_tiles(dtype.itemsize, desc))
        if few_tiles:
            tiles += _small_tiles(dtype.itemsize, desc)
        if batch > 1:
            tiles += _batch_tiles(dtype.itemsize, desc)
        if dtype.itemsize == 1 and not fast_accum:
            tiles += _precise_fp8_tiles(desc)
        if M <= _DECODE_ROWS:
            tiles += _decode_tiles(dtype.itemsize, desc)
    found = [default]
    for tile in tiles:
        if not _covers(tile, M, N):
            continue
        ways = [tile]
        if num_weights == 1:
            ways += _tails(tile, M, N, K, batch)
            if few_tiles and not tile.desc_store:  # parts are stored by pointers
                ways += [replace(tile, splits=each) for each in _splits(tile, M, N, K, batch)]
        for config in _grouped(ways, M):
            fitting = _fit(config, dtype, arch, num_weights, precision)
            if fitting is not None and fitting not in found:
                found.append(fitting)
    return found


def _large_tiles(itemsize: int, desc: bool) -> Iterable[Config]:
    k = 128 // itemsize
    yield Config(128, 256, k, 8, 3, 8, desc)
    yield Config(256, 128, k, 8, 4, 8, desc)
    yield Config(128, 128, k, 4, 6, 8, desc)
    if desc:
        for flatten in (False, True):
            yield from _stored(
                Config(128, 256, k, 8, 4, 8, desc),
                Config(256, 128, k, 8, 4, 8, desc),
                Config(128, 128, k, 8, 3, 8, desc, blocks_per_sm=2),
                Config(128, 128, k, 4, 3, 8, desc, blocks_per_sm=2),
                flatten=flatten,
            )


def _stored(*configs: Config, flatten: bool) -> Iterable[Config]:
    """The same, storing by descriptors."""
    for config in configs:
        yield replace(config, desc_store=True, flatten=flatten)


def _small_tiles(itemsize: int, desc: bool) -> Iterable[Config]:
    k = 128 // itemsize
    yield Config(64, 128, 2 * k, 4, 4, 8, desc)
    yield Config(64, 64, 2 * k, 4, 4, 8, desc, blocks_per_sm=2)
    yield Config(128, 64, 2 * k, 4, 4, 8, desc, blocks_per_sm=2)
    yield Config(64, 256, k, 4, 4, 8, desc)


def _decode_tiles(itemsize: int, desc: bool) -> Iterable[Config]:
    k = 128 // itemsize
    for block_m in (16, 32):
        for block_n in (64, 128):
            yield Config(block_m, block_n, 2 * k, 4, 4, 8, desc)
            yield Config(block_m, block_n, 2 * k, 4, 4, 8, desc, blocks_per_sm=2)


def _batch_tiles(itemsize: int, desc: bool) -> Iterable[Config]:
    """Many short products: while one block stores its tile, another one of the SM multiplies."""
    k = 128 // itemsize
    short = Config(64, 64, k, 4, 4, 8, desc, blocks_per_sm=3)
    yield short
    if desc:
        tall, wide = replace(short, block_m=128), replace(short, block_n=128)
        yield from _stored(
            short, replace(tall, blocks_per_sm=2), replace(wide, blocks_per_sm=2), flatten=True
        )


def _precise_fp8_tiles(desc: bool) -> Iterable[Config]:
    """The second accumulator wants small tiles, and other blocks to multiply while it adds."""
    yield Config(64, 128, 128, 4, 3, 8, desc, blocks_per_sm=3)
    yield Config(128, 128, 128, 8, 4, 8, desc)
    if desc:
        yield Config(128, 128, 128, 8, 4, 8, desc, desc_store=True)


def _without_tensor_cores() -> Iterable[Config]:
    for block_m, block_n, warps in ((64, 64, 8), (64, 64, 4), (32, 64, 4), (128, 64, 8)):
        for block_k, stages in ((16, 4), (32, 2), (32, 3)):
            yield Config(block_m, block_n, block_k, warps, stages, 8, False)


def _num_tiles(M: int, N: int, block_m: int, block_n: int, batch: int) -> int:
    return max(batch, 1) * -(-M // block_m) * -(-N // block_n)


def _covers(tile: Config, M: int, N: int) -> bool:
    """Whether no smaller tile of the list would do the same: half of it lies inside the matrix."""
    return (tile.block_m <= 64 or tile.block_m < 2 * M) and (
        tile.block_n <= 64 or tile.block_n < 2 * N
    )


def _tails(tile: Config, M: int, N: int, K: int, batch: int) -> list[Config]:
    """Splits of the tiles of the last wave, where it is short and the ones before are few."""
    tiles = _num_tiles(M, N, tile.block_m, tile.block_n, batch)
    slots = _WAVE * tile.blocks_per_sm
    waves, rest = divmod(tiles, slots)
    if tile.flatten or not 1 <= waves <= _MAX_WAVES or rest == 0:
        return []
    found, best = [], _LEAST_GAIN
    for splits in (2, 3, 4, 6):
        share = -(-rest * splits // slots) / splits  # of a wave's time
        if share < best and K // splits >= _MIN_SPLIT_K:
            found.append(replace(tile, splits=splits, split_tail=True))
            best = share
    return found


def _splits(tile: Config, M: int, N: int, K: int, batch: int) -> list[int]:
    """How often to split K: not where the tiles of all batches are two waves or more."""
    tiles = _num_tiles(M, N, tile.block_m, tile.block_n, batch)
    two_waves = 2 * _WAVE * tile.blocks_per_sm
    if tiles >= two_waves:
        return []
    return [
        splits
        for splits in _SPLITS
        if K // splits >= _MIN_SPLIT_K and tiles * splits <= 2 * two_waves
    ]


def _grouped(configs: Iterable[Config], M: int) -> Iterable[Config]:
    """Each with every group size; one where all rows of tiles are a group anyway, or few are."""
    for config in configs:
        num_m = -(-M // config.block_m)
        few = num_m <= 4 or config.splits > 1
        for group_m in (8,) if few else (4, 8) if num_m <= 8 else (4, 8, 16):
            yield replace(config, group_m=group_m)


def _fit(
    config: Config, dtype: torch.dtype, arch: str, num_weights: int, precision: str
) -> Config | None:
    """The config, with fewer stages if its tiles need more shared memory than there is."""
    for stages in range(config.num_stages, 1, -1):
        fitting = replace(config, num_stages=stages)
        if is_valid(fitting, dtype, arch, num_weights=num_weights, precision=precision):
            return fitting
    return None


__all__ = ["tuning_candidates"]
