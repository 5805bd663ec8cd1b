"""Launches that normalise rows: of layer, root-mean-square and group norm, and residual forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from plait.ops.engine.call import Call
from plait.ops.norm import layer_norm_kernels as kernels
from plait.ops.norm.layer_norm_layout import Matrix, matrix, step_of, tile_for
from plait.ops.norm.rows import next_power_of_2

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LONGEST_ROW = 16384  # elements kept in registers by 16 warps
_PART = 8192  # elements of a row that are worth a block of their own
_MAX_PARTS = 64


@dataclass(frozen=True)
class Affine:
    """Weight and bias: one a column, or, with `groups`, one a channel.

    Row r is group `r % groups` of `channels` channels, with `space` elements each.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    groups: int = 0
    channels: int = 0
    space: int = 1

    def arguments(self, call: Call, size: int) -> dict[str, Any]:
        """Launch arguments; declines parameters that no single stride describes."""
        weight_step, bias_step = step_of(self.weight), step_of(self.bias)
        if weight_step is None or bias_step is None:
            call.decline("a weight or bias with several strides")
        return {
            "weight_ptr": self.weight,
            "bias_ptr": self.bias,
            "weight_step": weight_step,
            "bias_step": bias_step,
            "groups": self.groups,
            "channels": self.channels or size,
            "space": self.space,
            "GROUPS": self.groups > 0,
            "WEIGHT": self.weight is not None,
            "BIAS": self.bias is not None,
        }


def accumulator(dtype: torch.dtype) -> Any:
    """What sums of elements of `dtype` are taken in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same as PyTorch's dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def eps_arguments(eps: float) -> dict[str, float]:
    """`eps` and `eps_low`: two numbers that fp32 holds, and that add up to it."""
    high = float(torch.tensor(eps, dtype=torch.float32))
    return {"eps": high, "eps_low": eps - high if abs(high) < float("inf") else 0.0}


def layout_of(
    call: Call, shape: Sequence[int], num_trailing: int, *strides: Sequence[int]
) -> Matrix:
    """Tensors of these strides as matrices; declines what the kernels have no indices for."""
    found = matrix(shape, num_trailing, strides)
    if found is None:
        call.decline("strides that do not merge into few dims")
    return found


@dataclass(frozen=True)
class Stats:
    """Where mean (None: root-mean-square) and 1 / deviation of each row go; contiguous."""

    mean: torch.Tensor | None
    rstd: torch.Tensor


def stats_of(call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The next result, one value a row, contiguous."""
    found = call.result(shape, dtype)
    if not found.is_contiguous():
        call.decline("saved statistics with gaps")
    return found


def normalize_rows(
    call: Call,
    x: torch.Tensor,
    y: torch.Tensor,
    num_trailing: int,
    affine: Affine,
    stats: Stats,
    eps: float,
    views: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None,
    residual: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Record the launches for `y`, and `stats`.

    Args:
        views: a shape and the strides that x and y have when seen so; by default their own.
        residual: a tensor that is added to x first, and where the sum goes, which lies as y does.
    """
    shape, *strides = views or (x.shape, x.stride(), y.stride())
    if residual is not None:
        strides.append(residual[0].stride())
    found = layout_of(call, shape, num_trailing, *strides)
    if found.num_rows * found.size == 0:
        return
    args = {
        "x_ptr": x, "y_ptr": y, "mean_ptr": stats.mean, "rstd_ptr": stats.rstd,
        **eps_arguments(eps), **found.sizes(), **found.places("x", 0), **found.places("y", 1),
        **affine.arguments(call, found.size), **found.constants(),
        "RMS": stats.mean is None, "ACC": accumulator(x.dtype),
    }  # fmt: skip
    wide = x.dtype == torch.float64
    tile = tile_for(
        found,
        longest=LONGEST_ROW // (2 if wide else 1),
        per_thread=16 if x.element_size() == 2 else 8,
        interpreted=call.interpreted,
    )
    if tile.whole:
        _whole(call, found, tile, args, residual)
        return
    if residual is not None:
        call.decline("a residual form of a row that does not fit a block")
    parts = min(found.size // _PART, _MAX_PARTS, 2 * call.info.num_sms // found.num_rows)
    if affine.groups and affine.space < tile.block:
        args["BLOCK"] = next_power_of_2(affine.space)
    if parts < 2:
        args.setdefault("BLOCK", tile.block)
        call.launch(kernels.norm_long_rows_kernel, found.num_rows, args, num_warps=tile.num_warps)
        return
    part_size = next_power_of_2(-(-found.size // parts))
    if affine.groups:
        part_size = -(-part_size // affine.space) * affine.space
    _in_parts(call, found, part_size, args, x.dtype)


def _whole(call: Call, found: Matrix, tile: Any, args: dict[str, Any], residual: Any) -> None:
    tiles = -(-found.num_rows // tile.rows)
    resident = call.info.num_sms * max(64 // tile.num_warps, 1)
    added, total = (None, None) if residual is None else residual
    args |= {
        "residual_ptr": added,
        "sum_ptr": total,
        "RESIDUAL": residual is not None,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        **found.places("residual", 2 if residual is not None else 1),
    }
    # Few waves more than fit: a block that starts anew costs little, an uneven last wave more.
    call.launch(kernels.norm_rows_kernel, min(tiles, 4 * resident), args, num_warps=tile.num_warps)


def _in_parts(
    call: Call, found: Matrix, part_size: int, args: dict[str, Any], dtype: torch.dtype
) -> None:
    num_parts = -(-found.size // part_size)
    partial = call.empty((2, found.num_rows, num_parts), accumulator_dtype(dtype))
    args |= {"partial_ptr": partial, "num_parts": num_parts, "part_size": part_size}
    block = 2048 if dtype == torch.float64 else 4096
    args.setdefault("BLOCK", min(next_power_of_2(part_size), block))
    wanted = kernels.partial_moments_kernel.arg_names
    grid = found.num_rows * num_parts
    first = {name: value for name, value in args.items() if name in wanted}
    call.launch(kernels.partial_moments_kernel, grid, first, num_warps=8)
    args["PARTS"] = next_power_of_2(num_parts)
    call.launch(kernels.norm_parts_kernel, grid, args, num_warps=8)


__all__ = [
    "FLOATS",
    "LONGEST_ROW",
    "Affine",
    "Stats",
    "accumulator",
    "accumulator_dtype",
    "eps_arguments",
    "layout_of",
    "normalize_rows",
    "stats_of",
]
