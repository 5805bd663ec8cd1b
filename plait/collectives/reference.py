"""The plain collectives in plain torch over all ranks' tensors: what they mean.

`xs` are every rank's tensors in rank order; all functions are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def all_gather_reference(xs: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Every rank's result: the tensors side by side along `dim`."""
    return torch.cat(list(xs), dim=dim)


def all_reduce_reference(
    xs: Sequence[torch.Tensor],
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Every rank's result: each tensor rounded to `reduce_dtype`, added in rank order, rounded.

    Sums run in fp32 for fp32, bf16 and fp16, in the dtype itself for wider ones and for integers.
    Both dtypes default to that of x.
    """
    dtype = xs[0].dtype
    total: torch.Tensor | None = None
    for x in xs:
        part = x.to(reduce_dtype or dtype)
        if part.is_floating_point():
            part = part.to(torch.promote_types(part.dtype, torch.float32))
        total = part if total is None else total + part
    assert total is not None, "no ranks"
    return total.to(out_dtype or dtype)


def reduce_scatter_reference(
    xs: Sequence[torch.Tensor],
    rank: int,
    sizes: Sequence[int],
    dim: int = 0,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rank `rank`'s result: its `sizes[rank]` rows along `dim` of the sum of all tensors."""
    start = sum(sizes[:rank])
    parts = [x.narrow(dim, start, sizes[rank]) for x in xs]
    return all_reduce_reference(parts, reduce_dtype, out_dtype)


def all_to_all_reference(
    xs: Sequence[torch.Tensor], rank: int, input_splits: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Rank `rank`'s result: what every rank's x has for it along dim 0, in rank order.

    `input_splits[s]` are rank s's rows for each rank.
    """
    parts = [x.split(list(rows))[rank] for x, rows in zip(xs, input_splits, strict=True)]
    return torch.cat(parts)


__all__ = [
    "all_gather_reference",
    "all_reduce_reference",
    "all_to_all_reference",
    "reduce_scatter_reference",
]
