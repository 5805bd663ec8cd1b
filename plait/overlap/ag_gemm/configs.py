"""Tile choices of AG+GEMM: those of the plain GEMM, kept within a segment's padding."""

from __future__ import annotations

import dataclasses

import torch

from plait.collectives.segments import Segments, max_tile_rows
from plait.device import device_info
from plait.ops.matmul.configs import Config, default_config
from plait.ops.matmul.operands import descriptor_allowed
from plait.overlap.common.operands import Weights


def choose_config(
    segments: Segments, job: Weights, x: torch.Tensor, device: torch.device
) -> Config:
    """The configuration of one kernel: pure in shapes, dtype, layout and GPU.

    A descriptor tile must stay within a segment's padded rows (see `padded_rows`), so its height is
    at most 128 and at most the segment's own rows, rounded up to a power of two.
    """
    descriptors = (x.numel() == 0 or descriptor_allowed(x)) and job.descriptors_allowed()
    arch = device_info(device).arch
    rows = max(segments.max_rows, 1)
    config = default_config(
        rows * segments.world_size,
        job.num_cols,
        x.shape[1],
        x.dtype,
        arch,
        descriptors,
        num_weights=job.count,
    )
    return dataclasses.replace(config, block_m=min(config.block_m, max_tile_rows(rows)))


__all__ = ["choose_config"]
