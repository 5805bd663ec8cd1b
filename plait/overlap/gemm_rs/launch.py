"""GEMM+RS: from checked arguments to programs. Building a program is pure; nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from plait.backends.commands import Launch, Program, Step
from plait.collectives.all_gather import end_gather, start_gather
from plait.collectives.push import gather_bytes, open_region
from plait.collectives.segments import Segments
from plait.errors import CapacityError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import descriptor_allowed, dot_precision, row_operand
from plait.overlap.common.arrivals import Tiles, partial_arrivals
from plait.overlap.common.operands import (
    Weights,
    block_args,
    triton_dtype,
)
from plait.overlap.common.plans import run_program
from plait.overlap.common.quantized import product_args
from plait.overlap.common.tile_config import (
    piece_columns,
    segment_config,
    tiles_of,
)
from plait.overlap.common.trace import Awaits, trace_args
from plait.overlap.gemm_rs.staged import MAX_ELEMENTS, plan_staged, staged_bytes
from plait.schedules.partition import num_segmented_tiles
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

Algorithm = Literal["direct", "staged"]
_OPERATOR = signals.Operator.GEMM_RS
_STEPS = (("compute", "store", "wait", "sum"),)  # what a trace's stamps end


@dataclass(frozen=True)
class Gather:
    """Rows to gather meanwhile: own rows `x` [rows, F] into `whole` [M, F], both contiguous."""

    x: torch.Tensor
    whole: torch.Tensor


def run_gemm_rs(
    group: Group,
    x: torch.Tensor,
    weight: Weights,
    segments: Segments,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    gather: Gather | None,
    algorithm: Algorithm = "direct",
) -> None:
    """Fill `out` [rows_rank, N], and the gather, from `x` [M, K]; in slices of rows if needed."""
    staged = algorithm == "staged"
    plan = plan_staged if staged else plan_gemm_rs
    limit = _slice_rows(group, x, weight, segments, reduce_dtype, gather, staged)
    call = f"gemm_rs {algorithm} M={segments.rows} N={weight.num_cols} {x.dtype}"
    call = f"{call} partial={reduce_dtype}"
    for part in segments.slices(limit):
        first = part.first[group.rank]
        nbytes = (staged_bytes if staged else _slot_bytes)(part, weight.num_cols, reduce_dtype)
        region = group.take_region(nbytes, call)
        rows = slice(first, first + part.rows[group.rank])
        program = Program("gemm_rs", members=group.members)
        before: list[Step] = []
        after: list[Step] = []
        if gather is not None:
            own = gather.x[rows]
            row_bytes = own.shape[1] * own.element_size()
            gather_region = group.take_region(gather_bytes(part, row_bytes), call)
            before = start_gather(group, gather_region, own, part)
            after = end_gather(group, gather_region, own, part, gather.whole)
        program.add(*before, *plan(group, region, x, weight, part, out[rows], reduce_dtype), *after)
        run_program(group, program, f"{call} first={part.first} gather={gather is not None}")


def plan_gemm_rs(
    group: Group,
    region: Region,
    x: torch.Tensor,
    weight: Weights,
    segments: Segments,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
) -> list[Step]:
    """The commands of one slice: `out` is this rank's rows of it."""
    from plait.overlap.gemm_rs.kernels import _gemm_rs_kernel

    config = _config(group, x, weight, segments)
    num_cols, features = weight.num_cols, x.shape[1]
    num_tiles = num_segmented_tiles(segments.rows, -(-num_cols // config.block_n), config.block_m)
    grid = max(1, min(group.executor.num_sms, num_tiles))
    operands = weight.kernel_args(config, out)
    args = {
        "ctx_ptr": region.ctx,
        "x": row_operand(x, config),
        "w": operands["w0"],
        "bias_ptr": operands["bias0_ptr"],
        "out_ptr": out,
        "table_ptr": segments.table(group.device),
        "num_tiles": num_tiles,
        "words_per_rank": tiles_of(segments.max_rows, num_cols, config),
        "slot_rows": segments.max_rows,
        "total": segments.total,
        "N": num_cols,
        "K": features,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": operands["stride_w0n"],
        "stride_wk": operands["stride_w0k"],
        "stride_bias": operands["stride_bias0"],
        "PIECE_N": piece_columns(config),
        "HAS_BIAS": operands["HAS_BIAS"],
        "WORLD_SIZE": group.world_size,
        "PARTIAL": triton_dtype(reduce_dtype),
        "B_KN": operands["B_KN"],
        "PRECISION": dot_precision(x.dtype),
        "OP": int(_OPERATOR),
        **block_args(config),
        **product_args(x, weight, reduce_dtype, config),
    }
    args |= trace_args(group, num_tiles, _STEPS, _awaits(group, args["words_per_rank"]))
    early = config.desc and group.executor.early_launches
    args["EARLY"] = early
    launch = Launch(_gemm_rs_kernel, grid, args, config.num_warps, config.num_stages, early=early)
    tiles = Tiles.of(segments.rows, num_cols, config, args["words_per_rank"])
    arrivals = partial_arrivals(region, tiles, reduce_dtype.itemsize)
    return [open_region(region, grid, _OPERATOR, leads=early), arrivals, launch]


def _awaits(group: Group, words: int) -> Awaits:
    """The words that tiles of the own rows wait for, for `trace_args`."""
    rank, world_size = group.rank, group.world_size
    return lambda _loop, _segment, tile: [
        peer * words + tile for peer in range(world_size) if peer != rank
    ]


def _config(group: Group, x: torch.Tensor, weight: Weights, segments: Segments) -> Config:
    descriptors = segments.contiguous and descriptor_allowed(x) and weight.descriptors_allowed()
    rows = max(segments.max_rows, 1)
    config = segment_config(
        rows,
        rows * group.world_size,
        weight.num_cols,
        x.shape[1],
        x.dtype,
        descriptors,
        group.device,
        by_blocks=weight.by_blocks,
    )
    # One block an SM: two have 128 registers a thread, of which Triton 3.9 spills some.
    return replace(config, blocks_per_sm=1)


def _slot_bytes(segments: Segments, num_cols: int, dtype: torch.dtype) -> int:
    return segments.world_size * segments.max_rows * num_cols * dtype.itemsize


def _slice_rows(
    group: Group,
    x: torch.Tensor,
    weight: Weights,
    segments: Segments,
    reduce_dtype: torch.dtype,
    gather: Gather | None,
    staged: bool,
) -> int:
    """The most rows a slice may have: within the region's bytes and its signal words."""
    capacity = group.workspace.capacity_bytes
    rows = max(segments.max_rows, 1)
    while True:
        part = next(segments.slices(rows))
        needed = (staged_bytes if staged else _slot_bytes)(part, weight.num_cols, reduce_dtype)
        if gather is not None:
            needed = max(needed, gather_bytes(part, gather.x.shape[1] * gather.x.element_size()))
        fits = needed <= capacity
        if staged:
            fits = fits and part.max_rows * weight.num_cols <= MAX_ELEMENTS
        else:
            config = _config(group, x, weight, part)
            words = group.world_size * tiles_of(part.max_rows, weight.num_cols, config)
            fits = fits and words <= signals.NUM_READY_WORDS
        if fits:
            return rows
        if rows == 1:
            raise CapacityError(
                argument="PLAIT_WORKSPACE_BYTES",
                expected=f"room for {needed} bytes in each of two regions",
                got=f"{capacity} bytes a region",
                remedy="Raise PLAIT_WORKSPACE_BYTES: not even one row a rank fits.",
            )
        rows = rows // 2 if rows <= 128 else max(128, rows // 2 // 128 * 128)


__all__ = ["Algorithm", "Gather", "plan_gemm_rs", "run_gemm_rs"]
