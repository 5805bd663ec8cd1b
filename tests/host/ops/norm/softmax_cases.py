"""Operators of the softmax family with their references, and tensors of every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.norm import softmax_reference as reference

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Case(NamedTuple):
    """`call` and `meaning` of (x, dim), or of (g, y, dim) if `result` makes y of (x, dim)."""

    name: str
    call: Callable[..., Tensor]
    meaning: Callable[..., Tensor]
    result: Callable[..., Tensor] | None = None


def _softmax(x: Tensor, dim: int) -> Tensor:
    return aten._softmax(x, dim, False)


def _log_softmax(x: Tensor, dim: int) -> Tensor:
    return aten._log_softmax(x, dim, False)


CASES = (
    Case("softmax", _softmax, reference.softmax),
    Case("log_softmax", _log_softmax, reference.log_softmax),
    Case("safe_softmax", lambda x, dim: aten._safe_softmax(x, dim), reference.safe_softmax),
    Case(
        "softmax_backward",
        lambda g, y, dim: aten._softmax_backward_data(g, y, dim, g.dtype),
        reference.softmax_backward,
        _softmax,
    ),
    Case(
        "log_softmax_backward",
        lambda g, y, dim: aten._log_softmax_backward_data(g, y, dim, g.dtype),
        reference.log_softmax_backward,
        _log_softmax,
    ),
)


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape) * 3


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: _randn(5, 37),
    "columns": lambda: _randn(37, 5).t(),
    "middle": lambda: _randn(3, 11, 7),
    "strided": lambda: _randn(6, 4, 9, 5).permute(2, 0, 3, 1)[:, ::2, :, ::3],
    "expanded": lambda: _randn(1, 9, 1).expand(4, 9, 3),
    "five dims": lambda: _randn(3, 4, 5, 2, 6)[:, ::2, :, :, ::2].transpose(1, 3),
    "one element": lambda: _randn(1, 1),
    "scalar": lambda: _randn(),
    "no rows": lambda: _randn(0, 3),
    "empty rows": lambda: _randn(3, 0),
}


def operands(case: Case, x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """What `case.call` takes before the dim: x, or a gradient ordered as x and the result."""
    if case.result is None:
        return (x,)
    return torch.randn_like(x), case.result(x, dim)


__all__ = ["CASES", "FLOATS", "LAYOUTS", "Case", "operands"]
