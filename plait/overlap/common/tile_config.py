"""Tile choices of overlapped GEMMs, whose tiles must fit the segments of the ranks."""

from __future__ import annotations

import dataclasses

import torch

from plait.collectives.segments import max_tile_rows
from plait.device import device_info
from plait.ops.matmul.configs import Config, default_config, has_descriptors, smallest_block

_ANY_K = 1024
_SUMMED_ELEMENTS = 16  # of each rank's part that a thread loads at once, all ranks' together
_SMS_TO_FILL = 120
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
) -> Config:
    """One rank's configuration for segments [segment_rows, num_cols] of `total_rows` in all.

    A tile stays within a segment's padded rows (`padded_rows`): at most 128 high, and at most the
    rows rounded up to a power of two. Where partial tiles are exchanged its height and width also
    decide which signal word it sets, so they depend on nothing that ranks may see differently:
    not on K (`features`), nor on the layout of x and the weight.
    """
    arch = device_info(device).arch
    config = default_config(
        total_rows, num_cols, _ANY_K, dtype, arch, False, num_weights=num_weights
    )
    config = dataclasses.replace(
        config,
        block_m=min(config.block_m, max_tile_rows(max(segment_rows, 1))),
        block_n=min(config.block_n, max_block_n),
        block_k=min(config.block_k, smallest_block(features)),
        desc=descriptors and has_descriptors(arch) and (arch == "cpu" or dtype != torch.float32),
    )
    if config.desc and arch != "cpu" and (config.block_m, config.block_n) == (128, 128):
        # Two blocks an SM: one multiplies while the other stores and sums.
        return dataclasses.replace(config, num_warps=8, num_stages=3, blocks_per_sm=2)
    if config.desc and arch != "cpu" and (config.block_m, config.block_n) == (128, 256):
        return dataclasses.replace(config, num_warps=8, num_stages=4)
    return config


def few_rows_config(
    num_rows: int,
    num_cols: int,
    features: int,
    dtype: torch.dtype,
    descriptors: bool,
    device: torch.device,
) -> Config:
    """The configuration of a product of few rows, whose tiles every rank sends to every rank.

    Reading the weight takes the time, so tiles are narrow enough to read it from all SMs. The tile
    depends on nothing that ranks may see differently, as in `segment_config`.
    """
    arch = device_info(device).arch
    config = segment_config(
        num_rows, num_rows, num_cols, features, dtype, descriptors, device, max_block_n=128
    )
    if arch == "cpu" or num_rows > 64 or dtype == torch.float32:
        return dataclasses.replace(config, blocks_per_sm=1)
    rows = -(-num_rows // config.block_m)
    block_n = 128
    while block_n > 32 and rows * -(-num_cols // block_n) < _SMS_TO_FILL:
        block_n //= 2
    block_k = min(256 // dtype.itemsize, smallest_block(features))
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
