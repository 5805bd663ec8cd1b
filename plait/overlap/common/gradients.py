"""Lists of weights, and where their gradients go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.checks import check_dtype_in, check_same_device, check_shape, check_tensor
from plait.errors import ArgumentError


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


def check_main_grads(main_grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    """Raise unless there is no main_grad, or an fp32 one with the shape of each weight."""
    if not main_grads:
        return
    if len(main_grads) != len(weights):
        raise ArgumentError(
            "main_grad", f"one for each of {len(weights)} weights", f"{len(main_grads)}",
            "Pass a list as long as the weights, or none.",
        )  # fmt: skip
    for main_grad, weight in zip(main_grads, weights, strict=True):
        check_shape(
            "main_grad", main_grad, tuple(weight.shape), "its weight's", "Pass one like it."
        )
        check_dtype_in("main_grad", main_grad.dtype, (torch.float32,))
        check_same_device("main_grad", main_grad, "weight", weight)


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


__all__ = ["as_list", "check_main_grads", "weight_gradient"]
