"""Batch norm backward under its several names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import batch_norm_backward_kernels as kernels
from plait.ops.norm.batch_norm import check, spread
from plait.ops.norm.batch_norm_layout import blocks_for, channels_of
from plait.ops.norm.layer_norm_backward import launch
from plait.ops.norm.layer_norm_forward import accumulator, accumulator_dtype, eps_arguments
from plait.ops.norm.layer_norm_layout import step_of


@dataclass(frozen=True)
class Gradients:
    """Operands and results; `running`: `rstd` holds variances, and statistics are constants."""

    dy: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor | None
    mean: torch.Tensor
    rstd: torch.Tensor
    running: bool
    train: bool
    eps: float
    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


def native_batch_norm_backward(
    call: Call,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> None:
    """Gradients of x, weight and bias, those that `output_mask` asks for."""
    mixed = check(call, input, weight, running_mean, running_var)
    if grad_out.dtype != input.dtype or grad_out.shape != input.shape:
        call.decline("a gradient of another shape or dtype")
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, running_var)
    if mean is None or rstd is None or mean.shape != rstd.shape:
        call.decline("statistics that are not there")
    if tuple(mean.shape) != (input.shape[1],) or mean.dtype != rstd.dtype:
        call.decline("statistics of another shape or dtype")
    if mean.dtype not in (input.dtype, accumulator_dtype(input.dtype)):
        call.decline("statistics of another dtype")
    needs_x, needs_weight, needs_bias = output_mask
    if weight is None and (needs_weight or needs_bias) and not call.interpreted:
        call.decline("a gradient of a parameter that is not there")
    dtype = torch.float32 if mixed or mean.dtype == torch.float32 else input.dtype
    dtype = dtype if weight is None else weight.dtype
    strides = _result_strides(call, input, train) if needs_x else ()
    dx = call.result(input.shape, input.dtype, strides) if needs_x else call.no_result()
    grads = [
        call.result((input.shape[1],), dtype) if needed else call.no_result()
        for needed in (needs_weight, needs_bias)
    ]
    gradients(
        call,
        Gradients(grad_out, input, weight, mean, rstd, not train, train, eps, dx, *grads),
    )


def _result_strides(call: Call, x: torch.Tensor, train: bool) -> Sequence[int]:
    """Strides of dx; declines where CUDA's kernels of ATen differ among themselves."""
    memory_format = suggest_memory_format(x)
    strides = torch.empty(x.shape, device="meta", memory_format=memory_format).stride()
    if not call.interpreted:
        if x.stride() != strides:
            call.decline("an input that is not contiguous")
        if not train:
            return torch.empty(x.shape, device="meta").stride()
    return strides


def gradients(call: Call, given: Gradients) -> None:
    """Record the launches."""
    sums = given.dweight is not None or given.dbias is not None
    sums = sums or (given.train and given.dx is not None)
    if not sums and given.dx is None:
        return
    x = given.x
    places = [each.stride() for each in (x, given.dy, x if given.dx is None else given.dx)]
    found = channels_of(call, x.shape, places)
    blocks = blocks_for(call, found, x.dtype)
    args: dict[str, Any] = {
        "dy_ptr": given.dy, "x_ptr": x, "mean_ptr": given.mean, "rstd_ptr": given.rstd,
        "weight_ptr": given.weight, "dx_ptr": given.dx, "dweight_ptr": given.dweight,
        "dbias_ptr": given.dbias, "partial_ptr": None, **eps_arguments(given.eps),
        **found.sizes(), **found.places("x", 0), **found.places("dy", 1), **found.places("dx", 2),
        **blocks.constants(), "mean_step": step_of(given.mean), "rstd_step": step_of(given.rstd),
        "weight_step": step_of(given.weight), "dweight_step": step_of(given.dweight),
        "dbias_step": step_of(given.dbias),
        **found.constants(),
        "RUNNING": given.running, "WHOLE": blocks.whole, "TRAIN": given.train, "SUMS": sums,
        "WEIGHT": given.weight is not None, "DX": given.dx is not None,
        "DWEIGHT": given.dweight is not None, "DBIAS": given.dbias is not None,
        "ACC": accumulator(x.dtype),
    }  # fmt: skip
    if sums and not blocks.whole:
        shape = (2, blocks.num_parts, found.num_channels)
        args["partial_ptr"] = call.empty(shape, accumulator_dtype(x.dtype))
        grid = blocks.grid_channels * blocks.num_parts
        launch(call, kernels.batch_gradient_sums_kernel, grid, args, blocks.num_warps)
    num_blocks = spread(call, blocks) if given.dx is not None else 1
    grid = blocks.grid_channels * num_blocks
    launch(call, kernels.batch_gradient_kernel, grid, args, blocks.num_warps, num_blocks=num_blocks)


def batch_norm_backward(
    call: Call,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_var: torch.Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: torch.Tensor,
) -> None:
    """`batch_norm_backward`, where ATen itself does not hand over to cuDNN."""
    if not call.interpreted:
        call.decline("a backward pass that cuDNN may take")
    native_batch_norm_backward(
        call, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps,
        output_mask,
    )  # fmt: skip


def cudnn_batch_norm_backward(
    call: Call,
    input: torch.Tensor,
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_var: torch.Tensor | None,
    epsilon: float,
    reserveSpace: torch.Tensor,
) -> None:
    """`cudnn_batch_norm_backward`, from mean and 1 / deviation that cuDNN has saved."""
    if save_mean is None or save_var is None or save_mean.dtype != weight.dtype:
        call.decline("statistics of another dtype")
    native_batch_norm_backward(
        call, grad_output, input, weight, None, None, save_mean, save_var, True, epsilon,
        (True, True, True),
    )  # fmt: skip


def batch_norm_backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The meaning of `native_batch_norm_backward`."""
    dims = (0, *range(2, input.dim()))
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    mean, rstd = save_mean, save_invstd
    if not train and running_mean is not None and running_var is not None:
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    assert mean is not None, "statistics are there"
    assert rstd is not None, "statistics are there"
    normed = (input - mean.view(shape)) * rstd.view(shape)
    dweight, dbias = (grad_out * normed).sum(dims), grad_out.sum(dims)
    dx = grad_out
    if train:
        count = input.numel() // input.shape[1]
        dx = dx - dbias.view(shape) / count - normed * dweight.view(shape) / count
    dx = dx * (rstd if weight is None else rstd * weight).view(shape)
    grads = (dx, dweight, dbias)
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "batch_norm_backward",
        ("native_batch_norm_backward", "native_batch_norm_backward.out"),
        compute=native_batch_norm_backward,
        reference=batch_norm_backward_reference,
    ),
    OpSpec(
        "batch_norm_backward_with_reserve", ("batch_norm_backward",), compute=batch_norm_backward
    ),
    OpSpec(
        "cudnn_batch_norm_backward",
        ("cudnn_batch_norm_backward", "cudnn_batch_norm_backward.out"),
        compute=cudnn_batch_norm_backward,
    ),
)

__all__ = ["SPECS", "native_batch_norm_backward"]
