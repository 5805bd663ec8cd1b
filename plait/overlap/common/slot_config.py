"""Tile choices of operators that exchange partial tiles: ranks must agree on the tiles."""

from __future__ import annotations

import dataclasses

import torch

from plait.collectives.segments import max_tile_rows
from plait.device import device_info
from plait.ops.matmul.configs import Config, default_config

_PIECE_COLUMNS = 32  # columns summed at a time: with more, registers spill beside the GEMM loop


def agreed_config(
    segment_rows: int,
    total_rows: int,
    num_cols: int,
    features: int,
    dtype: torch.dtype,
    descriptors: bool,
    device: torch.device,
) -> Config:
    """One rank's configuration for segments [segment_rows, num_cols] of `total_rows` in all.

    Tile height and width decide which signal word a tile sets, so they depend on nothing that
    ranks may see differently: not on K (`features`), nor on the layout of x and the weight.
    """
    arch = device_info(device).arch
    agreed = default_config(total_rows, num_cols, 1024, dtype, arch, False)
    own = default_config(total_rows, num_cols, features, dtype, arch, descriptors)
    block_m = min(agreed.block_m, max_tile_rows(max(segment_rows, 1)))
    return dataclasses.replace(own, block_m=block_m, block_n=agreed.block_n)


def piece_columns(config: Config) -> int:
    """Columns of a tile that are summed at a time."""
    return min(config.block_n, _PIECE_COLUMNS)


def tiles_of(rows: int, num_cols: int, config: Config) -> int:
    """Tiles, and so signal words, of `rows` rows."""
    return -(-max(rows, 1) // config.block_m) * -(-num_cols // config.block_n)


__all__ = ["agreed_config", "piece_columns", "tiles_of"]
