"""Tile choices of overlapped GEMMs, whose tiles must fit the segments of the ranks."""

from __future__ import annotations

import dataclasses

import torch

from plait.collectives.segments import max_tile_rows
from plait.device import device_info
from plait.ops.matmul.configs import (
    Config,
    default_config,
    has_descriptors,
    least_block_k,
    smallest_block,
)
from plait.ops.matmul.reference import SCALE_BLOCK

_ANY_K = 1024
_SUMMED_ELEMENTS = 16  # of each rank's part that a thread loads at once, all ranks' together
_SMS_TO_FILL = 120
_ELEMENTS_OF_TWO_TILES = 2048  # of a tile, for each warp: twice 64 registers of a thread
_WARP_SIZE = 32
_MAX_REGISTERS = 65_536  # of an SM


def segment_config(
    segment_rows: int,
    total_rows: int,
    num_cols: int,
    features: int,
    dtype: torch.dtype,
    descriptors: bool,
    device: torch.device,
    *,
    num_weights: int = 1,
    max_block_n: int = 256,
    by_blocks: bool = False,
    two_tiles: bool = True,
) -> Config:
    """One rank's configuration for segments [segment_rows, num_cols] of `total_rows` in all.

    A tile stays within a segment's padded rows (`padded_rows`): at most 128 high, and at most the
    rows rounded up to a power of two. Where partial tiles are exchanged its height and width also
    decide which signal word it sets, so they depend on nothing that ranks may see differently:
    not on K (`features`), nor on the layout of x and the weight.

    fp8 and int8: `by_blocks`: one step of K is one block of scales. `two_tiles`: a thread holds two
    tiles, what a step of K gave and the sum in fp32, so they are half as wide; not for ranks that
    exchange tiles to decide, whose K may differ.
    """
    arch = device_info(device).arch
    config = default_config(
        total_rows, num_cols, _ANY_K, dtype, arch, False, num_weights=num_weights
    )
    config = dataclasses.replace(
        config,
        block_m=min(config.block_m, max_tile_rows(max(segment_rows, 1))),
        block_n=min(config.block_n, max_block_n),
        block_k=_block_k(config.block_k, features, dtype, by_blocks),
        desc=descriptors and has_descriptors(arch) and (arch == "cpu" or dtype != torch.float32),
    )
    if dtype.itemsize == 1 and not config.desc and not by_blocks and arch != "cpu":
        # Every byte that is loaded by a pointer takes two registers for its offset.
        config = dataclasses.replace(config, block_k=least_block_k(dtype))
    if dtype.itemsize == 1 and two_tiles and arch != "cpu":
        limit = _ELEMENTS_OF_TWO_TILES * config.num_warps
        while config.block_m * config.block_n > limit:
            config = dataclasses.replace(config, block_n=config.block_n // 2)
        return dataclasses.replace(config, num_stages=4 if config.desc else 3)
    if config.desc and arch != "cpu" and (config.block_m, config.block_n) == (128, 128):
        # Two blocks an SM: one multiplies while the other stores and sums.
        return dataclasses.replace(config, num_warps=8, num_stages=3, blocks_per_sm=2)
    if config.desc and arch != "cpu" and (config.block_m, config.block_n) == (128, 256):
        return dataclasses.replace(config, num_warps=8, num_stages=4)
    return config


def _block_k(wanted: int, features: int, dtype: torch.dtype, by_blocks: bool) -> int:
    """Elements of K in one step: as wanted, or fewer where K has no more."""
    if by_blocks:
        return SCALE_BLOCK
    return min(wanted, max(smallest_block(features), least_block_k(dtype)))


def few_rows_config(
    num_rows: int,
    num_cols: int,
    features: int,
    dtype: torch.dtype,
    descriptors: bool,
    device: torch.device,
    by_blocks: bool = False,
) -> Config:
    """The configuration of a product of few rows, whose tiles every rank sends to every rank.

    Reading the weight takes the time, so tiles are narrow enough to read it from all SMs. The tile
    depends on nothing that ranks may see differently, as in `segment_config`.
    """
    arch = device_info(device).arch
    config = segment_config(
        num_rows, num_rows, num_cols, features, dtype, descriptors, device,
        max_block_n=128, by_blocks=by_blocks,
    )  # fmt: skip
    if arch == "cpu" or num_rows > 64 or dtype == torch.float32:
        return dataclasses.replace(config, blocks_per_sm=1)
    rows = -(-num_rows // config.block_m)
    block_n = 128
    while block_n > 32 and rows * -(-num_cols // block_n) < _SMS_TO_FILL:
        block_n //= 2
    block_k = _block_k(256 // dtype.itemsize, features, dtype, by_blocks)
    stages = 4 if config.desc else 3
    return Config(config.block_m, block_n, block_k, 4, stages, config.group_m, config.desc)


def launch_limits(config: Config, num_sms: int) -> tuple[int, int | None]:
    """(largest grid whose blocks are all resident, registers that a thread may have for it)."""
    if config.blocks_per_sm == 1:
        return num_sms, None
    threads = config.num_warps * _WARP_SIZE
    return num_sms * config.blocks_per_sm, _MAX_REGISTERS // (config.blocks_per_sm * threads)


def piece_columns(config: Config) -> int:
    """Columns of a tile that are summed at a time over all slots."""
    threads = config.num_warps * _WARP_SIZE
    return max(16, min(config.block_n, _SUMMED_ELEMENTS * threads // config.block_m))


def tiles_of(rows: int, num_cols: int, config: Config) -> int:
    """Tiles, and so signal words, of `rows` rows."""
    return -(-max(rows, 1) // config.block_m) * -(-num_cols // config.block_n)


__all__ = ["few_rows_config", "launch_limits", "piece_columns", "segment_config", "tiles_of"]
