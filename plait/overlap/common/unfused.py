"""The GEMM of unfused implementations: what plain PyTorch would run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from plait.ops.matmul.reference import GATES, activation_reference


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T + bias, in the dtype of x."""
    return F.linear(x, weight, bias)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    out_dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, pre-activations) of one or several weights on one x; a gate joins two."""
    pres = [linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    if activation in GATES:
        return [activation_reference(pres, activation).to(out_dtype)], pres
    return [activation_reference([pre], activation).to(out_dtype) for pre in pres], pres


__all__ = ["linear", "linears"]
