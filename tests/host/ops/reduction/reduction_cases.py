"""Operators of the reduction engine with their references, and tensors of every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.ops.reduction import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = (*FLOATS, *INTEGERS, torch.bool)


class Case(NamedTuple):
    """`call(x, dim)` of torch and what it means; `dim` None: all, where `all_dims`."""

    name: str
    call: Callable[..., Any]
    meaning: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    several: bool = True  # takes several dims
    all_dims: bool = True  # takes None


def _dim(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim: function(x) if dim is None else function(x, dim=dim)


def _norm(order: float) -> Case:
    return Case(
        f"vector_norm {order}",
        lambda x, dim: torch.linalg.vector_norm(x, order, dim=dim),
        lambda x, dim: reference.vector_norm(x, order, dim),
        FLOATS if order in (0, 1, 2) else FLOATS[:3],
    )


CASES = (
    Case("sum", _dim(torch.sum), reference.sum, ALL),
    Case("nansum", _dim(torch.nansum), reference.nansum, ALL),
    Case("mean", _dim(torch.mean), reference.mean, FLOATS),
    Case("prod", _dim(torch.prod), reference.prod, ALL, several=False, all_dims=False),
    Case("amax", _dim(torch.amax), reference.amax, ALL),
    Case("amin", _dim(torch.amin), reference.amin, ALL),
    Case("max", _dim(torch.max), reference.max, ALL, several=False, all_dims=False),
    Case("min", _dim(torch.min), reference.min, ALL, several=False, all_dims=False),
    Case("argmax", _dim(torch.argmax), reference.argmax, ALL[:-1], several=False),
    Case("argmin", _dim(torch.argmin), reference.argmin, ALL[:-1], several=False),
    Case("aminmax", lambda x, dim: torch.aminmax(x, dim=dim), reference.aminmax, ALL, False),
    Case("any", _dim(torch.any), reference.any, ALL),
    Case("all", _dim(torch.all), reference.all, ALL),
    Case("count_nonzero", _dim(torch.count_nonzero), reference.count_nonzero, ALL),
    Case("var", _dim(torch.var), reference.var, FLOATS),
    Case("std", _dim(torch.std), reference.std, FLOATS),
    Case("var_mean", _dim(torch.var_mean), reference.var_mean, FLOATS),
    Case("std_mean", _dim(torch.std_mean), reference.std_mean, FLOATS),
    *[_norm(order) for order in (0, 1, 2, 3, 0.5, -1, 2.3, float("inf"), -float("inf"))],
    Case("logsumexp", _dim(torch.logsumexp), reference.logsumexp, ALL, all_dims=False),
)


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Numbers of which every third is a tie with another, and whose sum is not a small rest."""
    made = torch.randn(shape) + 1
    made = torch.where(torch.rand(shape) < 0.3, (made * 2).round() / 2, made)
    if dtype is torch.bool:
        return (made > 0).to(device)
    if not dtype.is_floating_point:
        made = (made * 20).round().clamp(0 if dtype is torch.uint8 else -100, 100)
    return made.to(dtype).to(device)


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda make: make((3, 13)),
    "columns": lambda make: make((13, 3)).t(),
    "steps": lambda make: make((6, 26))[::2, 1::2],
    "expanded": lambda make: make((3, 1, 5)).expand(3, 4, 5),
    "one value": lambda make: make(()).expand(3, 5),
    "apart": lambda make: make((3, 4, 5, 6))[:, ::2, 1:4, ::3].permute(2, 0, 3, 1),
    "middle": lambda make: make((3, 7, 4)),
    "sliding": lambda make: make((40,)).as_strided((6, 5), (3, 2), 4),
}


def layout(name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of this layout; what lies between its elements is larger and smaller than these."""
    found = LAYOUTS[name](lambda shape: values(shape, dtype, device))
    if dtype is torch.bool or name in ("sliding", "one value", "expanded"):
        return found
    inside = found.clone()
    base = found if found._base is None else found._base
    flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
    flat[::2], flat[1::2] = 111, 0 if dtype is torch.uint8 else -111
    found.copy_(inside)
    return found


def dims(case: Case, ndim: int) -> list[Any]:
    """What `case` is reduced over."""
    found: list[Any] = [0, ndim - 1]
    if case.all_dims:
        found.append(None)
    if case.several and ndim > 2:
        found.append((0, ndim - 1))
    return found


__all__ = ["ALL", "CASES", "FLOATS", "INTEGERS", "LAYOUTS", "Case", "dims", "layout", "values"]
