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
    grad: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """grad [M, N]^T @ x [M, K]; with `main_grad` it is added there, not rounded first."""
    if main_grad is None:
        return grad.t() @ x
    if x.dtype == torch.float32:
        main_grad.addmm_(grad.t(), x)
    elif x.is_cuda:
        main_grad.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
    else:
        main_grad.addmm_(grad.t().to(torch.float32), x.to(torch.float32))
    return None


__all__ = ["as_list", "check_main_grads", "weight_gradient"]
