"""`_fused_rms_norm` and its backward, which CUDA's `rms_norm` reaches; the CPU composes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm.layer_norm import check_backward, check_shape, checked_dtypes
from plait.ops.norm.layer_norm_backward import RowGradients, row_gradients
from plait.ops.norm.layer_norm_forward import (
    Affine,
    Stats,
    accumulator_dtype,
    normalize_rows,
    stats_of,
)


def rms_norm(
    call: Call,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> None:
    """y = x / sqrt(mean(x * x) + eps) * weight over the last dims; y and 1 / root."""
    if checked_dtypes(call, input, weight):
        call.decline("parameters of another dtype")
    check_shape(call, input, normalized_shape, weight)
    count = len(normalized_shape)
    dtype = accumulator_dtype(input.dtype)
    stat_shape = (*input.shape[: input.dim() - count], *(1 for _ in normalized_shape))
    y = call.result(input.shape, input.dtype)
    rstd = stats_of(call, stat_shape, dtype)
    least = torch.finfo(dtype).eps if eps is None else eps
    normalize_rows(call, input, y, count, Affine(weight, None), Stats(None, rstd), least)


def rms_norm_backward(
    call: Call,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> None:
    """Gradients of x and weight, those that `output_mask` asks for."""
    saved = accumulator_dtype(input.dtype)
    check_backward(call, grad_out, input, None, rstd, weight, None, saved)
    check_shape(call, input, normalized_shape, weight)
    needs_x, needs_weight = output_mask
    if needs_weight and weight is None:
        call.decline("a gradient of a parameter that is not there")
    dx = call.result(input.shape, input.dtype) if needs_x else call.no_result()
    dweight = None
    if needs_weight and weight is not None:
        dweight = call.result(weight.shape, weight.dtype)
    else:
        call.no_result()
    given = RowGradients(grad_out, input, None, rstd, weight, dx, dweight, None)
    row_gradients(call, given, len(normalized_shape))


def rms_norm_reference(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of `_fused_rms_norm`."""
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(accumulator_dtype(input.dtype)).eps if eps is None else eps
    rstd = (input.square().mean(dims, keepdim=True) + least).rsqrt()
    y = input * rstd
    return y if weight is None else y * weight, rstd


def rms_norm_backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The meaning of `_fused_rms_norm_backward`."""
    dims = tuple(range(-len(normalized_shape), 0))
    outer = tuple(range(input.dim() - len(normalized_shape)))
    normed = input * rstd
    g = grad_out if weight is None else grad_out * weight
    dx = (g - normed * (g * normed).mean(dims, keepdim=True)) * rstd
    dweight = (grad_out * normed).sum(outer) if outer else grad_out * normed
    grads = (dx, dweight)
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


SPECS: tuple[OpSpec, ...] = (
    OpSpec("rms_norm", ("_fused_rms_norm",), compute=rms_norm, reference=rms_norm_reference),
    OpSpec(
        "rms_norm_backward",
        ("_fused_rms_norm_backward",),
        compute=rms_norm_backward,
        reference=rms_norm_backward_reference,
    ),
)

__all__ = ["SPECS", "rms_norm", "rms_norm_backward"]
