"""AG+GEMM and its backward on real tensors: checks, choice of implementation, allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from plait.checks import check_min_ndim, check_shape
from plait.collectives.all_gather import gather_whole
from plait.collectives.segments import Segments
from plait.collectives.sizes import gathered_sizes
from plait.errors import ArgumentError, UnsupportedError
from plait.ops.matmul.reference import GATES, matmul_reference
from plait.overlap.ag_gemm.launch import run_ag_gemm
from plait.overlap.ag_gemm.reference import ag_gemm_reference
from plait.overlap.common import plans
from plait.overlap.common.chooser import Sizes, choose
from plait.overlap.common.operands import Weights
from plait.overlap.common.quantized import (
    check_operand_scales,
    gather_scalings,
    gathered_reference_scaling,
    is_quantized,
    why_unfused,
)
from plait.overlap.common.row_scales import RowScales
from plait.overlap.common.unfused import linears
from plait.overlap.common.validate import check_operands
from plait.symm.group import Group, get_group


def forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    group_name: str,
    gather_dim: int,
    rows_per_rank: list[int],
    activation: str,
    out_dtype: torch.dtype,
    impl: str,
    return_gathered: bool,
    save_pre: bool,
    x_scale: torch.Tensor | None = None,
    weight_scales: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """The implementation of `plait::ag_gemm`."""
    group = get_group(group_name)
    if x_scale is not None:
        x_scale = x_scale.contiguous()
    key = None
    if plans.available(group):
        key = (
            "ag_gemm", plans.layout(x), plans.layouts(weights), plans.layouts(biases), gather_dim,
            tuple(rows_per_rank), activation, out_dtype, impl, return_gathered, save_pre,
            plans.precision_of(x.dtype), plans.layout(x_scale), plans.layouts(weight_scales),
        )  # fmt: skip
        plan = plans.find(group, key)
        if plan is not None:
            inputs = _inputs(x.contiguous(), weights, biases, x_scale, weight_scales)
            return plan.run(group, inputs)
    check_min_ndim("x", x, 2, "[..., K]")
    check_operands(group, x, weights, biases, activation, out_dtype, impl)
    sizes = gathered_sizes(x.shape[gather_dim], group.rank, group.world_size, rows_per_rank)
    last_dim = gather_dim == x.dim() - 1
    features = sum(sizes) if last_dim else x.shape[-1]
    for weight in weights:
        check_shape(
            "weight", weight, ("N", features), "K of the gathered x", "Pass weight as [N, K]."
        )
    scalings = check_operand_scales(group, x, weights, x_scale, weight_scales, out_dtype)
    if is_quantized(x.dtype):
        _check_quantized(x, last_dim, save_pre)
    shape = [*x.shape]
    shape[gather_dim] = sum(sizes)
    num_cols = sum(weight.shape[0] for weight in weights) * group.world_size
    chosen = choose(
        "ag_gemm",
        group,
        impl,
        "gather_dim is the last dim, which is K"
        if last_dim
        else why_unfused(x, scalings, activation, group.device),
        Sizes(math.prod(shape[:-1]), num_cols, features, x.dtype, x.dtype.itemsize),
    )
    if chosen == "fused":
        return _fused(group, x, Weights(tuple(weights), tuple(biases), scalings), gather_dim,
                      sizes, shape, activation, out_dtype, return_gathered, save_pre, x_scale,
                      key)  # fmt: skip
    if chosen == "reference":
        xs = group.exchange_tensor("ag_gemm reference", x)
        gathered = torch.cat(xs, dim=gather_dim)
        outs, pres = ag_gemm_reference(
            xs, weights, biases, gather_dim, activation, out_dtype,
            scaling=gathered_reference_scaling(group, "ag_gemm reference", x, scalings),
        ), []  # fmt: skip
    else:
        gathered = gather_whole(group, x, gather_dim, sizes)
        scalings = gather_scalings(group, x, scalings, gather_dim, sizes)
        outs, pres = linears(gathered, weights, biases, activation, out_dtype, scalings)
    if not save_pre:
        pres = []
    elif chosen == "reference":
        pres = [
            matmul_reference(gathered, [w], biases[i : i + 1], "none")
            for i, w in enumerate(weights)
        ]
    return outs + ([gathered] if return_gathered else []) + pres


def _check_quantized(x: torch.Tensor, last_dim: bool, save_pre: bool) -> None:
    """Raise for what fp8 and int8 have no meaning for."""
    if last_dim:
        raise UnsupportedError(
            "gather_dim",
            f"a dim of rows for {x.dtype}, whose scales are gathered along",
            "the last dim, which is K",
            "Gather x with plait.all_gather, then call plait.matmul.",
        )
    if save_pre:
        remedy = "Leave it out: fp8 and int8 have no gradient."
        raise ArgumentError("save_pre", f"False for {x.dtype}", "True", remedy)


def _fused(
    group: Group,
    x: torch.Tensor,
    weights: Weights,
    gather_dim: int,
    sizes: tuple[int, ...],
    shape: list[int],
    activation: str,
    out_dtype: torch.dtype,
    return_gathered: bool,
    save_pre: bool,
    x_scale: torch.Tensor | None,
    key: plans.Key | None,
) -> list[torch.Tensor]:
    segments = Segments.of(x.shape, gather_dim, sizes)
    all_weights, biases = list(weights.weights), list(weights.biases)
    num_outs = 1 if activation in GATES else weights.count
    outs = [x.new_empty([*shape[:-1], w.shape[0]], dtype=out_dtype) for w in all_weights[:num_outs]]
    pres = [x.new_empty([*shape[:-1], w.shape[0]]) for w in all_weights] if save_pre else []
    gathered = x.new_empty(shape) if return_gathered else None
    features = shape[-1]
    if features == 0:
        # Nothing to gather: every product is zero, on every rank.
        outs, pres = _without_features(x, weights, shape, activation, out_dtype)
        return outs + ([gathered] if gathered is not None else []) + (pres if save_pre else [])
    results = {f"out_{i}": out for i, out in enumerate(outs)}
    if gathered is not None:
        results["gathered"] = gathered
    results |= {f"pre_{i}": pre for i, pre in enumerate(pres)}
    if segments.total and segments.outer:
        rows = x.contiguous().view(-1, features)
        scales = None
        if weights.scalings:
            scales = RowScales.of(weights.scalings[0].x, segments, group.rank)
            if scales.copied:
                key = None  # a planned call would lack the copy
        weight_scales = [scaling.weight for scaling in weights.scalings]
        inputs = _inputs(rows, all_weights, biases, x_scale, weight_scales)
        with plans.recording(group, key, "ag_gemm, planned", inputs, results):
            run_ag_gemm(
                group,
                rows,
                weights,
                segments,
                [out.flatten(0, -2) for out in outs],
                [pre.flatten(0, -2) for pre in pres],
                activation,
                None if gathered is None else gathered.view(-1, features),
                scales,
            )
    return list(results.values())


def _without_features(
    x: torch.Tensor, weights: Weights, shape: list[int], activation: str, out_dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, pre-activations) where K is 0."""
    dtype = torch.float32 if is_quantized(x.dtype) else x.dtype
    empty = x.new_empty(shape, dtype=dtype)
    operands, biases = [w.to(dtype) for w in weights.weights], list(weights.biases)
    pres = [matmul_reference(empty, [w], biases[i : i + 1]) for i, w in enumerate(operands)]
    return ag_gemm_reference([empty], operands, biases, 0, activation, out_dtype), pres


def _inputs(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    x_scale: torch.Tensor | None,
    weight_scales: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The arguments that each call brings, by name; x and x_scale contiguous."""
    inputs = {"x": x}
    for i, weight in enumerate(weights):
        inputs[f"weight_{i}"] = weight
    for i, bias in enumerate(biases):
        inputs[f"bias_{i}"] = bias
    if x_scale is not None:
        inputs["x_scale"] = x_scale
    for i, scale in enumerate(weight_scales):
        inputs[f"weight_scale_{i}"] = scale
    return inputs


__all__ = ["forward"]
