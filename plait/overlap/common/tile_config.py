"""Tile choices of overlapped GEMMs, whose tiles must fit the segments of the ranks."""

from __future__ import annotations

import dataclasses

import torch

from plait.collectives.segments import max_tile_rows
from plait.device import device_info
from plait.ops.matmul.configs import Config, default_config, has_descriptors, smallest_block

_PIECE_COLUMNS = 32  # columns summed at a time: with more, registers spill beside the GEMM loop
_ANY_K = 1024


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
    return dataclasses.replace(
        config,
        block_m=min(config.block_m, max_tile_rows(max(segment_rows, 1))),
        block_n=min(config.block_n, max_block_n),
        block_k=min(config.block_k, smallest_block(features)),
        desc=descriptors and has_descriptors(arch) and (arch == "cpu" or dtype != torch.float32),
    )


def piece_columns(config: Config) -> int:
    """Columns of a tile that are summed at a time."""
    return min(config.block_n, _PIECE_COLUMNS)


def tiles_of(rows: int, num_cols: int, config: Config) -> int:
    """Tiles, and so signal words, of `rows` rows."""
    return -(-max(rows, 1) // config.block_m) * -(-num_cols // config.block_n)


__all__ = ["piece_columns", "segment_config", "tiles_of"]
