"""AG+GEMM and its backward on real tensors: checks, choice of implementation, allocation."""

from __future__ import annotations

import math

import torch

from plait.checks import check_min_ndim, check_shape
from plait.collectives.all_gather import gather_whole
from plait.collectives.segments import Segments
from plait.collectives.sizes import gathered_sizes
from plait.ops.matmul.reference import GATES, matmul_reference
from plait.overlap.ag_gemm.launch import run_ag_gemm
from plait.overlap.ag_gemm.reference import ag_gemm_reference
from plait.overlap.common import plans
from plait.overlap.common.chooser import Sizes, choose
from plait.overlap.common.operands import Weights
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
) -> list[torch.Tensor]:
    """The implementation of `plait::ag_gemm`."""
    group = get_group(group_name)
    key = None
    if plans.available(group):
        key = (
            "ag_gemm", plans.layout(x), plans.layouts(weights), plans.layouts(biases), gather_dim,
            tuple(rows_per_rank), activation, out_dtype, impl, return_gathered, save_pre,
            plans.precision_of(x.dtype),
        )  # fmt: skip
        plan = plans.find(group, key)
        if plan is not None:
            return plan.run(group, _inputs(x.contiguous(), weights, biases))
    check_min_ndim("x", x, 2, "[..., K]")
    check_operands(group, x, weights, biases, activation, out_dtype, impl)
    sizes = gathered_sizes(x.shape[gather_dim], group.rank, group.world_size, rows_per_rank)
    last_dim = gather_dim == x.dim() - 1
    features = sum(sizes) if last_dim else x.shape[-1]
    for weight in weights:
        check_shape(
            "weight", weight, ("N", features), "K of the gathered x", "Pass weight as [N, K]."
        )
    shape = [*x.shape]
    shape[gather_dim] = sum(sizes)
    num_cols = sum(weight.shape[0] for weight in weights) * group.world_size
    chosen = choose(
        "ag_gemm",
        group,
        impl,
        "gather_dim is the last dim, which is K" if last_dim else None,
        Sizes(math.prod(shape[:-1]), num_cols, features, x.dtype, x.dtype.itemsize),
    )
    if chosen == "fused":
        return _fused(group, x, weights, biases, gather_dim, sizes, shape, activation, out_dtype,
                      return_gathered, save_pre, key)  # fmt: skip
    if chosen == "reference":
        xs = group.exchange_tensor("ag_gemm reference", x)
        gathered = torch.cat(xs, dim=gather_dim)
        outs, pres = ag_gemm_reference(xs, weights, biases, gather_dim, activation, out_dtype), []
    else:
        gathered = gather_whole(group, x, gather_dim, sizes)
        outs, pres = linears(gathered, weights, biases, activation, out_dtype)
    if not save_pre:
        pres = []
    elif chosen == "reference":
        pres = [
            matmul_reference(gathered, [w], biases[i : i + 1], "none")
            for i, w in enumerate(weights)
        ]
    return outs + ([gathered] if return_gathered else []) + pres


def _fused(
    group: Group,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    gather_dim: int,
    sizes: tuple[int, ...],
    shape: list[int],
    activation: str,
    out_dtype: torch.dtype,
    return_gathered: bool,
    save_pre: bool,
    key: plans.Key | None,
) -> list[torch.Tensor]:
    segments = Segments.of(x.shape, gather_dim, sizes)
    num_outs = 1 if activation in GATES else len(weights)
    outs = [x.new_empty([*shape[:-1], w.shape[0]], dtype=out_dtype) for w in weights[:num_outs]]
    pres = [x.new_empty([*shape[:-1], w.shape[0]]) for w in weights] if save_pre else []
    gathered = x.new_empty(shape) if return_gathered else None
    features = shape[-1]
    if features == 0:
        # Nothing to gather: every product is zero, on every rank.
        pre = [matmul_reference(x.new_empty([*shape[:-1], 0]), [w], biases[i : i + 1])
               for i, w in enumerate(weights)]  # fmt: skip
        outs = ag_gemm_reference([x.new_empty(shape)], weights, biases, 0, activation, out_dtype)
        return outs + ([gathered] if gathered is not None else []) + (pre if save_pre else [])
    results = {f"out_{i}": out for i, out in enumerate(outs)}
    if gathered is not None:
        results["gathered"] = gathered
    results |= {f"pre_{i}": pre for i, pre in enumerate(pres)}
    if segments.total and segments.outer:
        rows = x.contiguous().view(-1, features)
        inputs = _inputs(rows, weights, biases)
        with plans.recording(group, key, "ag_gemm, planned", inputs, results):
            run_ag_gemm(
                group,
                rows,
                Weights(tuple(weights), tuple(biases)),
                segments,
                [out.flatten(0, -2) for out in outs],
                [pre.flatten(0, -2) for pre in pres],
                activation,
                None if gathered is None else gathered.view(-1, features),
            )
    return list(results.values())


def _inputs(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The arguments that each call brings, by name; x contiguous."""
    inputs = {"x": x}
    for i, weight in enumerate(weights):
        inputs[f"weight_{i}"] = weight
    for i, bias in enumerate(biases):
        inputs[f"bias_{i}"] = bias
    return inputs


__all__ = ["forward"]
