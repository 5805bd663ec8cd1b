"""`plait.matmul` in plain torch: what the operator means, on any device.

Shapes: x [..., K], every weight [N, K], every bias [N], result [..., N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
GATES = ("swiglu", "geglu")  # take two weights: activation(x @ w0^T) * (x @ w1^T)


def activation_reference(pre: Sequence[torch.Tensor], activation: str) -> torch.Tensor:
    """Apply an activation to one pre-activation, or a gate to two (gate, up), in their dtype.

    "gelu" and "geglu" use the error function, "gelu_tanh" the tanh approximation.
    """
    if activation in GATES:
        gate, up = pre
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate)) * up
    (value,) = pre
    if activation == "none":
        return value
    if activation == "gelu":
        return F.gelu(value)
    if activation == "gelu_tanh":
        return F.gelu(value, approximate="tanh")
    return F.silu(value) if activation == "silu" else F.relu(value)


def activation_backward_reference(
    grad: torch.Tensor, pre: Sequence[torch.Tensor], activation: str
) -> tuple[torch.Tensor, ...]:
    """Gradients of the pre-activations, in the dtype of `grad`; all tensors have one dtype."""
    aten = torch.ops.aten
    if activation == "none":
        return (grad,)
    if activation == "swiglu":
        gate, up = pre
        return aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    if activation == "geglu":
        gate, up = pre
        return aten.gelu_backward(grad * up, gate), grad * F.gelu(gate)
    (value,) = pre
    if activation == "silu":
        return (aten.silu_backward(grad, value),)
    if activation == "relu":
        return (aten.threshold_backward(grad, value, 0),)
    return (
        aten.gelu_backward(
            grad, value, approximate="tanh" if activation == "gelu_tanh" else "none"
        ),
    )


def matmul_reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """activation(x @ w^T + b), rounded once to `out_dtype` (default: the dtype of x).

    Low precision is computed in fp32, fp32 in fp32 and fp64 in fp64. `weights` holds one tensor,
    or two for a gate; `biases` is empty or as long as `weights`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pre = [torch.matmul(x.to(wide), weight.to(wide).t()) for weight in weights]
    if biases:
        pre = [value + bias.to(wide) for value, bias in zip(pre, biases, strict=True)]
    return activation_reference(pre, activation).to(out_dtype or x.dtype)


__all__ = [
    "ACTIVATIONS",
    "GATES",
    "activation_backward_reference",
    "activation_reference",
    "matmul_reference",
]
