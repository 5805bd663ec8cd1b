"""GEMM+RS in plain torch over all ranks' tensors: what the operator means."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gemm_rs_reference(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    rank: int,
    sizes: Sequence[int],
    scatter_dim: int = 0,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rank `rank`'s rows of the sum over ranks of x_p @ w_p^T, plus its bias once.

    Products accumulate in fp32 (fp64 for fp64), are rounded to `reduce_dtype` (default: the dtype
    of x), summed in fp32 in rank order and rounded once more to `out_dtype`. Differentiable.
    """
    wide = torch.promote_types(xs[0].dtype, torch.float32)
    start = sum(sizes[:rank])
    total: torch.Tensor | None = None
    for x, weight in zip(xs, weights, strict=True):
        partial = torch.matmul(x.to(wide), weight.to(wide).t()).to(reduce_dtype or x.dtype)
        part = partial.narrow(scatter_dim, start, sizes[rank]).to(wide)
        total = part if total is None else total + part
    assert total is not None
    if bias is not None:
        total = total + bias.to(wide)
    return total.to(out_dtype or xs[0].dtype)


__all__ = ["gemm_rs_reference"]
