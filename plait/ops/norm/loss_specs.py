"""Which losses of ATen there are, and what each of them accepts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import loss_reference as reference
from plait.ops.norm.loss import NONE, loss, loss_backward, new_strides

Tensor = torch.Tensor


def _same_shape(call: Call, self: Tensor, *others: Tensor | None) -> None:
    """Decline what ATen refuses or resizes: a loss of another shape than its input."""
    there = (each.shape for each in others if each is not None)
    try:
        shape = torch.broadcast_shapes(self.shape, *there)
    except RuntimeError:
        call.decline("shapes that do not broadcast")
    if shape != self.shape:
        call.decline("an operand that makes the loss larger than its input")


def _reduction(call: Call, reduction: int, *, resizes: bool = False) -> None:
    """`resizes`: ATen's out overload writes elements first, and warns of a result it resizes."""
    if reduction not in (0, 1, 2):
        call.decline("a reduction that is none of none, mean and sum")
    if resizes and reduction != NONE and call.given.tensors:
        call.decline("a reduced loss into a tensor that ATen resizes on the way")


def mse_loss(call: Call, self: Tensor, target: Tensor, reduction: int = 1) -> None:
    """(x - t)^2"""
    _reduction(call, reduction)
    strides = new_strides(call, self, target)
    loss(call, "MSE", (self, target, None, None), strides, reduction)


def smooth_l1_loss(
    call: Call, self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0
) -> None:
    """0.5 (x - t)^2 / beta below beta, |x - t| - 0.5 beta above."""
    _reduction(call, reduction)
    if not beta >= 0:
        call.decline("smooth_l1_loss of a negative beta")
    kind = "SMOOTH_L1" if beta > 0 else "L1"
    strides = new_strides(call, self, target)
    loss(call, kind, (self, target, None, None), strides, reduction, float(beta))


def huber_loss(
    call: Call, self: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0
) -> None:
    """0.5 (x - t)^2 up to delta, delta (|x - t| - 0.5 delta) above."""
    _reduction(call, reduction, resizes=True)
    if not delta > 0:
        call.decline("huber_loss of a delta that is not positive")
    _same_shape(call, self, target)
    strides = new_strides(call, self)
    loss(call, "HUBER", (self, target, None, None), strides, reduction, float(delta))


def soft_margin_loss(call: Call, self: Tensor, target: Tensor, reduction: int = 1) -> None:
    """log(1 + exp(-x t)), also where exp(-x t) overflows."""
    _reduction(call, reduction, resizes=True)
    _same_shape(call, self, target)
    strides = new_strides(call, self)
    loss(call, "SOFT_MARGIN", (self, target, None, None), strides, reduction)


def binary_cross_entropy(
    call: Call, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> None:
    """-w (t log(x) + (1 - t) log(1 - x)), logarithms not below -100."""
    _reduction(call, reduction, resizes=True)
    if self.shape != target.shape:
        call.decline("binary_cross_entropy of two shapes")
    _same_shape(call, self, weight)
    strides = new_strides(call, self)
    loss(call, "BCE", (self, target, weight, None), strides, reduction)


def binary_cross_entropy_with_logits(
    call: Call,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> None:
    """w ((1 - t) x + (1 + (p - 1) t) log(1 + exp(-x)))"""
    _reduction(call, reduction)
    if self.shape != target.shape:
        call.decline("binary_cross_entropy_with_logits of two shapes")
    _same_shape(call, self, weight, pos_weight)
    strides = new_strides(call, target)
    loss(call, "BCE_LOGITS", (self, target, weight, pos_weight), strides, reduction)


def mse_loss_backward(
    call: Call, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int
) -> None:
    """2 (x - t) g"""
    _reduction(call, reduction)
    loss_backward(call, "MSE", grad_output, (self, target, None), None, reduction)


def smooth_l1_loss_backward(
    call: Call, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, beta: float
) -> None:
    """g (x - t) / beta, at most g either way."""
    _reduction(call, reduction)
    if not beta > 0:
        call.decline("the gradient of smooth_l1_loss without a positive beta")
    operands = (self, target, None)
    loss_backward(call, "SMOOTH_L1", grad_output, operands, None, reduction, float(beta))


def huber_loss_backward(
    call: Call, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, delta: float
) -> None:
    """g (x - t), at most g delta either way."""
    _reduction(call, reduction)
    if not delta > 0:
        call.decline("huber_loss of a delta that is not positive")
    operands = (self, target, None)
    loss_backward(call, "HUBER", grad_output, operands, None, reduction, float(delta))


def soft_margin_loss_backward(
    call: Call, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int
) -> None:
    """-t g / (1 + exp(x t))"""
    _reduction(call, reduction)
    if self.shape != target.shape:
        call.decline("the gradient of soft_margin_loss of two shapes")
    strides = new_strides(call, target, self)
    loss_backward(call, "SOFT_MARGIN", grad_output, (self, target, None), strides, reduction)


def binary_cross_entropy_backward(
    call: Call,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> None:
    """w g (x - t) / (x (1 - x)), the denominator not below 1e-12."""
    _reduction(call, reduction)
    if self.shape != target.shape or (grad_output.dim() and grad_output.shape != self.shape):
        call.decline("the gradient of binary_cross_entropy of two shapes")
    strides = new_strides(call, self)
    loss_backward(call, "BCE", grad_output, (self, target, weight), strides, reduction)


def _spec(compute: Callable[..., None], out: str = "out") -> OpSpec:
    """The spec of a function named as its key; `out` is the suffix of the out overload."""
    name = compute.__name__
    return OpSpec(
        name, (name, f"{name}.{out}"), compute=compute, reference=getattr(reference, name, None)
    )


SPECS: tuple[OpSpec, ...] = (
    _spec(mse_loss),
    _spec(smooth_l1_loss),
    _spec(huber_loss),
    _spec(soft_margin_loss),
    _spec(binary_cross_entropy),
    _spec(binary_cross_entropy_with_logits),
    _spec(mse_loss_backward, "grad_input"),
    _spec(smooth_l1_loss_backward, "grad_input"),
    _spec(huber_loss_backward),
    _spec(soft_margin_loss_backward, "grad_input"),
    _spec(binary_cross_entropy_backward, "grad_input"),
)

__all__ = ["SPECS"]
