"""GEMM+AR on real tensors: checks, choice of implementation and algorithm, allocation."""

from __future__ import annotations

import torch

from plait.checks import check_min_ndim, check_one_of, check_shape
from plait.collectives import all_reduce as _all_reduce  # noqa: F401 - registers plait::all_reduce
from plait.overlap.common import plans
from plait.overlap.common.chooser import Sizes, choose
from plait.overlap.common.operands import Weights
from plait.overlap.common.quantized import check_operand_scales, every_scaling, why_unfused
from plait.overlap.common.unfused import linear
from plait.overlap.common.validate import check_operands, check_reduce_dtype
from plait.overlap.gemm_ar.launch import choose_algorithm, run_gemm_ar
from plait.overlap.gemm_ar.reference import gemm_ar_reference
from plait.symm.group import get_group

ALGORITHMS = ("auto", "one_shot", "two_shot")


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    algorithm: str,
    impl: str,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The implementation of `plait::gemm_ar`."""
    group = get_group(group_name)
    if x_scale is not None:
        x_scale = x_scale.contiguous()
    key = None
    if plans.available(group):
        key = (
            "gemm_ar", plans.layout(x), plans.layout(weight), plans.layout(bias), reduce_dtype,
            out_dtype, algorithm, impl, plans.precision_of(x.dtype), plans.layout(x_scale),
            plans.layout(weight_scale),
        )  # fmt: skip
        plan = plans.find(group, key)
        if plan is not None:
            inputs = _inputs(x.contiguous(), weight, bias, x_scale, weight_scale)
            return plan.run(group, inputs)[0]
    check_min_ndim("x", x, 2, "[..., K]")
    check_operands(group, x, [weight], [] if bias is None else [bias], "none", out_dtype, impl)
    check_shape("weight", weight, ("N", x.shape[-1]), "K of x", "Pass weight as [N, K].")
    check_one_of("algorithm", algorithm, ALGORITHMS)
    check_reduce_dtype(reduce_dtype, impl)
    weight_scales = [] if weight_scale is None else [weight_scale]
    scalings = check_operand_scales(
        group, x, [weight], x_scale, weight_scales, out_dtype, summed=True
    )
    num_rows = x.shape[:-1].numel()
    named = choose_algorithm(num_rows, group.world_size) if algorithm == "auto" else algorithm
    features = x.shape[-1] * group.world_size
    sizes = Sizes(
        num_rows, weight.shape[0], features, x.dtype, reduce_dtype.itemsize,
        named,  # type: ignore[arg-type]
    )  # fmt: skip
    chosen = choose("gemm_ar", group, impl, why_unfused(x, scalings, "none", group.device), sizes)
    if chosen == "reference":
        xs = group.exchange_tensor("gemm_ar reference", x)
        weights = group.exchange_tensor("gemm_ar reference", weight)
        every = every_scaling(group, "gemm_ar reference", x, scalings)
        return gemm_ar_reference(xs, weights, bias, reduce_dtype, out_dtype, scalings=every)
    if chosen == "unfused":
        partial = linear(x, weight, scalings=scalings, out_dtype=reduce_dtype).to(reduce_dtype)
        if bias is not None or out_dtype != reduce_dtype:
            partial = partial.to(torch.float32)  # so that the sum is rounded once, after the bias
        total = torch.ops.plait.all_reduce(partial, group_name, None, "auto", "auto")
        choose("gemm_ar", group, impl, None, sizes)  # record this call, not the AllReduce in it
        return (total if bias is None else total + bias).to(out_dtype)
    out = x.new_empty([*x.shape[:-1], weight.shape[0]], dtype=out_dtype)
    if out.numel() == 0:
        return out
    flat = (
        x.contiguous().view(-1, x.shape[-1])
        if x.shape[-1]
        else x.new_empty(x.shape[:-1].numel(), 0)
    )
    weights = Weights((weight,), () if bias is None else (bias,), scalings)
    inputs = _inputs(flat, weight, bias, x_scale, weight_scale)
    with plans.recording(group, key, "gemm_ar, planned", inputs, {"out": out}):
        run_gemm_ar(group, flat, weights, out.view(-1, out.shape[-1]), reduce_dtype, named)  # type: ignore[arg-type]
    return out


def _inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The arguments that each call brings, by name; x and x_scale contiguous."""
    inputs = {"x": x, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    if x_scale is not None:
        inputs["x_scale"] = x_scale
    if weight_scale is not None:
        inputs["weight_scale"] = weight_scale
    return inputs


__all__ = ["forward"]
