"""`plait.matmul` in plain torch: what the operator means, on any device.

Shapes: x [..., K], every weight [N, K], every bias [N], result [..., N]; batched x [B, M, K] and
weight [B, N, K]. Scales are fp32: "rows" x_scale [..., M or 1] and weight_scale [..., N or 1],
"blocks" x_scale [..., M, K / 128] and weight_scale [..., N / 128, K / 128], rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
GATES = ("swiglu", "geglu")  # take two weights: activation(x @ w0^T) * (x @ w1^T)
SCALE_BLOCK = 128  # elements along K, and rows of a weight, that share a scale of kind "blocks"


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


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values [..., rows, K] times scale [..., rows], or [1] for one scale of the tensor; fp32."""
    return values.to(scale.dtype) * scale.unsqueeze(-1)


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """values [..., rows, K] times the scale of their block of `block_rows` x 128; fp32.

    scale [..., rows / block_rows, K / 128], rounded up. Example: rows 129 of 130 and block_rows
    128 take scale[1].
    """
    rows = torch.arange(values.shape[-2], device=values.device) // block_rows
    columns = torch.arange(values.shape[-1], device=values.device) // SCALE_BLOCK
    return values.to(scale.dtype) * scale[..., rows[:, None], columns]


def dequantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight in the dtype of their scales; `kind` is "rows" or "blocks"."""
    if kind == "rows":
        return dequantize_rows(x, x_scale), dequantize_rows(weight, weight_scale)
    return (
        dequantize_blocks(x, x_scale, 1),
        dequantize_blocks(weight, weight_scale, SCALE_BLOCK),
    )


def integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T of int8 as int32: exact, or wrapped where int32 cannot hold it."""
    # Sums below 2^53 are exact in fp64, which unlike int64 every device can multiply.
    return torch.matmul(x.double(), weight.double().mT).to(torch.int64).to(torch.int32)


def matmul_reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    *,
    scaling: tuple[str, torch.Tensor, Sequence[torch.Tensor]] | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x @ w^T + b + addend), rounded once to `out_dtype` (default: the dtype of x).

    Low precision is computed in fp32, fp32 in fp32 and fp64 in fp64. `weights` holds one tensor,
    or two for a gate; `biases` is empty or as long as `weights`. `scaling` is (kind, x_scale,
    weight_scales) of fp8 or int8 operands; int8 without it gives exact int32.
    """
    if x.dtype is torch.int8 and scaling is None:
        (weight,) = weights
        exact = integer_product(x, weight)
        return exact if addend is None else exact + addend
    if scaling is None:
        wide = torch.promote_types(x.dtype, torch.float32)
        pairs = [(x.to(wide), weight.to(wide)) for weight in weights]
    else:
        kind, x_scale, weight_scales = scaling
        wide = x_scale.dtype
        pairs = [
            dequantize(x, weight, kind, x_scale, scale)
            for weight, scale in zip(weights, weight_scales, strict=True)
        ]
    pre = [torch.matmul(left, right.mT) for left, right in pairs]
    if biases:
        pre = [value + bias.to(wide) for value, bias in zip(pre, biases, strict=True)]
    if addend is not None:
        pre = [value + addend.to(wide) for value in pre]
    return activation_reference(pre, activation).to(out_dtype or x.dtype)


__all__ = [
    "ACTIVATIONS",
    "GATES",
    "SCALE_BLOCK",
    "activation_backward_reference",
    "activation_reference",
    "dequantize",
    "dequantize_blocks",
    "dequantize_rows",
    "integer_product",
    "matmul_reference",
]
