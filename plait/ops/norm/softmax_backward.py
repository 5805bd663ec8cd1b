"""Backward passes of softmax and log_softmax, from the saved result, along any dim.

Gradients are contiguous, as ATen's. fp32 accumulators, fp64 for fp64.
"""

from __future__ import annotations

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import softmax_reference as reference
from plait.ops.norm.rows import row_layout, row_tile
from plait.ops.norm.softmax import FLOATS, launch_rows, max_row, served_dim


def backward(
    call: Call,
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int,
    input_dtype: torch.dtype,
    log: bool,
) -> None:
    """Launches for the gradient with respect to the input, in `input_dtype`."""
    from plait.ops.norm import softmax_backward_kernels as kernels

    dim = served_dim(call, grad.shape, dim)
    if grad.shape != output.shape:
        call.decline("a gradient of another shape than the result")
    if grad.dtype not in FLOATS or output.dtype != grad.dtype:
        call.decline("softmax's gradient of a dtype that is not a real floating one")
    half_to_float = (grad.dtype, input_dtype) == (torch.float32, torch.float16)
    if input_dtype != grad.dtype and (not half_to_float or call.device.type == "cpu"):
        call.decline("half_to_float for another dtype than fp16 on a GPU")
    out = call.result(grad.shape, input_dtype)
    if not grad.numel():
        return
    layout = row_layout([output, grad, out], dim)
    if layout is None:
        call.decline("rows that more than four strides number")
    tile = row_tile(
        layout,
        out.element_size(),
        num_sms=call.info.num_sms,
        interpreted=call.interpreted,
        max_row=max_row(grad.dtype, 2),
        max_tile=8192,
    )
    args = {
        "g_ptr": grad,
        "y_ptr": output,
        "out_ptr": out,
        "LOG": log,
        "size": layout.size,
        **layout.sizes(),
        **layout.places("g", 1),
        **layout.places("y", 0),
        **layout.places("out", 2),
        **tile.constants(layout),
    }
    launch_rows(
        call,
        args,
        layout,
        tile,
        whole=kernels._softmax_backward_kernel,
        online=kernels._softmax_backward_online_kernel,
        chunk=kernels._softmax_backward_chunk_kernel,
        combine=kernels._softmax_backward_combine_kernel,
        not_in_chunk=("out_ptr", *layout.places("out", 2)),
        figures=1,
        accumulator=torch.float64 if grad.dtype == torch.float64 else torch.float32,
        itemsizes=(grad.element_size(), out.element_size()),
    )


def softmax_backward(
    call: Call,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> None:
    """(g - sum(g y)) y of the result y and its gradient g."""
    backward(call, grad_output, output, dim, input_dtype, log=False)


def log_softmax_backward(
    call: Call,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> None:
    """g - exp(y) sum(g) of the result y and its gradient g."""
    backward(call, grad_output, output, dim, input_dtype, log=True)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "softmax_backward",
        ("_softmax_backward_data", "_softmax_backward_data.out"),
        compute=softmax_backward,
        reference=reference.softmax_backward,
    ),
    OpSpec(
        "log_softmax_backward",
        ("_log_softmax_backward_data", "_log_softmax_backward_data.out"),
        compute=log_softmax_backward,
        reference=reference.log_softmax_backward,
    ),
)

__all__ = ["SPECS"]
