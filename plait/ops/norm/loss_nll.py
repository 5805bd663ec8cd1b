"""Negative log likelihood of target classes (`nll_loss`, `nll_loss2d`) and its gradient.

With log_softmax it is cross_entropy. Sums are in fp32 and fp64, deterministic, and rounded
once. A target that is no class: ATen raises on the CPU and stops the kernel on a GPU; here nothing
is read, its loss is NaN and its gradient 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call, Pointer
from plait.ops.engine.dims import Dim, next_power_of_2
from plait.ops.norm import loss_reference as reference
from plait.ops.norm.loss import MEAN, NONE, number_blocks, places_of
from plait.ops.norm.rows import RowLayout, layout_of, row_tile
from plait.ops.norm.softmax import FLOATS

Tensor = torch.Tensor
_TILE = 4096
_INTERPRETED_TILE = 1 << 16
_MAX_PARTS = 512
_MAX_TILES = 4  # that one block sums without a second launch


def nll_loss_forward(
    call: Call,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> None:
    """-w[t] x[t] of (n, classes) or (classes,), and the weights' sum."""
    _check(call, self, target, weight, reduction)
    _check_1d(call, self, target)
    if weight is not None and weight.dim() != 1:
        call.decline("weights that are not one a class")
    _forward(call, self, target, weight, reduction, ignore_index)


def nll_loss2d_forward(
    call: Call,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> None:
    """-w[t] x[t] of (n, classes, height, width), and the weights' sum."""
    _check(call, self, target, weight, reduction)
    _check_2d(call, self, target)
    _forward(call, self, target, weight, reduction, ignore_index)


def _check(call: Call, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> None:
    if reduction not in (0, 1, 2):
        call.decline("a reduction that is none of none, mean and sum")
    if self.dtype not in FLOATS or target.dtype not in (torch.int64, torch.uint8):
        call.decline("nll_loss of a dtype that is not a real floating one, or of other targets")
    if not self.dim():
        call.decline("nll_loss of a 0-d tensor")
    classes = self.shape[_class_dim(self)]
    if weight is not None and (weight.dtype != self.dtype or weight.numel() != classes):
        call.decline("weights of another dtype or number than the classes")
    if weight is not None and weight.dim() > 1:
        call.decline("weights that are not one a class")


def _check_1d(call: Call, self: Tensor, target: Tensor) -> None:
    if self.dim() > 2 or target.shape != self.shape[:-1]:
        call.decline("nll_loss of other than one target a row")


def _check_2d(call: Call, self: Tensor, target: Tensor) -> None:
    if self.dim() != 4 or target.dim() != 3 or target.dtype != torch.int64:
        call.decline("nll_loss2d of other than (n, classes, height, width)")
    if target.shape != (self.shape[0], *self.shape[2:]):
        call.decline("nll_loss2d of another number of targets")


def _class_dim(self: Tensor) -> int:
    return 0 if self.dim() == 1 else 1


def _forward(
    call: Call,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> None:
    from plait.ops.norm import loss_nll_kernels as kernels

    single = self.dim() == 1
    each = reduction == NONE and not single
    out = call.result(target.shape if each else (), self.dtype)
    total = call.result((), self.dtype)
    layout = _samples(call, self, target, [out if each else None])
    tile = _INTERPRETED_TILE if call.interpreted else _TILE
    rows = min(next_power_of_2(layout.num_rows), tile)
    args, blocks = _arguments(layout, rows, self, weight, ignore_index)
    args |= {"x_ptr": self, "t_ptr": target, "out_ptr": out, "total_ptr": total}
    args |= {**layout.places("x", 0), **places_of(layout, "t", 1)}
    warps = max(rows // 256, 1)
    if each:
        args |= places_of(layout, "out", 2)
        # One block at least: it writes the total weight.
        call.launch(kernels._nll_kernel, max(blocks, 1), args, num_warps=warps)
        return
    mean = reduction == MEAN
    args |= {"blocks": blocks, "MEAN": mean}
    # Of a single ignored sample ATen's mean is 0 on a GPU, and NaN, as of several, on the CPU.
    args["IGNORED_IS_0"] = single and call.device.type != "cpu"
    if blocks <= _MAX_TILES:
        call.launch(kernels._nll_sum_kernel, 1, args, num_warps=warps)
        return
    parts = min(blocks, call.info.num_sms * 2, _MAX_PARTS)
    part = call.empty((2, parts), torch.float64)
    args |= {"out_ptr": part, "total_ptr": Pointer(part, offset=parts), "MEAN": False}
    call.launch(kernels._nll_sum_kernel, parts, args, num_warps=warps)
    args = {"part_ptr": part, "out_ptr": out, "total_ptr": total, "num_parts": parts, "MEAN": mean}
    args["BLOCK"] = next_power_of_2(parts)
    call.launch(kernels._nll_combine_kernel, 1, args)


def nll_loss_backward(
    call: Call,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> None:
    """-w[t] g at the target of each row, 0 elsewhere."""
    _check(call, self, target, weight, reduction)
    _check_1d(call, self, target)
    _backward(call, grad_output, self, target, weight, reduction, ignore_index, total_weight)


def nll_loss2d_backward(
    call: Call,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> None:
    """-w[t] g at the target of each pixel, 0 elsewhere."""
    _check(call, self, target, weight, reduction)
    _check_2d(call, self, target)
    if not self.numel() or not all(x.is_contiguous() for x in (self, *call.given.tensors)):
        call.decline("a gradient of nll_loss2d that is empty, or not contiguous as the input")
    _backward(call, grad_output, self, target, weight, reduction, ignore_index, total_weight)


def _backward(
    call: Call,
    grad: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> None:
    from plait.ops.norm import loss_nll_kernels as kernels

    each = reduction == NONE and self.dim() > 1
    if grad.dtype != self.dtype or total_weight.dtype != self.dtype:
        call.decline("a gradient or total weight of another dtype than the input")
    if total_weight.numel() != 1 or (not each and (grad.dim() > 1 or grad.numel() != 1)):
        call.decline("a gradient or total weight that is not a single element")
    if each and grad.shape != target.shape:
        call.decline("a gradient of another shape than the targets")
    out = call.result(self.shape, self.dtype)
    if not self.numel():
        return
    layout = _samples(call, out, target, [grad if each else None], classes=True)
    tile = row_tile(
        layout,
        out.element_size(),
        num_sms=call.info.num_sms,
        interpreted=call.interpreted,
        max_row=16384,
        max_tile=8192,
    )
    args, _ = _arguments(layout, tile.rows, self, weight, ignore_index)
    args |= {"g_ptr": grad, "t_ptr": target, "total_ptr": total_weight, "out_ptr": out}
    args |= {**layout.places("out", 0), **places_of(layout, "t", 1), **places_of(layout, "g", 2)}
    args |= {"MEAN": reduction == MEAN, "row_blocks": tile.grid, **tile.constants(layout)}
    class_blocks = -(-layout.size // tile.block)
    grid = tile.grid * class_blocks
    call.launch(kernels._nll_backward_kernel, grid, args, num_warps=tile.num_warps)


def _samples(
    call: Call,
    self: Tensor,
    target: Tensor,
    others: Sequence[Tensor | None],
    *,
    classes: bool = False,
) -> RowLayout:
    """The samples in `self`, `target` and what has the target's shape, or None: one for all.

    With `classes` a row has those; without, a row is a sample, and its step that of the classes.
    """
    skip = _class_dim(self)
    where = [dim for dim in range(self.dim()) if dim != skip]
    same = [[0] * target.dim() if x is None else list(x.stride()) for x in (target, *others)]
    dims = [
        Dim(self.shape[dim], (self.stride(dim), *(strides[index] for strides in same)))
        for index, dim in enumerate(where)
    ]
    row = Dim(self.shape[skip], (self.stride(skip), *(0 for _ in same)))
    layout = layout_of(dims, (row,), 1 + len(same))
    if layout is None:
        call.decline("samples that more than four strides number")
    return layout


def _arguments(
    layout: RowLayout, rows: int, self: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[dict[str, Any], int]:
    """What all kernels take, and the number of tiles of `rows` samples."""
    tiled = len(layout.dims) > 1 and layout.dims[-1] >= rows
    args = {
        **layout.sizes(),
        "num_classes": self.shape[_class_dim(self)],
        "ignore_index": ignore_index,
        "w_ptr": self if weight is None else weight,
        "w_step": 0 if weight is None or not weight.dim() else weight.stride(0),
        "HAS_W": weight is not None,
        "ROWS": rows,
        "NDIM": len(layout.dims),
        "TILED": tiled,
        "WIDE": layout.wide,
    }
    return args, number_blocks(layout, rows, tiled)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "nll_loss",
        ("nll_loss_forward", "nll_loss_forward.output"),
        compute=nll_loss_forward,
        reference=reference.nll_loss,
    ),
    OpSpec(
        "nll_loss2d",
        ("nll_loss2d_forward", "nll_loss2d_forward.output"),
        compute=nll_loss2d_forward,
        reference=reference.nll_loss,
    ),
    OpSpec(
        "nll_loss_backward",
        ("nll_loss_backward", "nll_loss_backward.grad_input"),
        compute=nll_loss_backward,
    ),
    OpSpec(
        "nll_loss2d_backward",
        ("nll_loss2d_backward", "nll_loss2d_backward.grad_input"),
        compute=nll_loss2d_backward,
    ),
)

__all__ = ["SPECS"]
