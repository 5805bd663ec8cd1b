"""What the operators of the reduction engine mean, in few words of torch.

`x` is a real tensor, `dim` None or dims; results have the shape of ATen's with `keepdim` False.
They are defined in fp64 or int64, without regard to rounding, and so serve as the yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Dims = int | Sequence[int] | None


def rows(x: Tensor, dim: Dims = None) -> Tensor:
    """`x` with its reduced dims as the last one: (*kept, R)."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    along = sorted({each % x.dim() for each in dims}) if x.dim() else []
    kept = [d for d in range(x.dim()) if d not in along]
    count = 1
    for d in along:
        count *= x.shape[d]
    return x.permute(*kept, *along).reshape(*[x.shape[d] for d in kept], count)


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.long()


def sum(x: Tensor, dim: Dims = None) -> Tensor:
    """The sum."""
    return _wide(rows(x, dim)).sum(-1)


def nansum(x: Tensor, dim: Dims = None) -> Tensor:
    """The sum of what is a number."""
    values = _wide(rows(x, dim))
    return torch.where(values == values, values, 0).sum(-1)


def prod(x: Tensor, dim: Dims = None) -> Tensor:
    """The product."""
    return _wide(rows(x, dim)).prod(-1)


def mean(x: Tensor, dim: Dims = None) -> Tensor:
    """The sum divided by the number of elements; NaN without any."""
    values = rows(x, dim).double()
    return values.sum(-1) / values.shape[-1]


def argmax(x: Tensor, dim: Dims = None) -> Tensor:
    """The first index of the greatest element; a NaN is the greatest."""
    values = rows(x, dim)
    best = values.isnan().any(-1, keepdim=True)
    top = values.max(-1, keepdim=True).values
    hit = torch.where(best, values.isnan(), values == top)
    count = values.shape[-1]
    return torch.where(hit, torch.arange(count, device=x.device), count).min(-1).values


def argmin(x: Tensor, dim: Dims = None) -> Tensor:
    """The first index of the least element; a NaN is the least."""
    values = rows(x, dim)
    return argmax(-values if x.is_floating_point() else ~values, -1)


def max(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The greatest element along `dim` and its first index; a NaN is the greatest."""
    index = argmax(x.int() if x.dtype is torch.bool else x, dim)
    return rows(x, dim).gather(-1, index.unsqueeze(-1)).squeeze(-1), index


def min(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The least element along `dim` and its first index; a NaN is the least."""
    index = argmin(x.int() if x.dtype is torch.bool else x, dim)
    return rows(x, dim).gather(-1, index.unsqueeze(-1)).squeeze(-1), index


def amax(x: Tensor, dim: Dims = None) -> Tensor:
    """The greatest element, or NaN if there is one."""
    return max(rows(x, dim), -1)[0]


def amin(x: Tensor, dim: Dims = None) -> Tensor:
    """The least element, or NaN if there is one."""
    return min(rows(x, dim), -1)[0]


def aminmax(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """The least and the greatest element, or NaNs if there is one."""
    return amin(x, dim), amax(x, dim)


def any(x: Tensor, dim: Dims = None) -> Tensor:
    """Whether some element is not 0; a NaN is not."""
    return (rows(x, dim) != 0).sum(-1) > 0


def all(x: Tensor, dim: Dims = None) -> Tensor:
    """Whether no element is 0."""
    return (rows(x, dim) == 0).sum(-1) == 0


def count_nonzero(x: Tensor, dim: Dims = None) -> Tensor:
    """How many elements are not 0."""
    return (rows(x, dim) != 0).sum(-1)


def var_mean(x: Tensor, dim: Dims = None, correction: float = 1.0) -> tuple[Tensor, Tensor]:
    """The sum of squared distances from the mean, divided by their number less `correction`, and
    the mean."""
    values = rows(x, dim).double()
    center = values.mean(-1, keepdim=True)
    squares = ((values - center) ** 2).sum(-1)
    return squares / (values.shape[-1] - correction), center.squeeze(-1)


def std_mean(x: Tensor, dim: Dims = None, correction: float = 1.0) -> tuple[Tensor, Tensor]:
    """The root of the variance, and the mean."""
    variance, center = var_mean(x, dim, correction)
    return variance.sqrt(), center


def var(x: Tensor, dim: Dims = None, correction: float = 1.0) -> Tensor:
    """The variance."""
    return var_mean(x, dim, correction)[0]


def std(x: Tensor, dim: Dims = None, correction: float = 1.0) -> Tensor:
    """The standard deviation."""
    return var(x, dim, correction).sqrt()


def vector_norm(x: Tensor, order: float = 2.0, dim: Dims = None) -> Tensor:
    """The p-norm of order p; 0: how many are not 0; inf and -inf: the greatest and the least."""
    values = rows(x, dim).double().abs()
    if order == 0:
        return (values != 0).double().sum(-1)
    if order == float("inf"):
        return amax(values, -1)
    if order == -float("inf"):
        return amin(values, -1)
    return (values**order).sum(-1) ** (1 / order)


def logsumexp(x: Tensor, dim: Dims = None) -> Tensor:
    """The logarithm of the sum of exponentials; -inf without elements."""
    values = rows(x, dim).double()
    if not values.shape[-1]:
        return values.sum(-1) - float("inf")
    top = amax(values, -1)
    shift = torch.where(top.abs() == float("inf"), 0.0, top)
    return (values - shift.unsqueeze(-1)).exp().sum(-1).log() + shift


def dot(x: Tensor, y: Tensor) -> Tensor:
    """The sum of products of two vectors."""
    return (_wide(x) * _wide(y)).sum()


def vdot(x: Tensor, y: Tensor) -> Tensor:
    """The same, of real numbers."""
    return dot(x, y)


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix."""
    return _wide(x.diagonal()).sum()


__all__ = [
    "all",
    "amax",
    "amin",
    "aminmax",
    "any",
    "argmax",
    "argmin",
    "count_nonzero",
    "dot",
    "logsumexp",
    "max",
    "mean",
    "min",
    "nansum",
    "prod",
    "rows",
    "std",
    "std_mean",
    "sum",
    "trace",
    "var",
    "var_mean",
    "vdot",
    "vector_norm",
]
