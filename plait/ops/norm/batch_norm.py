"""Batch norm forward under its several names: statistics of channels, normalised input, running
statistics moved. What lies in memory as ATen's does, version by version, is in `result_strides`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import batch_norm_kernels as kernels
from plait.ops.norm.batch_norm_layout import blocks_for, channels_of
from plait.ops.norm.layer_norm import checked_dtypes
from plait.ops.norm.layer_norm_backward import launch
from plait.ops.norm.layer_norm_forward import (
    accumulator,
    accumulator_dtype,
    eps_arguments,
    stats_of,
)
from plait.ops.norm.layer_norm_layout import step_of


@dataclass(frozen=True)
class BatchNorm:
    """Operands of a forward pass; running statistics are both there or both None."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    training: bool
    momentum: float
    eps: float


def check(call: Call, x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Decline what ATen refuses; whether fp32 parameters stand beside a 16-bit input."""
    mixed = checked_dtypes(call, x, *parameters)
    if x.dim() < 2 or x.numel() == 0:
        call.decline("an input without elements or channels")
    if any(each is not None and tuple(each.shape) != (x.shape[1],) for each in parameters):
        call.decline("parameters of another shape")
    return mixed


def result_strides(call: Call, x: torch.Tensor) -> Sequence[int]:
    """Strides of y: the CPU makes it contiguous in the format of x, CUDA preserves those of x."""
    if call.interpreted:
        memory_format = suggest_memory_format(x)
        return torch.empty(x.shape, device="meta", memory_format=memory_format).stride()
    return torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()


def batch_norm(call: Call, given: BatchNorm) -> None:
    """y, and mean and 1 / deviation as the device's kernel of ATen saves them."""
    x = given.x
    running = (given.running_mean, given.running_var)
    mixed = check(call, x, given.weight, given.bias, *running)
    if (running[0] is None) != (running[1] is None):
        call.decline("one running statistic without the other")
    if not given.training and running[0] is None:
        call.decline("evaluation without running statistics")
    y = call.result(x.shape, x.dtype, result_strides(call, x))
    dtype = accumulator_dtype(x.dtype)
    if call.interpreted and not mixed:
        dtype = x.dtype
    shape = (x.shape[1],) if given.training or not call.interpreted else (0,)
    saved = (stats_of(call, shape, dtype), stats_of(call, shape, dtype))
    normalize_channels(call, given, y, saved if shape[0] else None)


def normalize_channels(
    call: Call,
    given: BatchNorm,
    y: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Record the launches."""
    x = given.x
    found = channels_of(call, x.shape, (x.stride(), y.stride()))
    blocks = blocks_for(call, found, x.dtype)
    momentum = eps_arguments(given.momentum)
    args: dict[str, Any] = {
        "x_ptr": x, "y_ptr": y, "weight_ptr": given.weight, "bias_ptr": given.bias,
        "mean_ptr": given.running_mean, "var_ptr": given.running_var,
        "saved_mean_ptr": saved[0] if saved else None,
        "saved_rstd_ptr": saved[1] if saved else None,
        **eps_arguments(given.eps),
        "momentum": momentum["eps"], "momentum_low": momentum["eps_low"],
        **found.sizes(), **found.places("x", 0), **found.places("y", 1), **blocks.constants(),
        "weight_step": step_of(given.weight), "bias_step": step_of(given.bias),
        "mean_step": step_of(given.running_mean), "var_step": step_of(given.running_var),
        **found.constants(),
        "TRAIN": given.training, "WHOLE": blocks.whole and given.training,
        "SAVE": saved is not None, "UPDATE": given.training and given.running_mean is not None,
        "WEIGHT": given.weight is not None, "BIAS": given.bias is not None,
        "ACC": accumulator(x.dtype), "partial_ptr": None,
    }  # fmt: skip
    if given.training and not blocks.whole:
        shape = (3, blocks.num_parts, found.num_channels)
        args["partial_ptr"] = call.empty(shape, accumulator_dtype(x.dtype))
        grid = blocks.grid_channels * blocks.num_parts
        launch(call, kernels.batch_moments_kernel, grid, args, blocks.num_warps)
    num_blocks = spread(call, blocks)
    grid = blocks.grid_channels * num_blocks
    launch(call, kernels.batch_norm_kernel, grid, args, blocks.num_warps, num_blocks=num_blocks)


def spread(call: Call, blocks: Any) -> int:
    """Blocks that share the tiles of a block of channels, some waves of them."""
    wanted = call.info.num_sms * max(64 // blocks.num_warps, 1) * 2 // blocks.grid_channels
    return max(min(blocks.num_tiles, wanted), 1)


def native_batch_norm(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """`native_batch_norm` and `_native_batch_norm_legit`."""
    given = BatchNorm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )  # fmt: skip
    batch_norm(call, given)


def batch_norm_with_update(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> None:
    """`_batch_norm_with_update`, with an empty reserve."""
    if not call.interpreted:
        call.decline("a reserve that cuDNN's backward may ask for")
    batch_norm(call, BatchNorm(input, weight, bias, running_mean, running_var, True, momentum, eps))
    call.result((0,), torch.uint8)


def cudnn_batch_norm(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> None:
    """`cudnn_batch_norm`, evaluation: of training cuDNN's backward may ask for a reserve."""
    if training:
        call.decline("a reserve that cuDNN's backward may ask for")
    check(call, input, weight, bias, running_mean, running_var)
    if running_mean is None or running_var is None or bias is None:
        call.decline("evaluation without running statistics or bias")
    if not _cudnn_format(input):
        call.decline("an input that is not contiguous")
    y = call.result(input.shape, input.dtype, result_strides(call, input))
    call.result((0,), weight.dtype)
    call.result((0,), weight.dtype)
    call.result((0,), torch.uint8)
    given = BatchNorm(input, weight, bias, running_mean, running_var, False, 0.0, epsilon)
    normalize_channels(call, given, y, None)


def _cudnn_format(x: torch.Tensor) -> bool:
    """Whether x has exactly the strides that it would be allocated with."""
    formats = [torch.contiguous_format]
    if x.dim() in (4, 5):
        formats.append(torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return any(
        x.stride() == torch.empty(x.shape, device="meta", memory_format=each).stride()
        for each in formats
    )


def batch_norm_reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The meaning of `native_batch_norm`; running statistics are written."""
    dims = (0, *range(2, input.dim()))
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    if training or running_mean is None or running_var is None:
        var, mean = torch.var_mean(input, dims, correction=0)
        if running_mean is not None and running_var is not None:
            count = input.numel() // input.shape[1]
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), momentum)
    else:
        var, mean = running_var, running_mean
    rstd = (var + eps).rsqrt()
    y = (input - mean.view(shape)) * rstd.view(shape)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape), mean, rstd


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "batch_norm",
        (
            "native_batch_norm",
            "native_batch_norm.out",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit.out",
            "_native_batch_norm_legit.no_stats",
            "_native_batch_norm_legit.no_stats_out",
        ),
        compute=native_batch_norm,
        reference=batch_norm_reference,
    ),
    OpSpec(
        "batch_norm_with_update",
        ("_batch_norm_with_update", "_batch_norm_with_update.out"),
        compute=batch_norm_with_update,
    ),
    OpSpec(
        "cudnn_batch_norm",
        ("cudnn_batch_norm", "cudnn_batch_norm.out"),
        compute=cudnn_batch_norm,
    ),
)

__all__ = ["SPECS", "batch_norm", "check", "native_batch_norm", "result_strides", "spread"]
