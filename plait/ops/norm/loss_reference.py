"""What the losses mean, in few words of torch, defined in fp64.

`x` is the input, `t` the target, of one shape; `reduction` is ATen's number: none, mean, sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reduced(loss: Tensor, reduction: int) -> Tensor:
    """The losses, their mean, or their sum."""
    return (loss, loss.mean(), loss.sum())[reduction]


def mse_loss(x: Tensor, t: Tensor, reduction: int) -> Tensor:
    """(x - t)^2"""
    return reduced((x.double() - t.double()).square(), reduction)


def smooth_l1_loss(x: Tensor, t: Tensor, reduction: int, beta: float) -> Tensor:
    """Quadratic below beta, linear above; |x - t| where beta is 0."""
    distance = (x.double() - t.double()).abs()
    near = 0.5 * distance.square() / beta if beta else distance
    return reduced(torch.where(distance < beta, near, distance - 0.5 * beta), reduction)


def huber_loss(x: Tensor, t: Tensor, reduction: int, delta: float) -> Tensor:
    """Quadratic up to delta, linear above."""
    distance = (x.double() - t.double()).abs()
    far = delta * (distance - 0.5 * delta)
    return reduced(torch.where(distance <= delta, 0.5 * distance.square(), far), reduction)


def soft_margin_loss(x: Tensor, t: Tensor, reduction: int) -> Tensor:
    """log(1 + exp(-x t))"""
    return reduced(-torch.nn.functional.logsigmoid(x.double() * t.double()), reduction)


def binary_cross_entropy(x: Tensor, t: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """Of probabilities; logarithms are at least -100."""
    x, t = x.double(), t.double()
    loss = (t - 1) * (-x).log1p().clamp(min=-100) - t * x.log().clamp(min=-100)
    return reduced(loss if weight is None else loss * weight.double(), reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    t: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """Of what a sigmoid turns into probabilities."""
    x, t = x.double(), t.double()
    positive = 1.0 if pos_weight is None else 1 + (pos_weight.double() - 1) * t
    loss = (1 - t) * x - positive * torch.nn.functional.logsigmoid(x)
    return reduced(loss if weight is None else loss * weight.double(), reduction)


def nll_loss(
    x: Tensor, t: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Loss and total weight of (n, classes) or (n, classes, height, width)."""
    counts = t != ignore_index
    chosen = torch.where(counts, t, 0).long()
    weights = torch.ones(x.shape[1]) if weight is None else weight
    each = torch.where(counts, weights.double()[chosen], 0.0)
    loss = -each * x.double().gather(1, chosen.unsqueeze(1)).squeeze(1)
    total = each.sum()
    return (loss, loss.sum() / total, loss.sum())[reduction], total if reduction else total * 0


__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "mse_loss",
    "nll_loss",
    "reduced",
    "smooth_l1_loss",
    "soft_margin_loss",
]
