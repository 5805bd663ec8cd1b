"""`native_group_norm` and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import group_norm_kernels as kernels
from plait.ops.norm.layer_norm import checked_dtypes
from plait.ops.norm.layer_norm_backward import launch, sum_partials
from plait.ops.norm.layer_norm_forward import (
    Affine,
    Stats,
    accumulator,
    accumulator_dtype,
    layout_of,
    normalize_rows,
    stats_of,
)
from plait.ops.norm.layer_norm_layout import Matrix, step_of
from plait.ops.norm.rows import next_power_of_2

_LONGEST_GROUP = 8192  # elements of a group whose x and dy are kept in registers
_PART = 16384  # elements of a channel row that are worth a block of their own
_TILE, _INTERPRETED_TILE = 4096, 1 << 16


def result_strides(call: Call, x: torch.Tensor) -> Sequence[int]:
    """Strides of a result like `x`; declines what ATen refuses or serves differently by version."""
    if not call.interpreted:
        contiguous = torch.empty(x.shape, device="meta").stride()
        if x.stride() != contiguous:
            call.decline("an input that is not contiguous")
        return contiguous
    memory_format = suggest_memory_format(x)
    if not x.is_contiguous(memory_format=memory_format):
        call.decline("an input that is not contiguous")
    return torch.empty(x.shape, device="meta", memory_format=memory_format).stride()


def _check(
    call: Call, x: torch.Tensor, parameters: Sequence[Any], n: int, c: int, hxw: int, group: int
) -> bool:
    """Decline what ATen refuses; whether fp32 parameters stand beside a 16-bit input."""
    mixed = checked_dtypes(call, x, *parameters)
    if mixed and not call.interpreted:
        call.decline("parameters of another dtype")
    if x.dim() < 2 or tuple(x.shape[:2]) != (n, c) or x.numel() != n * c * hxw:
        call.decline("sizes that are not the input's")
    if c <= 0 or hxw <= 0 or group <= 0 or c % group:
        call.decline("channels that do not make groups")
    if any(each is not None and tuple(each.shape) != (c,) for each in parameters):
        call.decline("a weight or bias of another shape")
    return mixed


def group_norm(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> None:
    """y = (x - mean) / sqrt(var + eps) * weight + bias with statistics of groups of channels."""
    mixed = _check(call, input, (weight, bias), N, C, HxW, group)
    y = call.result(input.shape, input.dtype, result_strides(call, input))
    dtype = torch.float32 if mixed else input.dtype
    mean, rstd = stats_of(call, (N, group), dtype), stats_of(call, (N, group), dtype)
    channels = C // group
    shape = (N, group, channels, *input.shape[2:])
    x_strides, y_strides = (
        (each.stride(0), each.stride(1) * channels, *each.stride()[1:]) for each in (input, y)
    )
    affine = Affine(weight, bias, group, channels, HxW)
    views = (shape, x_strides, y_strides)
    normalize_rows(call, input, y, len(shape) - 2, affine, Stats(mean, rstd), eps, views)


def group_norm_backward(
    call: Call,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> None:
    """Gradients of x, weight and bias, those that `output_mask` asks for."""
    mixed = _check(call, input, (weight,), N, C, HxW, group)
    if grad_out.dtype != input.dtype or grad_out.shape != input.shape:
        call.decline("a gradient of another shape or dtype")
    for each in (mean, rstd):
        if each.dtype != (torch.float32 if mixed else input.dtype) or not each.is_contiguous():
            call.decline("saved statistics of another kind")
        if each.numel() != N * group:
            call.decline("saved statistics of another shape")
    needs_x, needs_weight, needs_bias = output_mask
    if weight is None and (needs_weight or needs_bias):
        call.decline("a gradient of a parameter that is not there")
    strides = result_strides(call, input)
    dx = call.result(input.shape, input.dtype, strides) if needs_x else call.no_result()
    grads: list[torch.Tensor | None] = []
    for needed in (needs_weight, needs_bias):
        if needed and weight is not None:
            grads.append(call.result((C,), weight.dtype))
        else:
            grads.append(call.no_result())
    places = [each.stride() for each in (grad_out, input, input if dx is None else dx)]
    found = layout_of(call, input.shape, input.dim() - 2, *places)
    args = {
        "dy_ptr": grad_out, "x_ptr": input, "mean_ptr": mean, "rstd_ptr": rstd,
        "weight_ptr": weight, "dx_ptr": dx, "dweight_ptr": grads[0], "dbias_ptr": grads[1],
        "weight_step": step_of(weight), "dweight_step": step_of(grads[0]),
        "dbias_step": step_of(grads[1]), "channels": C // group, "num_channels": C,
        "num_groups": N * group, "WEIGHT": weight is not None, "DX": dx is not None,
        "SUMS": needs_weight or needs_bias, "DWEIGHT": needs_weight, "DBIAS": needs_bias,
        "ACC": accumulator(input.dtype), **found.sizes(), **found.constants(),
    }  # fmt: skip
    for index, name in enumerate(("dy", "x", "dx")):
        args |= found.places(name, index)
    _gradients(call, input, found, args)


def _gradients(call: Call, x: torch.Tensor, found: Matrix, args: dict[str, Any]) -> None:
    samples, channels = found.num_rows // args["num_channels"], args["channels"]
    if not args["DX"] and not args["SUMS"]:
        return
    sums = None
    whole = next_power_of_2(channels) * next_power_of_2(found.size)
    fits = whole * (2 if x.dtype == torch.float64 else 1) <= _LONGEST_GROUP
    if samples and (args["SUMS"] or not fits):
        sums = call.empty((2, found.num_rows), accumulator_dtype(x.dtype))
    args["sums_ptr"] = sums
    if samples and fits:
        _whole_groups(call, found, args, whole)
    elif samples:
        _channel_rows(call, found, args)
    if args["SUMS"]:
        sum_partials(call, args["num_channels"], args, samples, x.dtype, sums)


def _whole_groups(call: Call, found: Matrix, args: dict[str, Any], whole: int) -> None:
    num_groups = args["num_groups"]
    tile = _INTERPRETED_TILE if call.interpreted else 2048
    groups = max(tile // whole, 1)
    if not call.interpreted:
        groups = min(groups, max(next_power_of_2(num_groups // 256), 1))
    groups = min(groups, next_power_of_2(num_groups))
    more = {"GROUPS": groups, "CHANNELS": next_power_of_2(args["channels"])}
    more["BLOCK"] = next_power_of_2(found.size)
    warps = min(max(groups * whole // 512, 1), 16)
    grid = -(-num_groups // groups)
    launch(call, kernels.groups_backward_kernel, grid, args, warps, **more)


def _channel_rows(call: Call, found: Matrix, args: dict[str, Any]) -> None:
    tile = _INTERPRETED_TILE if call.interpreted else _TILE
    block = min(next_power_of_2(found.size), tile)
    rows = min(max(tile // block, 1), next_power_of_2(found.num_rows))
    grid = -(-found.num_rows // rows)
    launch(call, kernels.channel_sums_kernel, grid, args, 8, ROWS=rows, BLOCK=block)
    if not args["DX"]:
        return
    num_parts = -(-found.size // _PART)
    more = {"num_parts": num_parts, "part_size": _PART, "BLOCK": block}
    more["CHANNELS"] = next_power_of_2(args["channels"])
    grid = found.num_rows * num_parts
    launch(call, kernels.channel_gradient_kernel, grid, args, max(block // 512, 1), **more)


def group_norm_reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The meaning of `native_group_norm`."""
    x = input.reshape(N, group, -1)
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    y = ((x - mean) * rstd).reshape(N, C, -1)
    y = y if weight is None else y * weight[:, None]
    y = y if bias is None else y + bias[:, None]
    return y.reshape(input.shape), mean[..., 0], rstd[..., 0]


def group_norm_backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The meaning of `native_group_norm_backward`."""
    dy = grad_out.reshape(N, C, HxW)
    normed = (input.reshape(N, group, -1) - mean[..., None]) * rstd[..., None]
    g = (dy if weight is None else dy * weight[:, None]).reshape(N, group, -1)
    dx = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
    dweight = (dy * normed.reshape(N, C, HxW)).sum((0, 2))
    grads = ((dx * rstd[..., None]).reshape(input.shape), dweight, dy.sum((0, 2)))
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "group_norm",
        ("native_group_norm", "native_group_norm.out"),
        compute=group_norm,
        reference=group_norm_reference,
    ),
    OpSpec(
        "group_norm_backward",
        ("native_group_norm_backward", "native_group_norm_backward.out"),
        compute=group_norm_backward,
        reference=group_norm_backward_reference,
    ),
)

__all__ = ["SPECS", "group_norm", "group_norm_backward"]
