"""softmax, log_softmax and softmax that gives 0 for rows of -inf, along any dim.

Results are contiguous, as ATen's. fp32 accumulators, fp64 for fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import softmax_reference as reference
from plait.ops.norm.rows import (
    RowLayout,
    RowTile,
    next_power_of_2,
    row_chunks,
    row_layout,
    row_tile,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def served_dim(call: Call, shape: torch.Size, dim: int) -> int:
    """`dim` counted from the front; a wrong one is ATen's to refuse."""
    count = max(len(shape), 1)
    if not -count <= dim < count:
        call.decline("a dim that the tensor does not have")
    return dim % count


def max_row(dtype: torch.dtype, kept: int) -> int:
    """The longest row of which a block keeps `kept` tensors in registers."""
    return 32768 // next_power_of_2(kept) // (2 if dtype == torch.float64 else 1)


def forward(call: Call, x: torch.Tensor, dim: int, out_dtype: torch.dtype, kind: str) -> None:
    """Launches for one result; `kind` is SOFTMAX, LOG or SAFE (softmax_kernels.py)."""
    from plait.ops.norm import softmax_kernels as kernels

    dim = served_dim(call, x.shape, dim)
    if x.dtype not in FLOATS:
        call.decline("softmax of a dtype that is not a real floating one")
    out = call.result(x.shape, out_dtype)
    if not x.numel():
        return
    layout = row_layout([x, out], dim)
    if layout is None:
        call.decline("rows that more than four strides number")
    itemsize = min(x.element_size(), out.element_size())
    tile = row_tile(
        layout,
        itemsize,
        num_sms=call.info.num_sms,
        interpreted=call.interpreted,
        max_row=max_row(x.dtype, 1),
    )
    args = {
        "x_ptr": x,
        "out_ptr": out,
        "KIND": getattr(kernels, kind).value,
        "size": layout.size,
        **layout.sizes(),
        **layout.places("x", 0),
        **layout.places("out", 1),
        **tile.constants(layout),
    }
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    launch_rows(
        call,
        args,
        layout,
        tile,
        whole=kernels._softmax_kernel,
        online=kernels._softmax_online_kernel,
        chunk=kernels._softmax_chunk_kernel,
        combine=kernels._softmax_combine_kernel,
        not_in_chunk=("out_ptr", "KIND", *layout.places("out", 1)),
        figures=2,
        accumulator=accumulator,
        itemsizes=(x.element_size(), out.element_size()),
    )


def _vector(layout: RowLayout, tile: RowTile, itemsize: int) -> int:
    """Elements of 16 bytes, where rows lie one after the other at places that 16 bytes do not
    divide, or not as far as Triton can see; else 0."""
    one_place = len(set(layout.strides)) == 1 and set(layout.steps) == {1}
    if tile.rows > 1 or not one_place or all(each % 16 == 0 for each in layout.strides[0]):
        return 0
    return 16 // itemsize


def launch_rows(
    call: Call,
    args: dict[str, Any],
    layout: RowLayout,
    tile: RowTile,
    *,
    whole: Any,
    online: Any,
    chunk: Any,
    combine: Any,
    not_in_chunk: tuple[str, ...],
    figures: int,
    accumulator: torch.dtype,
    itemsizes: Sequence[int],
) -> None:
    """Launch what suits the rows: `whole` or `online`, or `chunk` and `combine`.

    `chunk` leaves `figures` numbers of every row and chunk, part[chunk, figure, row], and takes
    `args` without those named `not_in_chunk`. `itemsizes` are those of all tensors of the rows.
    """
    if tile.whole:
        call.launch(whole, tile.grid, args, num_warps=tile.num_warps)
        return
    args = {**args, "VEC": _vector(layout, tile, min(itemsizes))}
    chunks, length = row_chunks(
        layout, tile, num_sms=call.info.num_sms, interpreted=call.interpreted
    )
    if chunks == 1:
        call.launch(online, tile.grid, args, num_warps=tile.num_warps)
        return
    part = call.empty((chunks, figures, layout.num_rows), accumulator)
    args = {**args, "part_ptr": part, "chunk": length, "row_blocks": tile.grid}
    first = {name: value for name, value in args.items() if name not in not_in_chunk}
    call.launch(chunk, tile.grid * chunks, first, num_warps=tile.num_warps)
    second = {**args, "chunks": chunks, "CHUNKS": next_power_of_2(chunks)}
    call.launch(combine, tile.grid * chunks, second, num_warps=tile.num_warps)


def result_dtype(call: Call, x: torch.Tensor, half_to_float: bool) -> torch.dtype:
    """The result's dtype where ATen's kernels of this device accept `half_to_float`."""
    if not half_to_float:
        return x.dtype
    if call.device.type == "cpu" or x.dtype != torch.float16:
        call.decline("half_to_float for another dtype than fp16 on a GPU")
    return torch.float32


def softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> None:
    """exp(x - max) / sum(exp(x - max))."""
    forward(call, self, dim, result_dtype(call, self, half_to_float), "SOFTMAX")


def log_softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> None:
    """x - max - log(sum(exp(x - max)))."""
    forward(call, self, dim, result_dtype(call, self, half_to_float), "LOG")


def safe_softmax(
    call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> None:
    """softmax, and 0 for rows of -inf."""
    if dtype not in (None, self.dtype) and (self.dtype, dtype) != (torch.float16, torch.float32):
        call.decline("_safe_softmax of another dtype")  # it rounds before it begins
    forward(call, self, dim, dtype or self.dtype, "SAFE")


SPECS: tuple[OpSpec, ...] = (
    OpSpec("softmax", ("_softmax", "_softmax.out"), compute=softmax, reference=reference.softmax),
    OpSpec(
        "log_softmax",
        ("_log_softmax", "_log_softmax.out"),
        compute=log_softmax,
        reference=reference.log_softmax,
    ),
    OpSpec(
        "safe_softmax",
        ("_safe_softmax",),
        compute=safe_softmax,
        reference=reference.safe_softmax,
    ),
)

__all__ = ["FLOATS", "SPECS", "forward", "launch_rows", "max_row", "served_dim"]
