"""Launches for gradients of row normalisation: one that writes dx and partial sums, one that adds
the partial sums up; more where a row does not fit a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.ops.engine.call import Call
from plait.ops.norm import layer_norm_backward_kernels as kernels
from plait.ops.norm.layer_norm_forward import accumulator, accumulator_dtype, layout_of
from plait.ops.norm.layer_norm_layout import Matrix, step_of, tile_for
from plait.ops.norm.rows import next_power_of_2

_LONGEST_SUMMED = 8192  # of a row whose columns' sums are kept in registers along with it
_LONGEST = 8192  # of a row that alone is kept in registers, without spilling any
_PART = 8192  # elements of a row that are worth a block of their own
_MAX_PARTS = 64
_COLUMNS, _COLUMN_ROWS = 128, 32  # of a tile whose columns are added up


@dataclass(frozen=True)
class RowGradients:
    """Operands and results of a backward pass.

    `mean` is None for root-mean-square norm. None among `dx`, `dweight`, `dbias` is not computed.
    `add` is another gradient of x, added to dx.
    """

    dy: torch.Tensor
    x: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor
    weight: torch.Tensor | None
    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    add: torch.Tensor | None = None


def row_gradients(call: Call, given: RowGradients, num_trailing: int) -> None:
    """Record the launches; nothing if no gradient is wanted."""
    places = [given.dy, given.x, given.dx, given.add]
    # Nobody reads the places of what is not there.
    strides = [(given.x if each is None else each).stride() for each in places]
    found = layout_of(call, given.x.shape, num_trailing, *strides)
    stats = (given.mean, given.rstd)
    if any(each is not None and each.numel() != found.num_rows for each in stats):
        call.decline("saved statistics of another shape")
    args = _arguments(call, given, found)
    sums = given.dweight is not None or given.dbias is not None
    if found.num_rows == 0:
        if sums:
            sum_partials(call, found.size, args, 0, given.x.dtype)
        return
    if not sums and given.dx is None:
        return
    narrower = 2 if given.x.dtype == torch.float64 else 1
    if found.size * narrower <= (_LONGEST_SUMMED if sums else _LONGEST):
        _whole(call, given, found, args, sums)
        return
    if given.dx is not None:
        if found.size * narrower <= _LONGEST:
            only_x = args | {"DWEIGHT": False, "DBIAS": False}
            _whole(call, given, found, only_x, False)
        else:
            _long(call, found, args, given)
    if sums:
        _columns(call, found, args, given.x.dtype)


def _arguments(call: Call, given: RowGradients, found: Matrix) -> dict[str, Any]:
    steps = [step_of(each) for each in (given.weight, given.dweight, given.dbias)]
    if None in steps:
        call.decline("a weight or bias with several strides")
    args: dict[str, Any] = {
        "dy_ptr": given.dy, "x_ptr": given.x, "mean_ptr": given.mean, "rstd_ptr": given.rstd,
        "weight_ptr": given.weight, "add_ptr": given.add, "dx_ptr": given.dx,
        "dweight_ptr": given.dweight, "dbias_ptr": given.dbias,
        "weight_step": steps[0], "dweight_step": steps[1], "dbias_step": steps[2],
        "RMS": given.mean is None, "WEIGHT": given.weight is not None, "ADD": given.add is not None,
        "DX": given.dx is not None, "DWEIGHT": given.dweight is not None,
        "DBIAS": given.dbias is not None, "ACC": accumulator(given.x.dtype),
        **found.sizes(), **found.constants(),
    }  # fmt: skip
    for index, name in enumerate(("dy", "x", "dx", "add")):
        args |= found.places(name, index)
    return args


def launch(
    call: Call, kernel: Any, grid: int, args: dict[str, Any], num_warps: int, **more: Any
) -> None:
    """Record a launch with those of the arguments that the kernel has."""
    wanted = {**args, **more}
    call.launch(
        kernel,
        grid,
        {name: value for name, value in wanted.items() if name in kernel.arg_names},
        num_warps=num_warps,
    )


def _whole(
    call: Call, given: RowGradients, found: Matrix, args: dict[str, Any], sums: bool
) -> None:
    dtype = given.x.dtype
    tile = tile_for(
        found,
        longest=next_power_of_2(found.size),
        per_thread=16 if given.x.element_size() == 2 else 8,
        interpreted=call.interpreted,
    )
    tiles = -(-found.num_rows // tile.rows)
    resident = call.info.num_sms * max(16 // tile.num_warps, 1)  # by registers
    if not sums:
        grid = min(tiles, 8 * resident)
    elif tiles <= 2:
        grid = 1
    else:
        # Partial sums cost writing and reading: at least four tiles a block where there are many.
        grid = min(tiles, resident, max(call.info.num_sms, tiles // 4))
    more = {"ROWS": tile.rows, "BLOCK": tile.block, "ALONE": grid == 1, "partial_ptr": None}
    if sums and grid > 1:
        more["partial_ptr"] = call.empty((2, grid, found.size), accumulator_dtype(dtype))
    launch(call, kernels.rows_backward_kernel, grid, args, tile.num_warps, **more)
    if sums and grid > 1:
        sum_partials(call, found.size, args, grid, dtype, more["partial_ptr"])


def _long(call: Call, found: Matrix, args: dict[str, Any], given: RowGradients) -> None:
    if given.add is not None:
        call.decline("a residual form of a row that does not fit a block")
    parts = min(found.size // _PART, _MAX_PARTS, 2 * call.info.num_sms // found.num_rows)
    kernel = kernels.long_rows_backward_kernel
    if parts < 2:
        more = {"num_parts": 1, "part_size": found.size, "PARTS": 1, "BLOCK": 4096}
        launch(call, kernel, found.num_rows, args, 8, SUM=True, WRITE=True, sums_ptr=None, **more)
        return
    part_size = next_power_of_2(-(-found.size // parts))
    num_parts = -(-found.size // part_size)
    sums = call.empty((2, found.num_rows, num_parts), accumulator_dtype(given.x.dtype))
    more = {"num_parts": num_parts, "part_size": part_size, "sums_ptr": sums, "BLOCK": 4096}
    more["PARTS"] = next_power_of_2(num_parts)
    grid = found.num_rows * num_parts
    launch(call, kernel, grid, args, 8, SUM=True, WRITE=False, **more)
    launch(call, kernel, grid, args, 8, SUM=False, WRITE=True, **more)


def _columns(call: Call, found: Matrix, args: dict[str, Any], dtype: torch.dtype) -> None:
    rows, columns = (4, 1 << 15) if call.interpreted else (_COLUMN_ROWS, _COLUMNS)
    blocks = -(-found.size // columns)
    tiles = -(-found.num_rows // rows)
    num_parts = max(min(tiles, 4 * call.info.num_sms // blocks), 1)
    partial = None
    if num_parts > 1:
        partial = call.empty((2, num_parts, found.size), accumulator_dtype(dtype))
    more = {
        "num_parts": num_parts, "ALONE": num_parts == 1, "partial_ptr": partial,
        "ROWS": rows, "BLOCK": columns,
    }  # fmt: skip
    launch(call, kernels.column_partials_kernel, blocks * num_parts, args, 8, **more)
    if num_parts > 1:
        sum_partials(call, found.size, args, num_parts, dtype, partial)


def sum_partials(
    call: Call,
    size: int,
    args: dict[str, Any],
    num_parts: int,
    dtype: torch.dtype,
    partial: torch.Tensor | None = None,
) -> None:
    """Add up partial sums (2, num_parts, size), those of the weight before those of the bias.

    `args` has dweight_ptr, dbias_ptr, their steps, DWEIGHT, DBIAS and ACC, maybe among others.
    """
    if partial is None:
        partial = call.empty((1,), accumulator_dtype(dtype))
    block = min(next_power_of_2(size), 1 << 16) if call.interpreted else 32
    launch(
        call, kernels.sum_partials_kernel, -(-size // block), args, 4, size=size,
        partial_ptr=partial, num_parts=num_parts, PARTS=4 if call.interpreted else 64, BLOCK=block,
    )  # fmt: skip


__all__ = ["RowGradients", "launch", "row_gradients", "sum_partials"]
