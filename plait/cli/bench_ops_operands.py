"""Operands of benchmarked operators, for any arrangement of the elements that are reduced together.

"kr": rows of neighbours, x [rows, row] along dim 1; "rk": columns, x [row, rows] along dim 0; "r":
all of a flat x [row]. Norms over channels make other shapes of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
EPS = 1e-5
_GROUPS = 32


@dataclass(frozen=True)
class Arrangement:
    """How the elements of the main operand lie; `rows` is 1 where `layout` is "r"."""

    layout: str
    rows: int
    row: int

    @property
    def numel(self) -> int:
        """Elements of the main operand."""
        return self.rows * self.row

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a plain operand."""
        shapes = {"kr": (self.rows, self.row), "rk": (self.row, self.rows), "r": (self.row,)}
        return shapes[self.layout]

    @property
    def dim(self) -> int | None:
        """The dim that is reduced; None for all."""
        return {"kr": 1, "rk": 0, "r": None}[self.layout]

    def __str__(self) -> str:
        text = "x".join(map(str, self.shape))
        return text if self.dim is None else f"{text} dim {self.dim}"


Make = Callable[[Arrangement, torch.dtype, torch.device], tuple[Any, ...]]


def values(at: Arrangement, dtype: torch.dtype, device: torch.device, *, copies: int = 1) -> Any:
    """So many plain operands, random normal."""
    return tuple(torch.randn(at.shape, device=device).to(dtype) for _ in range(copies))


def near_one(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Factors whose product over many neither overflows nor vanishes."""
    spread = 1 / math.sqrt(at.row)
    return ((1 + spread * torch.randn(at.shape, device=device)).to(dtype),)


def truths(likely: bool, at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Truth values that are all alike."""
    return (torch.full(at.shape, likely, dtype=dtype, device=device),)


def square(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """A square matrix of about as many elements."""
    size = math.isqrt(at.numel)
    return (torch.randn(size, size, device=device).to(dtype),)


def softmaxed(
    softmax: Callable[..., torch.Tensor], at: Arrangement, dtype: torch.dtype, device: torch.device
) -> Any:
    """A gradient and the result of `softmax`."""
    grad, x = values(at, dtype, device, copies=2)
    return grad, softmax(x, at.dim or 0)


def labelled(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Rows, and a class for each."""
    (x,) = values(at, dtype, device)
    return x, torch.randint(at.row, (at.rows,), device=device)


def log_probabilities(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Log-probabilities, and a class for each row."""
    x, labels = labelled(at, dtype, device)
    return torch.log_softmax(x, 1), labels


def nll_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, log-probabilities, classes and the total weight of forward."""
    x, labels = log_probabilities(at, dtype, device)
    _, total = aten.nll_loss_forward(x, labels, None, 1, -100)
    return torch.ones((), dtype=dtype, device=device), x, labels, total


def nll2d(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Log-probabilities of `row` classes for `rows` pixels of up to four images."""
    n = min(4, at.rows)
    x = torch.randn(n, at.row, at.rows // n, 1, device=device).to(dtype)
    labels = torch.randint(at.row, (n, at.rows // n, 1), device=device)
    return torch.log_softmax(x, 1), labels


def nll2d_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, log-probabilities, classes and the total weight of forward."""
    x, labels = nll2d(at, dtype, device)
    _, total = aten.nll_loss2d_forward(x, labels, None, 1, -100)
    return torch.ones((), dtype=dtype, device=device), x, labels, total


def shares(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Two operands of numbers from 0 to 1."""
    return tuple(torch.rand(at.shape, device=device).to(dtype) for _ in range(2))


def loss_gradient(make: Make, at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """A mean's gradient and the operands that `make` gives."""
    return torch.ones((), dtype=dtype, device=device), *make(at, dtype, device)


def affine(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Rows, weight and bias."""
    (x,) = values(at, dtype, device)
    weight, bias = (torch.randn(at.row, device=device).to(dtype) for _ in range(2))
    return x, weight, bias


def layer_norm_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, rows, saved mean and rstd, weight and bias."""
    x, weight, bias = affine(at, dtype, device)
    _, mean, rstd = aten.native_layer_norm(x, (at.row,), weight, bias, EPS)
    return torch.randn_like(x), x, mean, rstd, weight, bias


def rms_norm_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, rows, saved rstd and weight."""
    x, weight, _ = affine(at, dtype, device)
    rstd = x.float().square().mean(1, keepdim=True).add(EPS).rsqrt()
    return torch.randn_like(x), x, rstd, weight


def groups(at: Arrangement) -> tuple[int, int, int, int]:
    """N, C, HxW and groups for `rows` groups of `row` elements, of two channels each."""
    number = min(_GROUPS, at.rows)
    channels = 2 if at.row % 2 == 0 else 1
    return at.rows // number, number * channels, at.row // channels, number


def grouped(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Images, weight, bias and the sizes of `groups`."""
    n, channels, area, _ = groups(at)
    x = torch.randn(n, channels, area, device=device).to(dtype)
    weight, bias = (torch.randn(channels, device=device).to(dtype) for _ in range(2))
    return x, weight, bias, groups(at)


def group_norm_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, images, saved mean and rstd, weight and sizes."""
    x, weight, bias, sizes = grouped(at, dtype, device)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, EPS)
    return torch.randn_like(x), x, mean, rstd, weight, sizes


def channels(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """`rows` channels of `row` elements, those of several images."""
    n = min(32, at.row)
    x = torch.randn(n, at.rows, at.row // n, device=device).to(dtype)
    weight, bias = (torch.randn(at.rows, device=device) for _ in range(2))
    return x, weight, bias


def batch_norm_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, images, weight, saved mean and rstd."""
    x, weight, bias = channels(at, dtype, device)
    _, mean, rstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, EPS)
    return torch.randn_like(x), x, weight, mean, rstd


def weights(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Rows v and a length g for each, of a weight norm."""
    (v,) = values(at, dtype, device)
    return v, torch.rand(at.rows, 1, device=device).to(dtype)


def weight_norm_gradient(at: Arrangement, dtype: torch.dtype, device: torch.device) -> Any:
    """Gradient, v, g and the saved norms."""
    v, g = weights(at, dtype, device)
    w, norms = aten._weight_norm_interface(v, g, 0)
    return torch.randn_like(w), v, g, norms


__all__ = [
    "EPS",
    "Arrangement",
    "Make",
    "affine",
    "batch_norm_gradient",
    "channels",
    "group_norm_gradient",
    "grouped",
    "groups",
    "labelled",
    "layer_norm_gradient",
    "log_probabilities",
    "loss_gradient",
    "near_one",
    "nll2d",
    "nll2d_gradient",
    "nll_gradient",
    "rms_norm_gradient",
    "shares",
    "softmaxed",
    "square",
    "truths",
    "values",
    "weight_norm_gradient",
    "weights",
]
