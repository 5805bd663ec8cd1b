"""What the operators of the scan engine mean, in few words of torch.

`x` is a real tensor, `dim` one of its dims. They are defined in fp64 or int64, without regard to
rounding, and so serve as the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _rows(x: Tensor, dim: int) -> Tensor:
    """`x` with `dim` as the last one, at least 1-d."""
    wide = x.double() if x.is_floating_point() else x.long()
    return wide.movedim(dim, -1) if x.dim() else wide.reshape(1)


def _as(x: Tensor, dim: int, values: Tensor) -> Tensor:
    return values.movedim(-1, dim) if x.dim() else values.reshape(())


def _running(
    x: Tensor, dim: int, start: float, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    rows = _rows(x, dim)
    before, found = torch.full_like(rows[..., :1], start), [rows[..., :0]]
    for place in range(rows.shape[-1]):
        before = combine(before, rows[..., place : place + 1])
        found.append(before)
    return _as(x, dim, torch.cat(found, -1))


def cumsum(x: Tensor, dim: int) -> Tensor:
    """Sums of the elements up to each."""
    return _running(x, dim, 0, torch.add)


def cumprod(x: Tensor, dim: int) -> Tensor:
    """Products of the elements up to each."""
    return _running(x, dim, 1, torch.mul)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Logarithms of the sums of exponentials up to each."""
    return _running(x, dim, -torch.inf, torch.logaddexp)


def _extremum(x: Tensor, dim: int, top: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    values = _rows(x, dim)
    indices = torch.zeros_like(values, dtype=torch.int64)
    best = values.clone()
    for place in range(1, values.shape[-1]):
        before, new = best[..., place - 1], values[..., place]
        later = new.isnan() | top(new, before)
        best[..., place] = torch.where(later, new, before)
        indices[..., place] = torch.where(later, place, indices[..., place - 1])
    return _as(x, dim, best), _as(x, dim, indices)


def cummax(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The greatest element up to each, and the last index where it is; a NaN is the greatest."""
    return _extremum(x, dim, torch.ge)


def cummin(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The least element up to each, and the last index where it is; a NaN is the least."""
    return _extremum(x, dim, torch.le)


__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]
