"""Checks that the overlapped GEMMs share; they run before any rank waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.checks import check_device, check_dtype_in, check_one_of, check_same_dtype, check_shape
from plait.errors import ArgumentError, ShapeError
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.product import QUANTIZED_DTYPES
from plait.ops.matmul.reference import ACTIVATIONS, GATES
from plait.symm.group import Group, check_belongs

IMPLS = ("auto", "fused", "unfused", "reference")
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_operands(
    group: Group,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    out_dtype: torch.dtype,
    impl: str,
) -> None:
    """Raise for operands that do not fit each other or the group."""
    check_one_of("impl", impl, IMPLS)
    check_one_of("activation", activation, (*ACTIVATIONS, *GATES))
    floats = _dtypes(impl)
    check_dtype_in("x", x.dtype, (*floats, *QUANTIZED_DTYPES))
    exact = (torch.int32,) if x.dtype is torch.int8 else ()
    check_dtype_in("out_dtype", out_dtype, (*floats, *exact))
    if out_dtype is torch.int32 and (biases or activation != "none"):
        what = "bias" if biases else "activation"
        remedy = "Pass x_scale and weight_scale for a scaled result, or leave it out."
        raise ArgumentError(what, "None for an int32 result", "one", remedy)
    if not weights:
        raise ArgumentError(
            "weight", "a tensor or a non-empty list of tensors", "no weight", "Pass at least one."
        )
    if activation in GATES and len(weights) != 2:
        raise ArgumentError(
            "weight",
            f"two weights (gate, up) for activation={activation!r}",
            f"{len(weights)}",
            "Pass [gate, up].",
        )
    if biases and len(biases) != len(weights):
        raise ArgumentError(
            "bias",
            f"one bias for each of {len(weights)} weights, or none",
            f"{len(biases)}",
            "Pass a list as long.",
        )
    for argument, tensors in (("x", [x]), ("weight", weights), ("bias", biases)):
        for tensor in tensors:
            check_device(argument, tensor, group.device, f"group {group.name!r}")
            _check_dtype(argument, tensor, x, out_dtype)
            check_belongs(argument, tensor, group)
    for weight in weights:
        if weight.dim() != 2:
            raise ShapeError(
                "weight", "two dims [N, K]", f"{list(weight.shape)}", "Pass weight as [N, K]."
            )
    if activation in GATES and weights[0].shape != weights[1].shape:
        raise ShapeError(
            "weight", f"the same shape as the gate's, {list(weights[0].shape)}",
            f"{list(weights[1].shape)}",
            "Gate and up multiply elementwise.",
        )  # fmt: skip
    for bias, weight in zip(biases, weights, strict=False):
        check_shape("bias", bias, (weight.shape[0],), "N of its weight", "Pass a vector.")


def _check_dtype(
    argument: str, tensor: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype
) -> None:
    """The dtype of x; a weight of fp8 may be any fp8, and a bias is then fp32 or as the result."""
    if argument == "bias" and x.dtype in QUANTIZED_DTYPES:
        check_dtype_in(argument, tensor.dtype, tuple(dict.fromkeys((torch.float32, out_dtype))))
    elif argument == "weight" and x.dtype in FP8_DTYPES:
        check_dtype_in(argument, tensor.dtype, FP8_DTYPES)
    else:
        check_same_dtype(argument, tensor, "x", x)


def check_reduce_dtype(reduce_dtype: torch.dtype, impl: str) -> None:
    """Raise DtypeError for a dtype in which no partial sums travel."""
    check_dtype_in("reduce_dtype", reduce_dtype, _dtypes(impl))


def _dtypes(impl: str) -> tuple[torch.dtype, ...]:
    return (*FUSED_DTYPES, torch.float64) if impl == "reference" else FUSED_DTYPES


__all__ = ["FUSED_DTYPES", "IMPLS", "check_operands", "check_reduce_dtype"]
