"""`plait.gemm_rs`: GEMM + ReduceScatter, each tile sent to its owner as soon as it is computed.

Method: Flux (arXiv 2406.06858); the own rows come last and add the partials that have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.checks import check_min_ndim, check_one_of, check_tensor, normalize_dim
from plait.overlap import register as _register  # noqa: F401 - forward and backward call these
from plait.overlap.common.direct import needs_grad, nobody_listens
from plait.overlap.common.gradients import as_list, check_main_grads, weight_gradient
from plait.overlap.common.quantized import (
    check_call,
    default_out_dtype,
    default_reduce_dtype,
)
from plait.overlap.gemm_rs.run import ALGORITHMS, forward
from plait.symm.group import Group


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    scatter_dim: int = 0,
    rows_per_rank: Sequence[int] | None = None,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad: torch.Tensor | None = None,
    impl: str = "auto",
    algorithm: str = "auto",
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share along scatter_dim of sum over ranks(x @ weight^T), plus bias once.

    Args:
        x: [..., K] with this rank's K, any strides, [M, K] as a rule; fp32, bf16, fp16, or, with
            scales and without gradients, float8_e4m3fn, float8_e5m2, int8.
        weight: [N, K], any strides; N is the same on every rank.
        bias: [N], added once, to the own rows after the sum; where N is shared out, the bias of the
            own columns. Its gradient is that of the own rows.
        group: the ranks.
        scatter_dim: dim of the result that is shared out. The last dim (N) runs unfused.
        rows_per_rank: every rank's size along scatter_dim (0 allowed); default equal shares.
        reduce_dtype: dtype in which partial sums travel: fp32, bf16 or fp16, default that of x,
            bf16 for fp8 and int8, whose scales are applied before.
        out_dtype: fp32, bf16 or fp16; default the dtype of x, bf16 for fp8 and int8.
        main_grad: fp32 tensor like weight; the weight gradient is added there and weight.grad
            stays None.
        impl: "fused", "unfused", "reference", or "auto"; `plait.last_run()` says what ran.
        algorithm: of the fused kernel: "direct" (a kernel stores each tile into its owner's
            memory), "staged" (copy engines move each rank's rows when they are computed; for links
            over which a kernel's stores are slow; shares must be consecutive rows), or "auto", by
            the link. Every rank must choose alike.
        x_scale: fp32 scales of this rank's x: one number, or one a row [..., M], or one a row and
            128 of K [..., M, ceil(K / 128)]. Values are x times scale. They stay here.
        weight_scale: fp32, one number, or [N], or, with the last kind of x_scale, [ceil(N / 128),
            ceil(K / 128)].

    Returns:
        [..., N] with this rank's size along scatter_dim. Partial sums are rounded to reduce_dtype,
        added in fp32 in rank order and rounded once more: the same bits on every run.

    Raises:
        ShapeError, DtypeError, DeviceError, RankCountError, GroupError, CapacityError,
        UnsupportedError: before any rank waits. PeerTimeoutError: a peer never came.

    The gradient of x is an AG+GEMM of the output's gradient, whose gathered rows the weight's
    gradient uses.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_min_ndim("x", x, 2, "[..., K]")
    main_grads = as_list("main_grad", main_grad)
    check_main_grads(main_grads, [weight])
    check_call(x, x_scale, [] if weight_scale is None else [weight_scale], (weight, bias))
    dim = normalize_dim("scatter_dim", scatter_dim, x.dim())
    check_one_of("algorithm", algorithm, ALGORITHMS)
    arguments = (
        x, weight, bias, group.name, dim, list(rows_per_rank or []),
        reduce_dtype or default_reduce_dtype(x), out_dtype or default_out_dtype(x, x_scale), impl,
    )  # fmt: skip
    if needs_grad((x, weight, bias)):
        return _GemmRs.apply(*arguments, algorithm, main_grads)
    return _run(*arguments, algorithm, x_scale, weight_scale)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    scatter_dim: int,
    rows: list[int],
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    impl: str,
    algorithm: str,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    direct = nobody_listens((x, weight, bias, x_scale, weight_scale))
    operator = forward if direct else torch.ops.plait.gemm_rs
    return operator(
        x, weight, bias, group, scatter_dim, rows, reduce_dtype, out_dtype, impl, None, x_scale,
        weight_scale, algorithm,
    )[0]  # fmt: skip


class _GemmRs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: str,
        scatter_dim: int,
        rows: list[int],
        reduce_dtype: torch.dtype,
        out_dtype: torch.dtype,
        impl: str,
        algorithm: str,
        main_grads: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (group, scatter_dim, rows, impl)
        ctx.main_grads, ctx.has_bias = main_grads, bias is not None
        return _run(
            x, weight, bias, group, scatter_dim, rows, reduce_dtype, out_dtype, impl, algorithm
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group, dim, rows, impl = ctx.options
        need_x, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        own = grad.to(x.dtype)
        grad_x: Any = None
        whole: Any = None
        if need_x:
            results = torch.ops.plait.ag_gemm(
                own, [weight.t()], [], group, dim, rows, "none", x.dtype, impl, need_weight, False
            )
            grad_x, whole = results[0], results[-1]
        elif need_weight:
            whole = torch.ops.plait.all_gather(own, group, dim, rows, impl)
        grad_weight: Any = None
        if need_weight:
            main_grad = ctx.main_grads[0] if ctx.main_grads else None
            grad_weight = weight_gradient(whole.flatten(0, -2), x.flatten(0, -2), main_grad)
        grad_bias: Any = None
        if ctx.has_bias:
            grad_bias = own.flatten(0, -2).sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None, None, None


__all__ = ["gemm_rs"]
