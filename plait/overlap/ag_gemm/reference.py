"""AG+GEMM in plain torch over all ranks' tensors: what the operator means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ops.matmul.reference import matmul_reference


def ag_gemm_reference(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    gather_dim: int = 0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """One rank's results from every rank's x (in rank order) and its own weights.

    Cats `xs` along `gather_dim` and multiplies by each weight [N, K]; a gated activation takes two
    weights and gives one result. Differentiable.
    """
    gathered = torch.cat(list(xs), dim=gather_dim)
    if activation in ("swiglu", "geglu"):
        return [matmul_reference(gathered, weights, biases, activation, out_dtype)]
    return [
        matmul_reference(gathered, [weight], biases[i : i + 1], activation, out_dtype)
        for i, weight in enumerate(weights)
    ]


__all__ = ["ag_gemm_reference"]
