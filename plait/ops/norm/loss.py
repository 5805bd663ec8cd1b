"""Losses that compare two tensors element by element: one description each, and one way for all.

A loss is summed in fp32 and fp64 and rounded once; ATen rounds every element to the dtype first,
and its soft_margin_loss overflows where the loss itself is small. Sums are deterministic. A
probability outside [0, 1] gives NaN in binary_cross_entropy, where ATen raises on the CPU and stops
the kernel on a GPU: a kernel cannot raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ops.engine.call import Call
from plait.ops.engine.dims import Dim, next_power_of_2
from plait.ops.engine.strides import elementwise_strides
from plait.ops.norm.rows import RowLayout, layout_of
from plait.ops.norm.softmax import FLOATS

NONE, MEAN, SUM = 0, 1, 2  # ATen's `reduction`
_TILE = 2048
_INTERPRETED_TILE = 1 << 17
_MAX_PARTS = 1024


def loss(
    call: Call,
    kind: str,
    operands: Sequence[torch.Tensor | None],
    strides: tuple[int, ...],
    reduction: int,
    param: float = 0.0,
) -> None:
    """Launches for a loss of input, target, weight and positive weight, the last two may be None.

    `strides` are those of a new result that is not reduced.
    """
    from plait.ops.norm import loss_kernels as kernels

    shape = _shape(call, operands)
    x = _first(operands)
    if reduction == NONE:
        out = call.result(shape, x.dtype, strides)
        layout = _layout(call, shape, [*operands, out])
        tile = _INTERPRETED_TILE if call.interpreted else _TILE // 2
    else:
        out = call.result((), x.dtype)
        layout = _layout(call, shape, operands)
        tile = _INTERPRETED_TILE if call.interpreted else _TILE
    rows = min(next_power_of_2(layout.num_rows), tile)
    args = {
        **_arguments(layout, rows, operands, ("x", "t", "w", "p")),
        "KIND": getattr(kernels, kind).value,
        "PARAM": param,
        "HAS_P": operands[3] is not None,
    }
    blocks = number_blocks(layout, rows, args["TILED"])
    warps = num_warps(rows, x.element_size())
    if reduction == NONE:
        args |= {"out_ptr": out, **places_of(layout, "out", 4)}
        call.launch(kernels._loss_kernel, blocks, args, num_warps=warps)
        return
    count = layout.num_rows if reduction == MEAN else 1
    parts = min(blocks, call.info.num_sms * 4, _MAX_PARTS)
    args["blocks"] = blocks
    if parts <= 4:  # one launch costs less than reading that alone
        call.launch(
            kernels._loss_sum_kernel, 1, args | {"out_ptr": out, "count": count}, num_warps=warps
        )
        return
    part = call.empty((parts,), torch.float64)
    call.launch(
        kernels._loss_sum_kernel, parts, args | {"out_ptr": part, "count": 1}, num_warps=warps
    )
    args = {"part_ptr": part, "out_ptr": out, "num_parts": parts, "count": count}
    call.launch(kernels._sum_kernel, 1, args | {"BLOCK": next_power_of_2(parts)})


def loss_backward(
    call: Call,
    kind: str,
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor | None],
    strides: tuple[int, ...] | None,
    reduction: int,
    param: float = 0.0,
) -> None:
    """Launches for the gradient with respect to the input, of input, target and weight."""
    from plait.ops.norm import loss_kernels as kernels

    shape = _shape(call, (*operands, grad))
    x = _first(operands)
    if shape != x.shape:
        call.decline("an input that broadcasts in a backward pass")
    out = call.result(shape, x.dtype, strides)
    layout = _layout(call, shape, [*operands, grad, out])
    tile = _INTERPRETED_TILE if call.interpreted else _TILE // 2
    rows = min(next_power_of_2(layout.num_rows), tile)
    args = {
        **_arguments(layout, rows, (*operands, grad), ("x", "t", "w", "g")),
        "out_ptr": out,
        **places_of(layout, "out", 4),
        "KIND": getattr(kernels, kind).value,
        "PARAM": param,
        "count": layout.num_rows if reduction == MEAN else 1,
    }
    blocks = number_blocks(layout, rows, args["TILED"])
    warps = num_warps(rows, x.element_size())
    call.launch(kernels._loss_backward_kernel, blocks, args, num_warps=warps)


def new_strides(call: Call, *operands: torch.Tensor) -> tuple[int, ...]:
    """Strides of an elementwise result of operands whose shapes, if they fit, broadcast."""
    try:
        return elementwise_strides(operands)
    except RuntimeError:
        call.decline("shapes that do not broadcast")


def _first(operands: Sequence[torch.Tensor | None]) -> torch.Tensor:
    first = operands[0]
    assert first is not None
    return first


def _shape(call: Call, operands: Sequence[torch.Tensor | None]) -> torch.Size:
    """The common shape; declines what ATen's kernels refuse or would convert."""
    there = [each for each in operands if each is not None]
    if there[0].dtype not in FLOATS or any(each.dtype != there[0].dtype for each in there):
        call.decline("a loss of dtypes that differ or are not real floating ones")
    try:
        return torch.broadcast_shapes(*(each.shape for each in there))
    except RuntimeError:
        call.decline("shapes that do not broadcast")


def _layout(call: Call, shape: torch.Size, operands: Sequence[torch.Tensor | None]) -> RowLayout:
    strides = [_broadcast_strides(each, shape) for each in operands]
    dims = [Dim(size, tuple(each[dim] for each in strides)) for dim, size in enumerate(shape)]
    layout = layout_of(dims, (), len(operands))
    if layout is None:
        call.decline("elements that more than four strides number")
    return layout


def _broadcast_strides(tensor: torch.Tensor | None, shape: torch.Size) -> list[int]:
    if tensor is None:
        return [0] * len(shape)
    missing = len(shape) - tensor.dim()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [0] * missing + [0 if size == 1 else stride for size, stride in pairs]


def _arguments(
    layout: RowLayout,
    rows: int,
    operands: Sequence[torch.Tensor | None],
    names: Sequence[str],
) -> dict[str, object]:
    """Launch arguments of the layout and of the operands; an absent one is the first again."""
    args: dict[str, object] = {
        **layout.sizes(),
        "ROWS": rows,
        "NDIM": len(layout.dims),
        "TILED": len(layout.dims) > 1 and layout.dims[-1] >= rows,
        "WIDE": layout.wide,
        "HAS_W": operands[2] is not None,
    }
    for index, (name, each) in enumerate(zip(names, operands, strict=True)):
        args[f"{name}_ptr"] = operands[0] if each is None else each
        args |= places_of(layout, name, index)
    return args


def places_of(layout: RowLayout, name: str, index: int) -> dict[str, int]:
    """`layout.places` of rows whose elements a kernel does not go along."""
    places = layout.places(name, index)
    del places[f"{name}_step"]
    return places


def num_warps(rows: int, itemsize: int) -> int:
    """Two vectors of 16 bytes a thread."""
    return min(max(rows * itemsize // 1024, 1), 16)


def number_blocks(layout: RowLayout, rows: int, tiled: object) -> int:
    """Tiles of `rows` rows; those of a `tiled` layout stay within its last dim."""
    if tiled:
        last = layout.dims[-1]
        return layout.num_rows // last * -(-last // rows)
    return -(-layout.num_rows // rows)


__all__ = [
    "MEAN",
    "NONE",
    "SUM",
    "loss",
    "loss_backward",
    "new_strides",
    "number_blocks",
    "places_of",
]
