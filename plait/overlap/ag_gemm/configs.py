"""Tile choices of AG+GEMM."""

from __future__ import annotations

import torch

from plait.collectives.segments import Segments
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import descriptor_allowed
from plait.overlap.common.operands import Weights
from plait.overlap.common.tile_config import segment_config


def choose_config(
    segments: Segments, job: Weights, x: torch.Tensor, device: torch.device
) -> Config:
    """The configuration of one kernel: pure in shapes, dtype, layout and GPU."""
    descriptors = (x.numel() == 0 or descriptor_allowed(x)) and job.descriptors_allowed()
    rows = max(segments.max_rows, 1)
    return segment_config(
        rows,
        rows * segments.world_size,
        job.num_cols,
        x.shape[1],
        x.dtype,
        descriptors,
        device,
        num_weights=job.count,
    )


__all__ = ["choose_config"]
