"""`native_layer_norm` and its backward: checks, results as ATen's, launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm.layer_norm_backward import RowGradients, row_gradients
from plait.ops.norm.layer_norm_forward import (
    FLOATS,
    Affine,
    Stats,
    accumulator_dtype,
    normalize_rows,
    stats_of,
)


def checked_dtypes(call: Call, x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether the parameters are fp32 beside a 16-bit `x`; declines other mixtures."""
    if x.dtype not in FLOATS:
        call.decline("a dtype that is not a plain floating one")
    dtypes = {each.dtype for each in parameters if each is not None}
    if dtypes <= {x.dtype}:
        return False
    if dtypes != {torch.float32} or x.element_size() != 2:
        call.decline("parameters of another dtype")
    return True


def stats_dtype(call: Call, x: torch.Tensor, mixed: bool) -> torch.dtype:
    """Of saved statistics: the CPU keeps them as it keeps parameters, CUDA as it adds up."""
    if call.interpreted and not mixed:
        return x.dtype
    return accumulator_dtype(x.dtype)


def check_shape(
    call: Call, x: torch.Tensor, normalized: Sequence[int], *parameters: torch.Tensor | None
) -> None:
    """Decline what ATen refuses."""
    count = len(normalized)
    if count == 0 or tuple(x.shape[x.dim() - count :]) != tuple(normalized):
        call.decline("a shape that does not end in normalized_shape")
    for each in parameters:
        if each is not None and tuple(each.shape) != tuple(normalized):
            call.decline("a weight or bias of another shape")
    if 0 in normalized:
        call.decline("rows without elements")


def layer_norm(
    call: Call,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dims; y, mean, 1 / std."""
    mixed = checked_dtypes(call, input, weight, bias)
    if mixed and not call.interpreted:
        call.decline("parameters of another dtype")
    check_shape(call, input, normalized_shape, weight, bias)
    count = len(normalized_shape)
    dtype = stats_dtype(call, input, mixed)
    stat_shape = (*input.shape[: input.dim() - count], *(1 for _ in normalized_shape))
    y = call.result(input.shape, input.dtype)
    mean, rstd = stats_of(call, stat_shape, dtype), stats_of(call, stat_shape, dtype)
    normalize_rows(call, input, y, count, Affine(weight, bias), Stats(mean, rstd), eps)


def layer_norm_backward(
    call: Call,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> None:
    """Gradients of x, weight and bias, those that `output_mask` asks for."""
    check_backward(call, grad_out, input, mean, rstd, weight, bias)
    check_shape(call, input, normalized_shape, weight, bias)
    needs_x, needs_weight, needs_bias = output_mask
    if (needs_weight and weight is None) or (needs_bias and bias is None):
        call.decline("a gradient of a parameter that is not there")
    dx = call.result(input.shape, input.dtype) if needs_x else call.no_result()
    grads = []
    for needed, each in ((needs_weight, weight), (needs_bias, bias)):
        grads.append(
            call.result(each.shape, each.dtype) if needed and each is not None else call.no_result()
        )
    row_gradients(
        call,
        RowGradients(grad_out, input, mean, rstd, weight, dx, grads[0], grads[1]),
        len(normalized_shape),
    )


def check_backward(
    call: Call,
    grad_out: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    saved: torch.dtype | None = None,
) -> None:
    """Decline what no forward pass of ATen or plait leads to; `saved` is the dtype of statistics,
    by default that of layer norm."""
    mixed = checked_dtypes(call, x, weight, bias)
    if mixed and not call.interpreted:
        call.decline("parameters of another dtype")
    if grad_out.dtype != x.dtype or grad_out.shape != x.shape:
        call.decline("a gradient of another shape or dtype")
    mixed = weight is not None and weight.dtype != x.dtype
    for each in (mean, rstd):
        if each is None:
            continue
        if each.dtype != (saved or stats_dtype(call, x, mixed)) or not each.is_contiguous():
            call.decline("saved statistics of another kind")


def layer_norm_reference(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The meaning of `native_layer_norm`."""
    dims = tuple(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    y = (input - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


def layer_norm_backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The meaning of `native_layer_norm_backward`."""
    dims = tuple(range(-len(normalized_shape), 0))
    outer = tuple(range(input.dim() - len(normalized_shape)))
    normed = (input - mean) * rstd
    g = grad_out if weight is None else grad_out * weight
    dx = g - g.mean(dims, keepdim=True) - normed * (g * normed).mean(dims, keepdim=True)
    dweight = (grad_out * normed).sum(outer) if outer else grad_out * normed
    dbias = grad_out.sum(outer) if outer else grad_out
    grads = (dx * rstd, dweight, dbias)
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "layer_norm",
        ("native_layer_norm", "native_layer_norm.out"),
        compute=layer_norm,
        reference=layer_norm_reference,
    ),
    OpSpec(
        "layer_norm_backward",
        ("native_layer_norm_backward", "native_layer_norm_backward.out"),
        compute=layer_norm_backward,
        reference=layer_norm_backward_reference,
    ),
)

__all__ = [
    "SPECS",
    "check_backward",
    "check_shape",
    "checked_dtypes",
    "layer_norm",
    "layer_norm_backward",
    "stats_dtype",
]
