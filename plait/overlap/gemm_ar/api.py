"""`plait.gemm_ar`: GEMM + AllReduce, each tile exchanged as soon as it is computed."""

from __future__ import annotations

from typing import Any

import torch

from plait.checks import check_min_ndim, check_one_of, check_tensor
from plait.overlap import register as _register  # noqa: F401 - forward and backward call these
from plait.overlap.common.direct import needs_grad, nobody_listens
from plait.overlap.common.gradients import as_list, check_main_grads, weight_gradient
from plait.overlap.common.quantized import (
    check_call,
    default_out_dtype,
    default_reduce_dtype,
)
from plait.overlap.gemm_ar.run import forward
from plait.symm.group import Group


def gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad: torch.Tensor | None = None,
    replicated_grad: bool = False,
    algorithm: str = "auto",
    impl: str = "auto",
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over ranks(x @ weight^T) + bias, the same bits on every rank.

    Args:
        x: [..., K] with this rank's K, any strides, as many rows everywhere; fp32, bf16, fp16, or,
            with scales and without gradients, float8_e4m3fn, float8_e5m2, int8.
        weight: [N, K], any strides; N is the same on every rank.
        bias: [N], the same on every rank, added once.
        group: the ranks.
        reduce_dtype: dtype in which partial sums travel: fp32, bf16 or fp16, default that of x,
            bf16 for fp8 and int8, whose scales are applied before.
        out_dtype: fp32, bf16 or fp16; default the dtype of x, bf16 for fp8 and int8.
        main_grad: fp32 tensor like weight; the weight gradient is added there and weight.grad
            stays None.
        replicated_grad: the ranks go on with the result identically, so that each already has
            the whole gradient of it (Megatron's convention). By default their gradients are summed,
            as torch.distributed.nn does.
        algorithm: "one_shot" (every rank sums all; few rows), "two_shot" (owners sum and send)
            or "auto".
        impl: "fused", "unfused", "reference", or "auto"; `plait.last_run()` says what ran.
        x_scale: fp32 scales of this rank's x: one number, or one a row [..., M], or one a row and
            128 of K [..., M, ceil(K / 128)]. Values are x times scale. They stay here.
        weight_scale: fp32, one number, or [N], or, with the last kind of x_scale, [ceil(N / 128),
            ceil(K / 128)].

    Returns:
        [..., N] on every rank. Partial sums are rounded to reduce_dtype, added in fp32 in rank
        order and rounded once more.

    Raises:
        ShapeError, DtypeError, DeviceError, GroupError, CapacityError, UnsupportedError: before any
        rank waits. PeerTimeoutError: a peer never came.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_min_ndim("x", x, 2, "[..., K]")
    main_grads = as_list("main_grad", main_grad)
    check_main_grads(main_grads, [weight])
    check_call(x, x_scale, [] if weight_scale is None else [weight_scale], (weight, bias))
    check_one_of("algorithm", algorithm, ("auto", "one_shot", "two_shot"))
    arguments = (
        x, weight, bias, group.name, reduce_dtype or default_reduce_dtype(x),
        out_dtype or default_out_dtype(x, x_scale), algorithm, impl,
    )  # fmt: skip
    if needs_grad((x, weight, bias)):
        return _GemmAr.apply(*arguments, replicated_grad, main_grads)
    return _run(*arguments, x_scale, weight_scale)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    algorithm: str,
    impl: str,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    direct = nobody_listens((x, weight, bias, x_scale, weight_scale))
    operator = forward if direct else torch.ops.plait.gemm_ar
    return operator(
        x, weight, bias, group, reduce_dtype, out_dtype, algorithm, impl, x_scale, weight_scale
    )


class _GemmAr(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: str,
        reduce_dtype: torch.dtype,
        out_dtype: torch.dtype,
        algorithm: str,
        impl: str,
        replicated_grad: bool,
        main_grads: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (group, impl, replicated_grad)
        ctx.main_grads, ctx.has_bias = main_grads, bias is not None
        return _run(x, weight, bias, group, reduce_dtype, out_dtype, algorithm, impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group, impl, replicated = ctx.options
        own = grad.to(x.dtype)
        # The bias is added on every rank's own result, so its gradient is that of the own result.
        grad_bias = own.flatten(0, -2).sum(0) if ctx.has_bias else None
        whole = own if replicated else torch.ops.plait.all_reduce(own, group, None, "auto", impl)
        grad_x = torch.matmul(whole, weight) if ctx.needs_input_grad[0] else None
        grad_weight: Any = None
        if ctx.needs_input_grad[1]:
            main_grad = ctx.main_grads[0] if ctx.main_grads else None
            grad_weight = weight_gradient(whole.flatten(0, -2), x.flatten(0, -2), main_grad)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None, None


__all__ = ["gemm_ar"]
