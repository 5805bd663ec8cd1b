"""GEMM+RS on real tensors: checks, choice of implementation, allocation."""

from __future__ import annotations

import torch

from plait.checks import check_min_ndim, check_shape
from plait.collectives.all_gather import gather_whole
from plait.collectives.reduce_scatter import reduce_scatter_partials
from plait.collectives.segments import Segments
from plait.collectives.sizes import scattered_sizes
from plait.errors import UnsupportedError
from plait.overlap.common import plans
from plait.overlap.common.chooser import Sizes, choose
from plait.overlap.common.operands import Weights
from plait.overlap.common.quantized import check_operand_scales, every_scaling, why_unfused
from plait.overlap.common.trace import is_tracing
from plait.overlap.common.unfused import linear
from plait.overlap.common.validate import check_operands, check_reduce_dtype
from plait.overlap.gemm_rs.launch import Algorithm, Gather, run_gemm_rs
from plait.overlap.gemm_rs.reference import gemm_rs_reference
from plait.symm.group import Group, get_group

ALGORITHMS = ("auto", "direct", "staged")
# Over PCIe (55 GB/s) a kernel's stores reach 40 GB/s and hold its blocks up.
_DIRECT_FROM_GB_S = 100.0


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    scatter_dim: int,
    rows_per_rank: list[int],
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    impl: str,
    gather: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> list[torch.Tensor]:
    """The implementation of `plait::gemm_rs`."""
    group = get_group(group_name)
    if x_scale is not None:
        x_scale = x_scale.contiguous()
    key = None
    if plans.available(group):
        key = (
            "gemm_rs", plans.layout(x), plans.layout(weight), plans.layout(bias), scatter_dim,
            tuple(rows_per_rank), reduce_dtype, out_dtype, impl, plans.layout(gather),
            plans.precision_of(x.dtype), plans.layout(x_scale), plans.layout(weight_scale),
            algorithm,
        )  # fmt: skip
        plan = plans.find(group, key)
        if plan is not None:
            own = None if gather is None else gather.contiguous()
            return plan.run(
                group, _inputs(x.contiguous(), weight, bias, own, x_scale, weight_scale)
            )
    check_min_ndim("x", x, 2, "[..., K]")
    last_dim = scatter_dim == x.dim() - 1
    biases = [] if bias is None or last_dim else [bias]
    check_operands(group, x, [weight], biases, "none", out_dtype, impl)
    check_shape("weight", weight, ("N", x.shape[-1]), "K of x", "Pass weight as [N, K].")
    check_reduce_dtype(reduce_dtype, impl)
    weight_scales = [] if weight_scale is None else [weight_scale]
    scalings = check_operand_scales(
        group, x, [weight], x_scale, weight_scales, out_dtype, summed=True
    )
    size = weight.shape[0] if last_dim else x.shape[scatter_dim]
    sizes = scattered_sizes(size, group.world_size, rows_per_rank)
    if bias is not None and last_dim:
        own = weight[: sizes[group.rank]]  # the bias is that of the own columns
        check_operands(group, x, [own], [bias], "none", out_dtype, impl)
    features = x.shape[-1] * group.world_size
    chosen = choose(
        "gemm_rs",
        group,
        impl,
        "scatter_dim is the last dim, which is N"
        if last_dim
        else why_unfused(x, scalings, "none", group.device),
        Sizes(x.shape[:-1].numel(), weight.shape[0], features, x.dtype, reduce_dtype.itemsize),
    )
    if chosen == "fused":
        weights = Weights((weight,), () if bias is None else (bias,), scalings)
        return _fused(
            group,
            x,
            weights,
            scatter_dim,
            sizes,
            reduce_dtype,
            out_dtype,
            gather,
            x_scale,
            key,
            algorithm,
        )
    if chosen == "reference":
        call = "gemm_rs reference"
        xs, weights = group.exchange_tensor(call, x), group.exchange_tensor(call, weight)
        out = gemm_rs_reference(
            xs, weights, bias, group.rank, sizes, scatter_dim, reduce_dtype, out_dtype,
            scalings=every_scaling(group, call, x, scalings),
        )  # fmt: skip
    else:
        partial = linear(x, weight, scalings=scalings, out_dtype=reduce_dtype).to(reduce_dtype)
        out = _unfused(group, partial, bias, scatter_dim, sizes, out_dtype)
    return (
        [out] if gather is None else [out, gather_whole(group, gather, scatter_dim, sizes, chosen)]
    )


def choose_algorithm(group: Group, segments: Segments, algorithm: str = "auto") -> Algorithm:
    """ "direct" or "staged": `algorithm`, or by what is the same on every rank.

    UnsupportedError: staged rows that are not consecutive.
    """
    if algorithm == "direct":
        return "direct"
    if not segments.contiguous:
        if algorithm == "staged":
            raise UnsupportedError(
                "algorithm",
                "scatter_dim=0, so that a rank's rows are consecutive, for 'staged'",
                f"{segments.outer} pieces a rank",
                "Use 'auto' or 'direct', or scatter dim 0.",
            )
        return "direct"
    if algorithm == "staged":
        return "staged"
    link = group.transport.link_speed()
    slow = link is not None and link.gb_s < _DIRECT_FROM_GB_S
    # Stamps of tiles are those of the direct kernel.
    return "staged" if slow and group.world_size > 1 and not is_tracing() else "direct"


def _unfused(
    group: Group,
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    sizes: tuple[int, ...],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if bias is None:
        return reduce_scatter_partials(group, partial, scatter_dim, sizes, out_dtype=out_dtype)
    # In fp32 until the bias is in: one rounding.
    total = reduce_scatter_partials(group, partial, scatter_dim, sizes, out_dtype=torch.float32)
    return (total + bias.to(torch.float32)).to(out_dtype)


def _fused(
    group: Group,
    x: torch.Tensor,
    weights: Weights,
    scatter_dim: int,
    sizes: tuple[int, ...],
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    gather: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    key: plans.Key | None,
    algorithm: str,
) -> list[torch.Tensor]:
    weight, bias = weights.weights[0], next(iter(weights.biases), None)
    shape = [*x.shape[:-1], weight.shape[0]]
    segments = Segments.of(shape, scatter_dim, sizes)
    shape[scatter_dim] = sizes[group.rank]
    out = x.new_empty(shape, dtype=out_dtype)
    whole = None
    if gather is not None:
        whole_shape = list(gather.shape)
        whole_shape[scatter_dim] = sum(sizes)
        whole = gather.new_empty(whole_shape)
    results = [out] if whole is None else [out, whole]
    if segments.total == 0 or segments.outer == 0 or weight.shape[0] == 0:
        if gather is not None:
            results[1] = gather_whole(group, gather, scatter_dim, sizes)
        return results
    gathering = None
    if gather is not None and whole is not None and whole.numel():
        features = gather.shape[-1]
        gathering = Gather(gather.contiguous().view(-1, features), whole.view(-1, features))
    flat = (
        x.contiguous().view(-1, x.shape[-1])
        if x.shape[-1]
        else x.new_empty(x.shape[:-1].numel(), 0)
    )
    weight_scale = weights.scalings[0].weight if weights.scalings else None
    named = {"out": out} if whole is None else {"out": out, "whole": whole}
    own = None if gathering is None else gathering.x
    inputs = _inputs(flat, weight, bias, own, x_scale, weight_scale)
    with plans.recording(group, key, "gemm_rs, planned", inputs, named):
        run_gemm_rs(
            group,
            flat,
            weights,
            segments,
            out.view(-1, out.shape[-1]),
            reduce_dtype,
            gathering,
            choose_algorithm(group, segments, algorithm),
        )
    return results


def _inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The arguments that each call brings, by name; x, gather and x_scale contiguous."""
    inputs = {"x": x, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    if gather is not None:
        inputs["gather"] = gather
    if x_scale is not None:
        inputs["x_scale"] = x_scale
    if weight_scale is not None:
        inputs["weight_scale"] = weight_scale
    return inputs


__all__ = ["ALGORITHMS", "choose_algorithm", "forward"]
