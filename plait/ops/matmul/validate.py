"""The arguments of `plait.matmul`, checked before anything runs, as a `Product`.

Shapes: x [..., K] and weight [N, K], or x [B, M, K] and weight [B, N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.checks import (
    check_dtype_in,
    check_min_ndim,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
)
from plait.errors import ArgumentError, DtypeError, ShapeError, StrideError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.product import FLOAT_DTYPES, QUANTIZED_DTYPES, Product
from plait.ops.matmul.reference import GATES
from plait.ops.matmul.scales import check_scales

_FLOAT_RESULTS = (*FLOAT_DTYPES, torch.float64)
_DTYPES = (*_FLOAT_RESULTS, *QUANTIZED_DTYPES)


def as_list(value: Any, length: int, argument: str, is_list: bool) -> list[torch.Tensor]:
    """`value` as a list of `length` tensors, or [] for None."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor) and not is_list:
        return [value]
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence) or not is_list:
        expected = f"a list of {length} tensors, like weight" if is_list else "a tensor"
        raise ArgumentError(argument, expected, type(value).__name__, f"Pass {expected}.")
    if len(value) != length:
        raise ArgumentError(
            argument, f"{length} tensors, one for each weight", len(value), "Pass one for each."
        )
    return list(value)


def check_product(
    x: Any,
    weights: list[Any],
    biases: list[Any],
    *,
    activation: str,
    x_scale: Any,
    weight_scales: list[Any],
    out: Any,
    out_dtype: torch.dtype | None,
    accumulate: bool,
    fast_accum: bool,
    config: Any,
    marks: Sequence[str],
) -> Product:
    """The one product of these arguments; raises what `plait.matmul` documents.

    `marks` follow the names of weights, biases and their scales in messages: "" or "[1]".
    """
    _check_operands(x, weights, activation, marks)
    scalings = check_scales(x, weights, x_scale, weight_scales, marks)
    out_dtype = _result_dtype(x, bool(scalings), out, out_dtype)
    _check_combination(x, activation, accumulate, fast_accum, out_dtype, out)
    if config is not None and not isinstance(config, Config):
        remedy = "Pass a plait.ops.matmul.configs.Config, or None to have it chosen."
        raise ArgumentError("config", "a Config or None", type(config).__name__, remedy)
    shape = (*x.shape[:-1], weights[0].shape[-2])
    matrix = _check_biases(biases, x, weights, activation, out_dtype, shape, marks)
    product = Product(
        x=x,
        weights=tuple(weights),
        biases=() if matrix else tuple(biases),
        activation=activation,
        out_dtype=out_dtype,
        out=out,
        addend=biases[0] if matrix else None,
        scalings=scalings,
        accumulate=accumulate,
        fast_accum=fast_accum,
        config=config,
    )
    if out is not None:
        _check_out(product, out)
    _check_gradients(product, marks)
    return product


def _check_operands(x: Any, weights: list[Any], activation: str, marks: Sequence[str]) -> None:
    check_tensor("x", x)
    check_dtype_in("x", x.dtype, _DTYPES)
    check_min_ndim("x", x, 1, "[..., K]")
    if activation in GATES and len(weights) != 2:
        raise ArgumentError(
            "weight",
            f"two weights (gate, up) for {activation!r}",
            len(weights),
            "Pass weight=[gate, up], both [N, K].",
        )
    if not weights:
        raise ArgumentError("weight", "one weight or more", "an empty list", "Pass [N, K] tensors.")
    for i, weight in enumerate(weights):
        name = f"weight{marks[i]}"
        check_tensor(name, weight)
        _check_weight_dtype(name, weight, x)
        check_same_device(name, weight, "x", x)
        num_n = weights[0].shape[-2] if activation in GATES and i else "N"
        shape: tuple[int | str, ...] = (num_n, x.shape[-1])
        if weight.dim() == 3 and activation not in GATES:
            if x.dim() != 3:
                raise ShapeError(
                    "x",
                    "shape [B, M, K] (weight is [B, N, K])",
                    list(x.shape),
                    "Pass a 3-D x, or a 2-D weight that serves all rows.",
                )
            shape = (x.shape[0], *shape)
        remedy = "Weights are [N, K], as in nn.Linear, or [B, N, K] with x [B, M, K]."
        check_shape(name, weight, shape, "B and K of x" if len(shape) == 3 else "K of x", remedy)


def _check_weight_dtype(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    if x.dtype in FP8_DTYPES:
        check_dtype_in(name, weight.dtype, FP8_DTYPES)
    else:
        check_same_dtype(name, weight, "x", x)


def _result_dtype(
    x: torch.Tensor, scaled: bool, out: Any, out_dtype: torch.dtype | None
) -> torch.dtype:
    if out is not None:
        check_tensor("out", out)
    if out_dtype is None and out is not None:
        out_dtype, name = out.dtype, "out"
    else:
        name = "out_dtype"
    if x.dtype is torch.int8 and not scaled:
        allowed: tuple[torch.dtype, ...] = (torch.int32,)
        default = torch.int32
        if out_dtype not in (None, torch.int32):
            remedy = "Pass x_scale and weight_scale for a scaled result, or leave it out."
            raise DtypeError(name, "torch.int32 (int8 without scales)", out_dtype, remedy)
    elif x.dtype in QUANTIZED_DTYPES:
        allowed, default = FLOAT_DTYPES, torch.bfloat16
    else:
        allowed, default = _FLOAT_RESULTS, x.dtype
    out_dtype = out_dtype or default
    check_dtype_in(name, out_dtype, allowed)
    return out_dtype


def _check_combination(
    x: torch.Tensor,
    activation: str,
    accumulate: bool,
    fast_accum: bool,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> None:
    if out_dtype is torch.int32 and activation != "none":
        remedy = "Pass x_scale and weight_scale, or activation=None."
        raise ArgumentError("activation", "None for an int32 result", repr(activation), remedy)
    if accumulate and out is None:
        remedy = "Pass the tensor to add to as out=."
        raise ArgumentError("accumulate", "False without out", accumulate, remedy)
    if accumulate and activation != "none":
        remedy = "Pass activation=None, or add the result yourself."
        raise ArgumentError("activation", "None with accumulate=True", repr(activation), remedy)
    if fast_accum and x.dtype not in FP8_DTYPES:
        remedy = "Leave fast_accum out; only fp8 has a short accumulator."
        raise ArgumentError("fast_accum", f"False for {x.dtype}", fast_accum, remedy)


def _check_biases(
    biases: list[Any],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    activation: str,
    out_dtype: torch.dtype,
    shape: tuple[int, ...],
    marks: Sequence[str],
) -> bool:
    """Whether the bias is a matrix."""
    matrix = False
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):  # none, or all
        name = f"bias{marks[i]}"
        check_tensor(name, bias)
        if out_dtype is torch.int32:
            remedy = "Pass x_scale and weight_scale, or add it to the result."
            raise ArgumentError(name, "None for an int32 result", bias.dtype, remedy)
        first = torch.float32 if x.dtype in QUANTIZED_DTYPES else x.dtype
        check_dtype_in(name, bias.dtype, tuple(dict.fromkeys((first, out_dtype))))
        check_same_device(name, bias, "x", x)
        vector = (weight.shape[-2],)
        if activation in GATES:
            check_shape(name, bias, vector, "N of weight", "Pass one number per row of weight.")
        elif bias.shape != vector:
            matrices = (shape, shape[1:]) if weight.dim() == 3 else (shape,)
            matrix = bias.dim() > 1 and bias.shape in matrices
            if not matrix:
                raise ShapeError(
                    name,
                    f"shape {list(vector)} (N of weight) or {list(shape)} (the result)",
                    list(bias.shape),
                    "Pass one number per row of weight, or one per element of the result.",
                )
    return matrix


def _check_out(product: Product, out: torch.Tensor) -> None:
    check_dtype_in("out", out.dtype, (product.out_dtype,))
    check_same_device("out", out, "x", product.x)
    meaning = "x.shape[:-1] and N of weight"
    check_shape("out", out, product.shape, meaning, "Pass a tensor of this shape.")
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        raise StrideError(
            "out",
            "one place in memory for each element",
            f"strides {list(out.stride())}",
            "Pass out.contiguous() or another tensor that is not expanded.",
        )
    if torch.is_grad_enabled() and any(each.requires_grad for each in (out, *product.inputs)):
        raise ArgumentError(
            "out",
            "no gradients to compute",
            "an input or out that requires grad",
            "Leave out=None, or call inside torch.no_grad().",
        )


def _check_gradients(product: Product, marks: Sequence[str]) -> None:
    if not product.quantized or not torch.is_grad_enabled():
        return
    names = ["x", *(f"weight{mark}" for mark in marks)]
    names += ["bias, x_scale or weight_scale"] * (len(product.inputs) - len(names))
    for name, tensor in zip(names, product.inputs, strict=True):
        if tensor.requires_grad:
            raise ArgumentError(
                name,
                f"no gradient for {product.x.dtype} operands",
                "requires_grad=True",
                "Detach it, or call inside torch.no_grad().",
            )


__all__ = ["as_list", "check_product"]
