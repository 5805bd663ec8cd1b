"""`plait.ag_gemm`: AllGather + GEMM, the gather hidden behind the GEMM tile by tile.

Method: Flux (arXiv 2406.06858), with tiles in arrival order and the copy engine as the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.checks import check_device, check_min_ndim, check_tensor, normalize_dim
from plait.ops.matmul.reference import GATES, activation_backward_reference
from plait.overlap import register as _register  # noqa: F401 - forward and backward call these
from plait.overlap.ag_gemm.run import forward
from plait.overlap.common.direct import needs_grad, nobody_listens
from plait.overlap.common.gradients import as_list, check_main_grads, weight_gradient
from plait.overlap.common.quantized import check_call, default_out_dtype
from plait.symm.group import Group


def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    rows_per_rank: Sequence[int] | None = None,
    activation: str | None = None,
    return_gathered: bool = False,
    out_dtype: torch.dtype | None = None,
    main_grad: torch.Tensor | Sequence[torch.Tensor] | None = None,
    impl: str = "auto",
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """activation(scale * (all_gather(x, gather_dim) @ weight^T) + bias).

    Args:
        x: this rank's shard [..., K], any strides, [M_r, K] as a rule; fp32, bf16, fp16, or, with
            scales and without gradients, float8_e4m3fn, float8_e5m2, int8.
        weight: [N, K] (any strides; a transposed [K, N] is read in place), or a list of weights
            that share the gather and give a list of results. "swiglu" and "geglu" take two,
            [gate, up]. Dtype of x, or any fp8 with fp8.
        bias: [N], or a list as long as the weights; dtype of x (fp8, int8: fp32 or out_dtype).
        group: the ranks; each has its own N.
        gather_dim: dim of x that the ranks share. The last dim (K) runs unfused.
        rows_per_rank: every rank's size along gather_dim where they differ (0 allowed).
        activation: "gelu" (erf), "gelu_tanh", "silu", "relu", "swiglu", "geglu" or None.
        return_gathered: also return the gathered x (of fp8 and int8 the values, not the scales).
        out_dtype: fp32, bf16 or fp16; default the dtype of x, bf16 for fp8 and scaled int8. int8
            without scales gives exactly int32, unfused.
        main_grad: fp32 tensor(s) like the weight(s); the weight gradient is added there and
            weight.grad stays None.
        impl: "fused", "unfused", "reference", or "auto"; `plait.last_run()` says what ran. A gate
            of fp8 or int8 runs unfused.
        x_scale: fp32 scales of this rank's shard, of one kind on all ranks: one number, or one a
            row [..., M_r], or one a row and 128 of K [..., M_r, ceil(K / 128)]. They are gathered
            along, ahead of the rows. Values are x times scale.
        weight_scale: fp32, one number, or [N], or, with the last kind of x_scale, [ceil(N / 128),
            ceil(K / 128)]. A list for a list of weights.

    Returns:
        [..., N] with the sum of all shards along gather_dim; a list for several weights without a
        gate; with return_gathered the pair (result, gathered x).

    Raises:
        ShapeError, DtypeError, DeviceError, RankCountError, GroupError, CapacityError,
        UnsupportedError: before any rank waits. PeerTimeoutError: a peer never came.

    The gradient of x is a GEMM+RS; x is not saved gathered but gathered again, behind that GEMM.
    """
    check_tensor("x", x)
    check_min_ndim("x", x, 2, "[..., K]")
    weights, biases = as_list("weight", weight), as_list("bias", bias)
    main_grads = as_list("main_grad", main_grad)
    weight_scales = as_list("weight_scale", weight_scale)
    check_call(x, x_scale, weight_scales, (*weights, *biases))
    for argument, tensors in (("x", [x]), ("weight", weights), ("bias", biases)):
        for tensor in tensors:
            if tensor.is_meta:  # for which the operator would only infer shapes
                check_device(argument, tensor, group.device, "group")
    check_main_grads(main_grads, weights)
    name = activation or "none"
    options = _Options(
        group.name,
        group.world_size,
        normalize_dim("gather_dim", gather_dim, x.dim()),
        list(rows_per_rank or []),
        name,
        out_dtype or default_out_dtype(x, x_scale),
        impl,
        return_gathered,
        len(weights),
        main_grads,
    )
    tensors = (x, *weights, *biases)
    if needs_grad(tensors):
        results = _AgGemm.apply(options, *tensors)
    else:
        # Less host time, and `torch.compile` counts arguments of a variadic forward wrongly here.
        results = _run(options, x, weights, biases, False, x_scale, weight_scales)
    outs = list(results[:-1]) if return_gathered else list(results)
    single = name in GATES or isinstance(weight, torch.Tensor)
    out = outs[0] if single else outs
    return (out, results[-1]) if return_gathered else out


@dataclass
class _Options:
    """The arguments of one call that `torch.compile` sees as constants, and the main_grads."""

    group: str
    world_size: int
    gather_dim: int
    rows: list[int]
    activation: str
    out_dtype: torch.dtype
    impl: str
    return_gathered: bool
    num_weights: int
    main_grads: list[torch.Tensor]

    @property
    def num_outs(self) -> int:
        """Number of results without the gathered x."""
        return 1 if self.activation in GATES else self.num_weights

    def sizes(self, x: torch.Tensor) -> list[int]:
        """Every rank's size along gather_dim."""
        return self.rows or [x.shape[self.gather_dim]] * self.world_size


def _run(
    options: _Options,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    save_pre: bool,
    x_scale: torch.Tensor | None = None,
    weight_scales: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    direct = nobody_listens((x, *weights, *biases, x_scale, *weight_scales))
    operator = forward if direct else torch.ops.plait.ag_gemm
    return operator(
        x, weights, biases, options.group, options.gather_dim, options.rows, options.activation,
        options.out_dtype, options.impl, options.return_gathered, save_pre, x_scale,
        list(weight_scales),
    )  # fmt: skip


class _AgGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: _Options, x: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = list(tensors[: options.num_weights]), list(tensors[options.num_weights :])
        save_pre = options.activation != "none"
        results = _run(options, x, weights, biases, save_pre)
        num_returned = options.num_outs + int(options.return_gathered)
        ctx.save_for_backward(x, *weights, *results[num_returned:])
        ctx.options, ctx.has_bias = options, bool(biases)
        return tuple(results[:num_returned])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        options, count = ctx.options, ctx.options.num_weights
        x, *saved = ctx.saved_tensors
        weights, pres = saved[:count], saved[count:]
        grad_pres = _through_activation(
            options.activation, grads[: options.num_outs], pres, x.dtype
        )
        need_x = ctx.needs_input_grad[1]
        needs_weight = ctx.needs_input_grad[2 : 2 + count]
        # One GEMM+RS for all weights: gradients side by side, weights on top of each other.
        grad = grad_pres[0] if count == 1 else torch.cat(grad_pres, dim=-1)
        joined = weights[0] if count == 1 else torch.cat(weights, dim=0)
        need_weight = any(needs_weight)
        rows = options.sizes(x)
        grad_x: Any = None
        gathered: Any = None
        if need_x:
            # While the gradient of x is computed and scattered, the copy engine gathers x again.
            results = torch.ops.plait.gemm_rs(
                grad, joined.t(), None, options.group, options.gather_dim, rows, x.dtype, x.dtype,
                options.impl, x if need_weight else None,
            )  # fmt: skip
            grad_x, gathered = results[0], results[-1]
        elif need_weight:
            gathered = torch.ops.plait.all_gather(
                x, options.group, options.gather_dim, rows, options.impl
            )
        if options.return_gathered and grads[options.num_outs] is not None and need_x:
            grad_x = grad_x + _scattered(grads[options.num_outs], x, options)
        grad_weights: list[Any] = [None] * count
        if need_weight:
            flat = gathered.flatten(0, -2)
            main_grads = options.main_grads or [None] * count
            grad_weights = [
                weight_gradient(each.flatten(0, -2), flat, main_grad) if need else None
                for each, main_grad, need in zip(grad_pres, main_grads, needs_weight, strict=True)
            ]
        grad_biases = (
            [g.flatten(0, -2).sum(0).to(x.dtype) for g in grad_pres] if ctx.has_bias else []
        )
        return (None, grad_x, *grad_weights, *grad_biases)


def _through_activation(
    activation: str, grads: Sequence[torch.Tensor], pres: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    if activation == "none":
        return [grad.to(dtype) for grad in grads]
    if activation in GATES:
        return [
            g.to(dtype) for g in activation_backward_reference(grads[0].to(dtype), pres, activation)
        ]
    pairs = zip(grads, pres, strict=True)
    return [
        activation_backward_reference(grad.to(dtype), [pre], activation)[0] for grad, pre in pairs
    ]


def _scattered(grad: torch.Tensor, x: torch.Tensor, options: _Options) -> torch.Tensor:
    return torch.ops.plait.reduce_scatter(
        grad, options.group, options.gather_dim, options.sizes(x), None, options.impl
    )


__all__ = ["ag_gemm"]
