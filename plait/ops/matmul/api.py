"""`plait.matmul`: a linear layer's product with scales, bias, activation or gate in its epilogue.

Shapes: x [..., K], weight [N, K] as in `torch.nn.Linear`, bias [N], result [..., N]; or batches,
x [B, M, K], weight [B, N, K], result [B, M, N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.backends.base import executor_for
from plait.checks import check_one_of
from plait.device import device_info
from plait.errors import ArgumentError, DeviceError, UnsupportedError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.fused import config_for, fused_matmul
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.planned import MatmulPlan, find_plan, keep_plan, signature
from plait.ops.matmul.product import Product
from plait.ops.matmul.reference import ACTIVATIONS, GATES, matmul_reference
from plait.ops.matmul.unfused import torch_has_kernel, unfused_matmul
from plait.ops.matmul.validate import as_list, check_product
from plait.runtime.record import record_run

_PLANNED_DTYPES = (torch.bfloat16, torch.float16)
_IMPLS = ("auto", "fused", "unfused", "reference")

Tensors = Sequence[torch.Tensor]


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | Tensors | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | Tensors | None = None,
    activation: str | None = None,
    out: torch.Tensor | Tensors | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    fast_accum: bool = False,
    impl: str = "auto",
    config: Config | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """activation(scale * (x @ weight^T) + bias), accumulated in fp32 and rounded once.

    Args:
        x: [..., K], any strides; float32 (with TF32 where torch's flag allows it), bfloat16,
            float16, float8_e4m3fn, float8_e5m2, int8 (float64: reference and unfused only).
        weight: [N, K], any strides (`stored.t()` of a [K, N] too), or [B, N, K] with x [B, M, K];
            dtype of x, or any fp8 with fp8. Or a list: with "swiglu" and "geglu" it is the list
            (gate, up); otherwise a list gives a list of results, one for each weight.
        bias: [N], or a matrix of the shape of the result; dtype of x (fp8, int8: float32) or of
            the result. A list as long as the weights if those are a list.
        x_scale: fp32, needed for fp8 and for int8 with a scaled result. One number, or one a row
            [..., M], or one a row and 128 of K [..., M, ceil(K / 128)]; values are x times scale.
        weight_scale: the same for the weight: one number, or [N], or, with the last kind of
            x_scale, [ceil(N / 128), ceil(K / 128)]; B in front if batched. A list for a list.
        activation: None, "gelu" (error function), "gelu_tanh", "silu", "relu", or a gate:
            "swiglu" silu(x @ gate^T) * (x @ up^T), "geglu" with gelu. None for int32 results.
        out: [..., N] to write to, any strides (a list where a list is returned); needs gradients
            disabled.
        out_dtype: dtype of the result, by default that of `out`, else of x; for fp8 and scaled
            int8 bfloat16. int8 without scales gives exactly int32.
        accumulate: add to what `out` holds, without an activation.
        fast_accum: let fp8 sums stay in the tensor core's short accumulator.
        impl: "fused" (one kernel), "unfused" (torch's product, then the rest; operands that torch
            has no product for are converted), "reference" (fp32 throughout), or "auto";
            `plait.last_run()` says which ran.
        config: tile sizes for the fused kernel, which runs exactly these; None to have them chosen.

    Returns:
        [..., N], or a list of them. Zero sizes are allowed; K = 0 gives activation(bias). fp8 and
        int8 are not differentiable.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ArgumentError: an argument does not fit.
        UnsupportedError: impl="fused" with float64, or with a gate of fp8 or int8.
    """
    plan_key = None
    if impl == "fused" and config is None and out is None and x_scale is None and not accumulate:
        plan_key = _plan_key(x, weight, bias, activation, out_dtype)
        plan = None if plan_key is None else find_plan(plan_key)
        if plan is not None:
            record_run("matmul", "fused", "asked for by name", "planned")
            return plan.run(x, weight, bias)  # type: ignore[arg-type]
    activation = activation or "none"
    check_one_of("activation", activation, (*ACTIVATIONS, *GATES))
    check_one_of("impl", impl, _IMPLS)
    if config is not None and impl in ("unfused", "reference"):
        remedy = "Leave config out, or choose impl='fused'."
        raise ArgumentError("config", f"None for impl={impl!r}", "a config", remedy)
    is_list = not isinstance(weight, torch.Tensor)
    weights = list(weight) if is_list else [weight]
    biases = as_list(bias, len(weights), "bias", is_list)
    scales = as_list(weight_scale, len(weights), "weight_scale", is_list)
    separate = is_list and activation not in GATES
    outs = as_list(out, len(weights) if separate else 1, "out", separate)
    count = len(weights)
    marks = [f"[{i}]" for i in range(count)] if count > 1 else [""] * count
    parts = [slice(i, i + 1) for i in range(count)] if separate and weights else [slice(None)]
    products = [
        check_product(
            x,
            weights[part],
            biases[part],
            activation=activation,
            x_scale=x_scale,
            weight_scales=scales[part],
            out=next(iter(outs[part]), None),
            out_dtype=out_dtype,
            accumulate=accumulate,
            fast_accum=fast_accum,
            config=config,
            marks=marks[part],
        )
        for part in parts
    ]
    results = [_run(product, impl) for product in products]
    if plan_key is not None and results[0].numel():
        keep_plan(plan_key, _plan(products[0]))
    return results if separate else results[0]


def _plan_key(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | Tensors | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> tuple[object, ...] | None:
    """The signature of a call that a plan may serve; None for all others."""
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return None
    if not x.is_cuda or x.dtype not in _PLANNED_DTYPES or activation in GATES:
        return None
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.dim() != 1):
        return None
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in tensors):
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return None
    if torch.compiler.is_compiling() or any(each.is_neg() for each in tensors):
        return None
    if not x.is_contiguous() or weight.dim() != 2 or x.device.index != torch.cuda.current_device():
        return None
    return signature(x, weight, bias, activation, out_dtype)


def _plan(product: Product) -> MatmulPlan:
    """The plan of a call that has just run, and so is right."""
    info = device_info(product.x.device)
    bias = product.biases[0] if product.biases else None
    return MatmulPlan(
        product.x,
        product.weights[0],
        bias,
        product.activation,
        product.out_dtype,
        config_for(product.flat(), info),
        info.num_sms,
    )


def _run(product: Product, impl: str) -> torch.Tensor:
    impl, reason = _choose(product, impl)
    if impl == "fused":
        result = fused_matmul(product)
    elif impl == "unfused":
        result = unfused_matmul(product)
    else:
        result = _reference(product)
    record_run("matmul", impl, reason)
    if product.out is None or result is product.out:
        return result
    return product.out.copy_(result)


def _reference(product: Product) -> torch.Tensor:
    flat = product.flat()
    scaling = None
    if flat.scalings:
        first = flat.scalings[0]
        scaling = (first.kind, first.x, [each.weight for each in flat.scalings])
    result = matmul_reference(
        flat.x,
        flat.weights,
        flat.biases,
        flat.activation,
        flat.out_dtype,
        scaling=scaling,
        addend=flat.addend,
    )
    return result.reshape(product.shape)


def _choose(product: Product, impl: str) -> tuple[str, str]:
    """The implementation that runs, and why."""
    instead, why = _kernel_refuses(product)
    if instead and (impl == "fused" or product.config is not None):
        if product.config is not None:
            remedy = "Leave config out: no kernel takes these operands."
            raise UnsupportedError("config", f"None for {why}", "a config", remedy)
        remedy = "Choose one of these, or impl='auto'."
        raise UnsupportedError("impl", f"{instead} for {why}", "'fused'", remedy)
    if impl != "auto":
        return impl, "asked for by name"
    if product.config is not None:
        return "fused", "a config was asked for"
    if product.x.is_cuda:
        if instead or torch_has_kernel(product):
            return "unfused", "torch.matmul is the default on GPUs"
        return "fused", "torch has no kernel for these operands"
    if instead:
        return "reference", f"the kernel does not take {why}"
    try:
        executor_for(product.x.device)
    except DeviceError:
        return "reference", "nothing runs kernels on this device"
    return "fused", "virtual ranks interpret the kernel"


def _kernel_refuses(product: Product) -> tuple[str, str]:
    """Which implementations serve what the kernel does not take, and what that is; else ''."""
    others = "'unfused' or 'reference'"
    if torch.float64 in (product.x.dtype, product.out_dtype):
        return others, "float64"
    if product.quantized and product.activation in GATES:
        return others, f"a gate of {product.x.dtype}"
    if product.x.dtype in FP8_DTYPES:
        arch = device_info(product.x.device).arch
        if arch.startswith("sm") and int(arch[2:]) < 89:
            return others, f"fp8 on {arch}"
    return "", ""


__all__ = ["matmul"]
