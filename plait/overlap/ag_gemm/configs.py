"""Tile choices of AG+GEMM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from plait.collectives.segments import Segments
from plait.device import device_info
from plait.ops.matmul.configs import Config, is_valid
from plait.ops.matmul.operands import descriptor_allowed, dot_precision
from plait.overlap.common.operands import Weights
from plait.overlap.common.quantized import fp8_step, is_quantized
from plait.overlap.common.tile_config import segment_config

_ROW_ALIGNMENT_BYTES = 16  # of what a descriptor reads


def choose_config(
    segments: Segments,
    job: Weights,
    x: torch.Tensor,
    device: torch.device,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Config:
    """The configuration of one kernel: pure in shapes, dtypes, layout and GPU."""
    # A rank without rows still reads those of its peers.
    aligned = x.shape[1] * x.element_size() % _ROW_ALIGNMENT_BYTES == 0
    descriptors = descriptor_allowed(x) if x.numel() else aligned
    rows = max(segments.max_rows, 1)
    choose = partial(
        segment_config,
        rows,
        rows * segments.world_size,
        job.num_cols,
        x.shape[1],
        x.dtype,
        descriptors and job.descriptors_allowed(),
        device,
        num_weights=job.count,
        by_blocks=job.by_blocks,
    )
    config = choose()
    two_tiles = is_quantized(x.dtype) and (job.by_blocks or fp8_step(x, out_dtype, config) > 0)
    if config.desc and not two_tiles:
        config = choose(two_tiles=False)
    arch = device_info(device).arch
    if not config.desc:
        return config
    # Loads that run ahead into the next tile, and stores by descriptor, measured for large tiles.
    # Beside two tiles, loads that run ahead would spill registers.
    for stages in (4, 3):
        better = replace(config, num_stages=stages, desc_store=True, flatten=not two_tiles)
        if is_valid(better, x.dtype, arch, num_weights=job.count, precision=dot_precision(x.dtype)):
            return better
    return config


__all__ = ["choose_config"]
