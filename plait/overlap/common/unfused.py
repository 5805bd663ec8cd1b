"""The GEMM of unfused implementations: what plain PyTorch would run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.product import QUANTIZED_DTYPES, Product
from plait.ops.matmul.reference import GATES, activation_reference
from plait.ops.matmul.unfused import unfused_matmul


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scalings: Sequence[Scaling] = (),
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T + bias, in the dtype of x; fp8 and int8 in `out_dtype`."""
    if x.dtype in QUANTIZED_DTYPES:
        biases = () if bias is None else (bias,)
        return unfused_matmul(
            Product(x, (weight,), biases, "none", out_dtype, scalings=tuple(scalings))
        )
    return F.linear(x, weight, bias)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    out_dtype: torch.dtype,
    scalings: Sequence[Scaling] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, pre-activations) of one or several weights on one x; a gate joins two.

    No pre-activations of fp8 and int8, which have no gradient.
    """
    if x.dtype in QUANTIZED_DTYPES:
        count = len(weights)
        parts = [slice(None)] if activation in GATES else [slice(i, i + 1) for i in range(count)]
        products = [
            Product(
                x, tuple(weights[part]), tuple(biases[part]), activation, out_dtype,
                scalings=tuple(scalings[part]),
            )
            for part in parts
        ]  # fmt: skip
        return [unfused_matmul(product) for product in products], []
    pres = [linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    if activation in GATES:
        return [activation_reference(pres, activation).to(out_dtype)], pres
    return [activation_reference([pre], activation).to(out_dtype) for pre in pres], pres


__all__ = ["linear", "linears"]
