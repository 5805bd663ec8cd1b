"""`plait.matmul`: a linear layer's product with bias, activation or gate in its epilogue.

Shapes: x [..., K], weight [N, K] as in `torch.nn.Linear`, bias [N], result [..., N].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from plait.backends.base import executor_for
from plait.checks import (
    check_dtype_in,
    check_min_ndim,
    check_one_of,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
)
from plait.device import device_info
from plait.errors import ArgumentError, DeviceError, UnsupportedError
from plait.ops.matmul.configs import default_config
from plait.ops.matmul.reference import (
    ACTIVATIONS,
    GATES,
    activation_backward_reference,
    activation_reference,
    matmul_reference,
)
from plait.runtime.record import record_run

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (*_KERNEL_DTYPES, torch.float64)
_IMPLS = ("auto", "fused", "unfused", "reference")

Tensors = Sequence[torch.Tensor]


def run_kernel(
    x: torch.Tensor,
    weights: Tensors,
    biases: Tensors,
    activation: str,
    out: torch.Tensor,
    pre: Tensors = (),
) -> None:
    """Plan and run the fused kernel on 2-D operands, as `plan_matmul` takes them."""
    from plait.ops.matmul.launch import plan_matmul
    from plait.ops.matmul.operands import descriptors_allowed, dot_precision

    info = device_info(x.device)
    precision = dot_precision(x.dtype)
    config = default_config(
        out.shape[0],
        out.shape[1],
        x.shape[1],
        x.dtype,
        info.arch,
        descriptors_allowed(x, weights, info.arch),
        num_weights=len(weights),
        precision=precision,
    )
    program = plan_matmul(
        x,
        weights,
        biases,
        out,
        pre,
        activation=activation,
        config=config,
        num_sms=info.num_sms,
        precision=precision,
    )
    executor_for(x.device).run(program)


class _FusedMatmul(torch.autograd.Function):
    """The kernel forward; gradients by torch from the saved pre-activations."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        activation: str,
        out_dtype: torch.dtype,
        num_weights: int,
        *weights_and_biases: torch.Tensor,
    ) -> torch.Tensor:
        weights = weights_and_biases[:num_weights]
        biases = weights_and_biases[num_weights:]
        shape = (x.shape[0], weights[0].shape[0])
        out = x.new_empty(shape, dtype=out_dtype)
        keeps_pre = activation != "none" and any(ctx.needs_input_grad)
        pre = [x.new_empty(shape) for _ in weights] if keeps_pre else []
        run_kernel(x, weights, biases, activation, out, pre)
        ctx.activation = activation
        ctx.num_weights = num_weights
        ctx.save_for_backward(x, *weights, *pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        weights, pre = saved[: ctx.num_weights], saved[ctx.num_weights :]
        wide = [value.float() for value in pre]
        grads = activation_backward_reference(grad.float(), wide, ctx.activation)
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        needs_w, needs_b = needs[: ctx.num_weights], needs[ctx.num_weights :]
        grad_bias = [
            each.sum(0).to(x.dtype) if need else None
            for each, need in zip(grads, needs_b, strict=False)
        ]
        narrow = [each.to(x.dtype) for each in grads]
        grad_x = None
        if needs_x:
            grad_x = narrow[0] @ weights[0]
            for each, weight in zip(narrow[1:], weights[1:], strict=True):
                grad_x = torch.addmm(grad_x, each, weight)
        grad_weight = [
            each.t() @ x if need else None for each, need in zip(narrow, needs_w, strict=True)
        ]
        return grad_x, None, None, None, *grad_weight, *grad_bias


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | Tensors | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor | list[torch.Tensor]:
    """activation(x @ weight^T + bias), accumulated in fp32 and rounded once.

    Args:
        x: [..., K], any strides; float32, bfloat16, float16 (float64: reference and unfused only).
        weight: [N, K], any strides, dtype of x; or a list. With "swiglu" and "geglu" it is the
            list (gate, up); otherwise a list gives a list of results, one for each weight.
        bias: [N], dtype of x; a list as long as the weights if those are a list.
        activation: None, "gelu" (error function), "gelu_tanh", "silu", "relu", or a gate:
            "swiglu" silu(x @ gate^T) * (x @ up^T), "geglu" with gelu.
        out: [..., N] to write to (a list where a list is returned); needs gradients disabled.
        out_dtype: dtype of the result, by default that of `out`, else of x.
        impl: "fused" (one kernel), "unfused" (torch.nn.functional.linear, then the activation),
            "reference" (fp32 throughout), or "auto"; `plait.last_run()` says which ran.

    Returns:
        [..., N], or a list of them. Zero sizes are allowed; K = 0 gives activation(bias).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument does not fit.
        UnsupportedError: impl="fused" with float64.
    """
    activation = activation or "none"
    check_one_of("activation", activation, (*ACTIVATIONS, *GATES))
    check_one_of("impl", impl, _IMPLS)
    is_list = not isinstance(weight, torch.Tensor)
    weights = list(weight) if is_list else [weight]
    biases = _as_list(bias, len(weights), "bias", is_list)
    _check_operands(x, weights, biases, activation)
    if is_list and activation not in GATES:
        outs = _as_list(out, len(weights), "out", is_list) or [None] * len(weights)
        pairs = [[b] for b in biases] or [[] for _ in weights]
        return [
            _matmul_one(x, [w], b, activation, o, out_dtype, impl)
            for w, b, o in zip(weights, pairs, outs, strict=True)
        ]
    (single,) = _as_list(out, 1, "out", False) or [None]
    return _matmul_one(x, weights, biases, activation, single, out_dtype, impl)


def _matmul_one(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    activation: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> torch.Tensor:
    out_dtype = out_dtype or (x.dtype if out is None else out.dtype)
    check_dtype_in("out_dtype", out_dtype, _DTYPES)
    shape = (*x.shape[:-1], weights[0].shape[0])
    if out is not None:
        _check_out(out, shape, out_dtype, (x, *weights, *biases))
    impl, reason = _choose(impl, x, out_dtype)
    if impl == "fused":
        result = _fused(x, weights, biases, activation, out, out_dtype)
    elif impl == "unfused":
        result = _unfused(x, weights, biases, activation, out_dtype)
    else:
        result = matmul_reference(x, weights, biases, activation, out_dtype)
    record_run("matmul", impl, reason)
    if out is None:
        return result
    return out if result is out else out.copy_(result)


def _fused(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    activation: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    # A negated view (the imaginary part of a conjugate) would be read without its sign.
    x, *operands = [each.resolve_neg() for each in (x, *weights, *biases)]
    shape = (*x.shape[:-1], weights[0].shape[0])
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    shared = out is not None and any(_share_storage(out, each) for each in (x, *operands))
    if out is not None and out.dim() == 2 and not out.is_neg() and not shared:
        weights, biases = operands[: len(weights)], operands[len(weights) :]
        run_kernel(x, weights, biases, activation, out)
        return out
    result = _FusedMatmul.apply(x, activation, out_dtype, len(weights), *operands)
    return result.reshape(shape)


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _unfused(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    pre = [F.linear(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]
    return activation_reference(pre, activation).to(out_dtype)


def _choose(impl: str, x: torch.Tensor, out_dtype: torch.dtype) -> tuple[str, str]:
    """The implementation that runs, and why."""
    kernel_takes_it = x.dtype in _KERNEL_DTYPES and out_dtype in _KERNEL_DTYPES
    if impl == "fused" and not kernel_takes_it:
        raise UnsupportedError(
            argument="impl",
            expected="'unfused' or 'reference' for float64",
            got="'fused'",
            remedy="Choose one of these, or impl='auto'.",
        )
    if impl != "auto":
        return impl, "asked for by name"
    if x.device.type == "cuda":
        return "unfused", "torch.matmul is the default on GPUs"
    if not kernel_takes_it:
        return "reference", "the kernel has no float64"
    try:
        executor_for(x.device)
    except DeviceError:
        return "reference", "nothing runs kernels on this device"
    return "fused", "virtual ranks interpret the kernel"


def _as_list(value: Any, length: int, argument: str, is_list: bool) -> list[torch.Tensor]:
    """`value` as a list of `length` tensors, or [] for None."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor) and not is_list:
        return [value]
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence) or not is_list:
        expected = f"a list of {length} tensors, like weight" if is_list else "a tensor"
        raise ArgumentError(argument, expected, type(value).__name__, f"Pass {expected}.")
    if len(value) != length:
        raise ArgumentError(
            argument, f"{length} tensors, one for each weight", len(value), "Pass one for each."
        )
    return list(value)


def _check_operands(x: Any, weights: list[Any], biases: list[Any], activation: str) -> None:
    check_tensor("x", x)
    check_dtype_in("x", x.dtype, _DTYPES)
    check_min_ndim("x", x, 1, "[..., K]")
    if activation in GATES and len(weights) != 2:
        raise ArgumentError(
            "weight",
            f"two weights (gate, up) for {activation!r}",
            len(weights),
            "Pass weight=[gate, up], both [N, K].",
        )
    if not weights:
        raise ArgumentError("weight", "one weight or more", "an empty list", "Pass [N, K] tensors.")
    num_k = x.shape[-1]
    for i, weight in enumerate(weights):
        name = f"weight[{i}]" if len(weights) > 1 else "weight"
        check_tensor(name, weight)
        check_same_dtype(name, weight, "x", x)
        check_same_device(name, weight, "x", x)
        num_n = weights[0].shape[0] if activation in GATES and i else "N"
        check_shape(name, weight, (num_n, num_k), "K of x", "Weights are [N, K], as in nn.Linear.")
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):  # none, or all
        name = f"bias[{i}]" if len(weights) > 1 else "bias"
        check_tensor(name, bias)
        check_same_dtype(name, bias, "x", x)
        check_same_device(name, bias, "x", x)
        check_shape(name, bias, (weight.shape[0],), "N of weight", "Pass one number per row.")


def _check_out(out: Any, shape: tuple[int, ...], out_dtype: torch.dtype, inputs: Tensors) -> None:
    check_tensor("out", out)
    check_dtype_in("out", out.dtype, (out_dtype,))
    check_same_device("out", out, "x", inputs[0])
    check_shape("out", out, shape, "x.shape[:-1] and N of weight", "Pass a tensor of this shape.")
    if torch.is_grad_enabled() and any(each.requires_grad for each in (out, *inputs)):
        raise ArgumentError(
            "out",
            "no gradients to compute",
            "an input or out that requires grad",
            "Leave out=None, or call inside torch.no_grad().",
        )


__all__ = ["matmul", "run_kernel"]
