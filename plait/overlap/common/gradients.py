"""Lists of weights, and where their gradients go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.checks import check_tensor


def as_list(
    argument: str, value: torch.Tensor | Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """None, a tensor or several as a list; each is checked to be a tensor."""
    if value is None:
        return []
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    for tensor in tensors:
        check_tensor(argument, tensor)
    return tensors


def weight_gradient(
    grad: torch.Tensor, needed: bool, main_grads: Sequence[torch.Tensor], index: int
) -> torch.Tensor | None:
    """The gradient to return for a weight: None if not needed or if added to its main_grad."""
    if not needed:
        return None
    if main_grads:
        main_grads[index].add_(grad)
        return None
    return grad


__all__ = ["as_list", "weight_gradient"]
