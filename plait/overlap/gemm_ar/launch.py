"""GEMM+AR: from checked arguments to programs. Building a program is pure; nothing here waits."""

from __future__ import annotations

from typing import Any, Literal

import torch

from plait.backends.commands import Launch, Program
from plait.collectives.push import open_region
from plait.collectives.segments import Segments
from plait.errors import CapacityError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import descriptor_allowed, dot_precision, row_operand
from plait.overlap.common.arrivals import Tiles, broadcast_arrivals, partial_arrivals
from plait.overlap.common.operands import (
    Weights,
    block_args,
    triton_dtype,
)
from plait.overlap.common.plans import run_program
from plait.overlap.common.quantized import product_args
from plait.overlap.common.tile_config import (
    few_rows_config,
    launch_limits,
    piece_columns,
    segment_config,
    tiles_of,
)
from plait.overlap.common.trace import Awaits, trace_args
from plait.schedules.partition import num_segmented_tiles, split_rows
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

Algorithm = Literal["one_shot", "two_shot"]
_OPERATOR = signals.Operator.GEMM_AR
_ONE_SHOT_ROWS = 64  # below, one hop costs less than the (world_size - 2) / world_size more bytes
_ALIGN_BYTES = 256
_STEPS = {  # what a trace's stamps end in each of the kernel's loops
    "one_shot": (("compute", "store"), ("wait", "sum")),
    "two_shot": (("compute", "store", "wait", "sum"), ("wait", "store")),
}


def choose_algorithm(num_rows: int, world_size: int) -> Algorithm:
    """One hop for few rows (decode), two hops with less traffic otherwise."""
    return "one_shot" if num_rows <= _ONE_SHOT_ROWS or world_size <= 2 else "two_shot"


def run_gemm_ar(
    group: Group,
    x: torch.Tensor,
    weight: Weights,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    algorithm: Algorithm,
) -> None:
    """Fill `out` [M, N] from `x` [M, K]; beyond the workspace's capacity in slices of rows."""
    num_rows = x.shape[0]
    limit = _slice_rows(group, x, weight, out, reduce_dtype, algorithm)
    call = f"gemm_ar {algorithm} M={num_rows} N={weight.num_cols} {x.dtype} partial={reduce_dtype}"
    for first in range(0, num_rows, limit):
        rows, part = x[first : first + limit], out[first : first + limit]
        nbytes = _region_bytes(group, rows.shape[0], weight, out, reduce_dtype, algorithm)
        region = group.take_region(nbytes, call)
        here = weight.of_rows(first, rows.shape[0])
        program = plan_gemm_ar(group, region, rows, here, part, reduce_dtype, algorithm)
        run_program(group, program, f"{call} first={first}")


def plan_gemm_ar(
    group: Group,
    region: Region,
    x: torch.Tensor,
    weight: Weights,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    algorithm: Algorithm,
) -> Program:
    """The program of one slice."""
    config = _config(group, x, weight, algorithm)
    args = _common_args(region, x, weight, out, reduce_dtype, config)
    if algorithm == "one_shot":
        from plait.overlap.gemm_ar.kernels import _gemm_ar_one_shot_kernel as kernel

        num_tiles = tiles_of(x.shape[0], weight.num_cols, config)
        args |= {
            "M": x.shape[0],
            "words_per_rank": num_tiles,
        }
        tiles = Tiles.of((x.shape[0],) * group.world_size, weight.num_cols, config, num_tiles)
        arrivals = broadcast_arrivals(region, tiles, reduce_dtype.itemsize)
    else:
        from plait.overlap.gemm_ar.kernels import _gemm_ar_two_shot_kernel as kernel

        segments = _segments(group, x.shape[0])
        num_tiles = num_segmented_tiles(
            segments.rows, -(-weight.num_cols // config.block_n), config.block_m
        )
        args |= {
            "table_ptr": segments.table(group.device),
            "num_tiles": num_tiles,
            "words_per_rank": tiles_of(segments.max_rows, weight.num_cols, config),
            "slot_rows": segments.max_rows,
            "result_offset": _slot_bytes(group, segments.max_rows, weight, reduce_dtype),
        }
        tiles = Tiles.of(segments.rows, weight.num_cols, config, args["words_per_rank"])
        arrivals = partial_arrivals(region, tiles, reduce_dtype.itemsize, out.element_size())
    awaits = _awaits(group, args["words_per_rank"], algorithm)
    args |= trace_args(group, num_tiles, _STEPS[algorithm], awaits)
    most, registers = launch_limits(config, group.executor.num_sms)
    grid = max(1, min(most, num_tiles))
    early = config.desc and group.executor.early_launches
    args["EARLY"] = early
    launch = Launch(
        kernel, grid, args, config.num_warps, config.num_stages, early=early,
        max_registers=registers,
    )  # fmt: skip
    program = Program("gemm_ar", members=group.members)
    return program.add(open_region(region, grid, _OPERATOR, leads=early), arrivals, launch)


def _common_args(
    region: Region,
    x: torch.Tensor,
    weight: Weights,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    config: Config,
) -> dict[str, Any]:
    operands = weight.kernel_args(config, out)
    return {
        "ctx_ptr": region.ctx,
        "x": row_operand(x, config),
        "w": operands["w0"],
        "bias_ptr": operands["bias0_ptr"],
        "out_ptr": out,
        "N": weight.num_cols,
        "K": x.shape[1],
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": operands["stride_w0n"],
        "stride_wk": operands["stride_w0k"],
        "stride_bias": operands["stride_bias0"],
        "PIECE_N": piece_columns(config),
        "HAS_BIAS": operands["HAS_BIAS"],
        "WORLD_SIZE": len(region.words),
        "PARTIAL": triton_dtype(reduce_dtype),
        "B_KN": operands["B_KN"],
        "PRECISION": dot_precision(x.dtype),
        "OP": int(_OPERATOR),
        **block_args(config),
        **product_args(x, weight, reduce_dtype, config),
    }


def _awaits(group: Group, words: int, algorithm: Algorithm) -> Awaits:
    """The words that tiles wait for, for `trace_args`."""
    rank, world_size = group.rank, group.world_size

    def awaits(loop: int, segment: int, tile: int) -> list[int]:
        if algorithm == "two_shot" and loop == 1:
            return [(world_size + segment) * words + tile]
        return [peer * words + tile for peer in range(world_size) if peer != rank]

    return awaits


def _segments(group: Group, num_rows: int) -> Segments:
    return Segments.of((num_rows, 1), 0, split_rows(num_rows, group.world_size))


def _config(group: Group, x: torch.Tensor, weight: Weights, algorithm: Algorithm) -> Config:
    descriptors = descriptor_allowed(x) and weight.descriptors_allowed()
    num_rows = x.shape[0]
    if algorithm == "one_shot":
        return few_rows_config(
            num_rows, weight.num_cols, x.shape[1], x.dtype, descriptors, group.device,
            weight.by_blocks,
        )  # fmt: skip
    return segment_config(
        _segments(group, num_rows).max_rows,
        num_rows,
        weight.num_cols,
        x.shape[1],
        x.dtype,
        descriptors,
        group.device,
        max_block_n=128,  # wider tiles spill registers beside the sums
        by_blocks=weight.by_blocks,
    )


def _slot_bytes(group: Group, slot_rows: int, weight: Weights, dtype: torch.dtype) -> int:
    nbytes = group.world_size * slot_rows * weight.num_cols * dtype.itemsize
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _region_bytes(
    group: Group,
    num_rows: int,
    weight: Weights,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    algorithm: Algorithm,
) -> int:
    if algorithm == "one_shot":
        return _slot_bytes(group, num_rows, weight, reduce_dtype)
    slots = _slot_bytes(group, _segments(group, num_rows).max_rows, weight, reduce_dtype)
    return slots + num_rows * weight.num_cols * out.element_size()


def _slice_rows(
    group: Group,
    x: torch.Tensor,
    weight: Weights,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
    algorithm: Algorithm,
) -> int:
    """The most rows a slice may have: within the region's bytes and its signal words."""
    capacity = group.workspace.capacity_bytes
    rows = x.shape[0]
    while True:
        needed = _region_bytes(group, rows, weight, out, reduce_dtype, algorithm)
        config = _config(group, x[:rows], weight, algorithm)
        segment_rows = rows if algorithm == "one_shot" else _segments(group, rows).max_rows
        words = 2 * group.world_size * tiles_of(segment_rows, weight.num_cols, config)
        if needed <= capacity and words <= signals.NUM_READY_WORDS:
            return rows
        if rows == 1:
            raise CapacityError(
                argument="PLAIT_WORKSPACE_BYTES",
                expected=f"room for {needed} bytes in each of two regions",
                got=f"{capacity} bytes a region",
                remedy="Raise PLAIT_WORKSPACE_BYTES: not even one row fits.",
            )
        rows = max(1, rows // 2)


__all__ = ["Algorithm", "choose_algorithm", "plan_gemm_ar", "run_gemm_ar"]
