"""GEMM+AR in plain torch over all ranks' tensors: what the operator means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ops.matmul.reference import dequantize


def gemm_ar_reference(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scalings: Sequence[tuple[str, torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """The sum over ranks of x_p @ w_p^T, plus the bias once; the same on every rank.

    Products accumulate in fp32 (fp64 for fp64), are rounded to `reduce_dtype` (default: the dtype
    of x), summed in fp32 in rank order and rounded once more to `out_dtype`. Differentiable.
    `scalings` of fp8 and int8 operands has (kind, x_scale, weight_scale) of every rank, as in
    `plait.matmul`'s reference; both dtypes are bf16 by default then.
    """
    default = torch.bfloat16 if scalings else xs[0].dtype
    wide = torch.promote_types(scalings[0][1].dtype if scalings else default, torch.float32)
    total: torch.Tensor | None = None
    for p, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        if scalings:
            kind, x_scale, weight_scale = scalings[p]
            x, weight = dequantize(x, weight, kind, x_scale, weight_scale)
        part = torch.matmul(x.to(wide), weight.to(wide).t()).to(reduce_dtype or default).to(wide)
        total = part if total is None else total + part
    assert total is not None
    if bias is not None:
        total = total + bias.to(wide)
    return total.to(out_dtype or default)


__all__ = ["gemm_ar_reference"]
