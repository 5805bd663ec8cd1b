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
_SPLITS = (1, 2, 3, 4, 8)
_MIN_SPLIT_K = 512  # a shorter part of K is over before its pipeline is full
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
) -> list[Config]:
    """Valid configs to measure for out [M, N] = x [M, K] @ weight [N, K]^T, `default_config` first.

    Without duplicates, also not of configs that differ only in what the shape cannot show.
    """
    desc = descriptors_allowed and has_descriptors(arch)
    default = default_config(
        M, N, K, dtype, arch, descriptors_allowed, num_weights=num_weights, precision=precision
    )
    if dtype is torch.float32 and precision == "ieee":
        tiles = list(_without_tensor_cores())
    else:
        tiles = list(_large_tiles(dtype.itemsize, desc))
        if _is_small(M, N):
            tiles += _small_tiles(dtype.itemsize, desc)
        if M <= _DECODE_ROWS:
            tiles += _decode_tiles(dtype.itemsize, desc)
    found = [default]
    for tile in tiles:
        if not _covers(tile, M, N):
            continue
        for config in _grouped(_split(tile, M, N, K, num_weights), M):
            fitting = _fit(config, dtype, arch, num_weights, precision)
            if fitting is not None and fitting not in found:
                found.append(fitting)
    return found


def _large_tiles(itemsize: int, desc: bool) -> Iterable[Config]:
    k = 128 // itemsize
    for stages in (3, 4):
        yield Config(128, 256, k, 8, stages, 8, desc)
        yield Config(256, 128, k, 8, stages, 8, desc)
    for warps in (4, 8):
        for stages in (4, 6):
            yield Config(128, 128, k, warps, stages, 8, desc)


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


def _without_tensor_cores() -> Iterable[Config]:
    for block_m, block_n, warps in ((64, 64, 8), (64, 64, 4), (32, 64, 4), (128, 64, 8)):
        for block_k, stages in ((16, 4), (32, 2), (32, 3)):
            yield Config(block_m, block_n, block_k, warps, stages, 8, False)


def _is_small(M: int, N: int) -> bool:
    """Whether large tiles would leave most of a large GPU idle, or be mostly empty."""
    return M <= _FEW_ROWS or -(-M // 128) * -(-N // 128) < _WAVE


def _covers(tile: Config, M: int, N: int) -> bool:
    """Whether no smaller tile of the list would do the same: half of it lies inside the matrix."""
    return (tile.block_m <= 64 or tile.block_m < 2 * M) and (
        tile.block_n <= 64 or tile.block_n < 2 * N
    )


def _split(tile: Config, M: int, N: int, K: int, num_weights: int) -> Iterable[Config]:
    yield tile
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    two_waves = 2 * _WAVE * tile.blocks_per_sm
    if not _is_small(M, N) or num_weights > 1 or tiles >= two_waves:
        return
    for splits in _SPLITS[1:]:
        if K // splits >= _MIN_SPLIT_K and tiles * splits <= 2 * two_waves:
            yield replace(tile, splits=splits)


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
