"""Tile choices of AG+GEMM."""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.collectives.segments import Segments
from plait.device import device_info
from plait.ops.matmul.configs import Config, is_valid
from plait.ops.matmul.operands import descriptor_allowed, dot_precision
from plait.overlap.common.operands import Weights
from plait.overlap.common.tile_config import segment_config


def choose_config(
    segments: Segments, job: Weights, x: torch.Tensor, device: torch.device
) -> Config:
    """The configuration of one kernel: pure in shapes, dtype, layout and GPU."""
    descriptors = (x.numel() == 0 or descriptor_allowed(x)) and job.descriptors_allowed()
    rows = max(segments.max_rows, 1)
    config = segment_config(
        rows,
        rows * segments.world_size,
        job.num_cols,
        x.shape[1],
        x.dtype,
        descriptors,
        device,
        num_weights=job.count,
    )
    arch = device_info(device).arch
    if not config.desc:
        return config
    # Loads that run ahead into the next tile, and stores by descriptor, measured for large tiles.
    for stages in (4, 3):
        better = replace(config, num_stages=stages, desc_store=True, flatten=True)
        if is_valid(better, x.dtype, arch, num_weights=job.count, precision=dot_precision(x.dtype)):
            return better
    return config


__all__ = ["choose_config"]
