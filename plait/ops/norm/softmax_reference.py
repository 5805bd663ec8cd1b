"""What softmax and its kin mean, in few words of torch, defined in fp64.

`x` is a real tensor, `y` the saved result, `g` the gradient of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) of a row, divided by its sum."""
    power = (x.double() - x.double().amax(dim, keepdim=True)).exp()
    return power / power.sum(dim, keepdim=True)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """The logarithm of softmax."""
    lower = x.double() - x.double().amax(dim, keepdim=True)
    return lower - lower.exp().sum(dim, keepdim=True).log()


def safe_softmax(x: Tensor, dim: int) -> Tensor:
    """softmax, and 0 for rows of -inf."""
    empty = (x == -torch.inf).all(dim, keepdim=True)
    return torch.where(empty, 0.0, softmax(x, dim))


def softmax_backward(g: Tensor, y: Tensor, dim: int) -> Tensor:
    """(g - sum(g y)) y"""
    g, y = g.double(), y.double()
    return (g - (g * y).sum(dim, keepdim=True)) * y


def log_softmax_backward(g: Tensor, y: Tensor, dim: int) -> Tensor:
    """g - exp(y) sum(g)"""
    g, y = g.double(), y.double()
    return g - y.exp() * g.sum(dim, keepdim=True)


__all__ = [
    "log_softmax",
    "log_softmax_backward",
    "safe_softmax",
    "softmax",
    "softmax_backward",
]
