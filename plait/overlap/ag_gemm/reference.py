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
    *,
    scaling: tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
) -> list[torch.Tensor]:
    """One rank's results from every rank's x (in rank order) and its own weights.

    Cats `xs` along `gather_dim` and multiplies by each weight [N, K]; a gated activation takes two
    weights and gives one result. Differentiable. `scaling` of fp8 and int8 is (kind, every rank's
    x_scale, the weights' scales) as in `plait.matmul`'s reference, a rank's x_scale being [1] or as
    its x: [...] of kind "rows", [..., K / 128] of kind "blocks"; results are bf16 by default then.
    """
    gathered = torch.cat(list(xs), dim=gather_dim)
    kind, x_scale, weight_scales = "", None, []
    if scaling is not None:
        kind, x_scales, weight_scales = scaling
        rows = [
            scale.expand(x.shape[:-1]) if kind == "rows" else scale
            for x, scale in zip(xs, x_scales, strict=True)
        ]
        x_scale = torch.cat(rows, dim=gather_dim)
        out_dtype = out_dtype or torch.bfloat16

    def product(which: slice) -> torch.Tensor:
        of = None if x_scale is None else (kind, x_scale, weight_scales[which])
        return matmul_reference(
            gathered, weights[which], biases[which], activation, out_dtype, scaling=of
        )

    if activation in ("swiglu", "geglu"):
        return [product(slice(None))]
    return [product(slice(i, i + 1)) for i in range(len(weights))]


__all__ = ["ag_gemm_reference"]
