"""fp8 and int8 operands of the overlapped GEMMs: checks, default dtypes, kernel arguments.

Scales are those of `plait.matmul`: one number, one a row (of x) or column (of the result), or one a
1 x 128 block of x and a 128 x 128 block of the weight. They are applied in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.checks import check_tensor
from plait.collectives.all_gather import gather_whole
from plait.device import device_info
from plait.errors import ArgumentError, DtypeError, ShapeError
from plait.ops.matmul.configs import Config

# How far fp8 sums may stay in the tensor cores' short accumulator is one rule for all GEMMs.
from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.launch import fp8_step as matmul_fp8_step
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.product import QUANTIZED_DTYPES
from plait.ops.matmul.reference import GATES
from plait.ops.matmul.scales import check_scales
from plait.overlap.common.direct import needs_grad
from plait.overlap.common.operands import Weights
from plait.symm.group import Group, check_belongs

_LEAST_FP8_ARCH = 89  # compute capability whose tensor cores take fp8


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether operands of this dtype come with scales: fp8 and int8."""
    return dtype in QUANTIZED_DTYPES


def default_out_dtype(x: torch.Tensor, x_scale: torch.Tensor | None) -> torch.dtype:
    """Dtype of a result by default: that of x, bf16 for fp8 and scaled int8, else int32."""
    if not is_quantized(x.dtype):
        return x.dtype
    return torch.int32 if x.dtype is torch.int8 and x_scale is None else torch.bfloat16


def default_reduce_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which partial sums travel by default: that of x, bf16 for fp8 and int8."""
    return torch.bfloat16 if is_quantized(x.dtype) else x.dtype


# --- checks
def check_call(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scales: Sequence[torch.Tensor],
    others: Iterable[torch.Tensor | None],
) -> None:
    """Raise ArgumentError for scales of float operands, and for gradients of fp8 or int8.

    `others`: the weights and biases.
    """
    for name, scales in (("x_scale", [x_scale]), ("weight_scale", weight_scales)):
        for scale in scales:
            if scale is not None:
                check_tensor(name, scale)
    if not is_quantized(x.dtype):
        for name, given in (("x_scale", x_scale is not None), ("weight_scale", weight_scales)):
            if given:
                remedy = "Scale x or weight itself; scales are for fp8 and int8."
                raise ArgumentError(name, f"None for {x.dtype}", "a tensor", remedy)
        return
    named = [("x", x), *(("weight or bias", each) for each in others)]
    named += [("x_scale", x_scale), *(("weight_scale", each) for each in weight_scales)]
    for name, tensor in named:
        if needs_grad((tensor,)):
            raise ArgumentError(
                name,
                f"no gradient for {x.dtype} operands",
                "requires_grad=True",
                "Detach it, or call inside torch.no_grad().",
            )


def check_operand_scales(
    group: Group,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    x_scale: torch.Tensor | None,
    weight_scales: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    *,
    summed: bool = False,
) -> tuple[Scaling, ...]:
    """One `Scaling` a weight, () where nothing is scaled; x [..., K] and weights [N, K] fit.

    The scales of x are flat, [rows], [1] or [rows, K / 128]: views if x_scale is contiguous.
    `summed`: results are summed over ranks, which takes no exact int32.
    """
    if weight_scales and len(weight_scales) != len(weights):
        raise ArgumentError(
            "weight_scale",
            f"one for each of {len(weights)} weights",
            f"{len(weight_scales)}",
            "Pass a list as long as the weights.",
        )
    marks = [f"[{i}]" for i in range(len(weights))] if len(weights) > 1 else [""]
    scalings = check_scales(x, weights, x_scale, weight_scales, marks)
    for name, scales in (("x_scale", [x_scale]), ("weight_scale", weight_scales)):
        for scale in scales:
            if scale is not None:
                check_belongs(name, scale, group)
    if len({scaling.kind for scaling in scalings}) > 1:
        raise ShapeError(
            "weight_scale",
            "scales of one kind for all weights",
            " and ".join(scaling.kind for scaling in scalings),
            "Scale all weights by columns, or all by blocks.",
        )
    if x.dtype is torch.int8:
        _check_int8(bool(scalings), out_dtype, summed)
    return scalings


def _check_int8(scaled: bool, out_dtype: torch.dtype, summed: bool) -> None:
    if not scaled and summed:
        remedy = "Pass x_scale and weight_scale; ones mean unscaled."
        raise ArgumentError("x_scale", "scales for torch.int8 that is summed", "None", remedy)
    if scaled == (out_dtype is torch.int32):
        expected = "a floating dtype with scales" if scaled else "torch.int32 without scales"
        raise DtypeError("out_dtype", expected, out_dtype, "Pass scales for a scaled result only.")


def why_unfused(
    x: torch.Tensor, scalings: Sequence[Scaling], activation: str, device: torch.device
) -> str | None:
    """What of an fp8 or int8 call the fused kernels do not take; None for all other calls."""
    if not is_quantized(x.dtype):
        return None
    if activation in GATES:
        return f"a gate of {x.dtype}"
    if not scalings:
        return "int8 without scales, whose result is int32"
    arch = device_info(device).arch
    if x.dtype in FP8_DTYPES and arch.startswith("sm") and int(arch[2:]) < _LEAST_FP8_ARCH:
        return f"fp8 on {arch}"
    return None


# --- exchange, where no kernel does it
def gather_scalings(
    group: Group,
    x: torch.Tensor,
    scalings: Sequence[Scaling],
    gather_dim: int,
    sizes: tuple[int, ...],
) -> tuple[Scaling, ...]:
    """The scalings of x [..., K] gathered along `gather_dim`, where rank r has `sizes[r]`."""
    if not scalings:
        return ()
    own = _as_rows(x, scalings[0], one_each=True)
    if scalings[0].kind == "blocks":
        flat = gather_whole(group, own, gather_dim, sizes).flatten(0, -2)
    else:
        flat = gather_whole(group, own.unsqueeze(-1), gather_dim, sizes).flatten()
    return tuple(replace(scaling, x=flat) for scaling in scalings)


def gathered_reference_scaling(
    group: Group, call: str, x: torch.Tensor, scalings: Sequence[Scaling]
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]] | None:
    """Kind, every rank's scales of x and the own weights', for `ag_gemm_reference`."""
    if not scalings:
        return None
    x_scales = group.exchange_tensor(call, _as_rows(x, scalings[0], one_each=True))
    return scalings[0].kind, x_scales, [scaling.weight for scaling in scalings]


def every_scaling(
    group: Group, call: str, x: torch.Tensor, scalings: Sequence[Scaling]
) -> list[tuple[str, torch.Tensor, torch.Tensor]] | None:
    """Every rank's own scaling of its one weight, for references that sum."""
    if not scalings:
        return None
    (own,) = scalings
    x_scales = group.exchange_tensor(call, _as_rows(x, own, one_each=False))
    weight_scales = group.exchange_tensor(call, own.weight)
    pairs = zip(x_scales, weight_scales, strict=True)
    return [(own.kind, x_scale, weight_scale) for x_scale, weight_scale in pairs]


def _as_rows(x: torch.Tensor, scaling: Scaling, *, one_each: bool) -> torch.Tensor:
    """Scales of x [..., K] as [...] or [..., K / 128]; `one_each`: also where one serves all."""
    scale = scaling.x
    if scale.dim() == 1 and scale.numel() == 1:
        return scale.expand(x.shape[:-1]) if one_each else scale
    return scale.view(*x.shape[:-1], *scale.shape[1:])


# --- kernel arguments
def fp8_step(x: torch.Tensor, sum_dtype: torch.dtype, config: Config) -> int:
    """After how many products fp8 sums move to fp32; 0: never, or no fp8.

    `sum_dtype` is what the tile is rounded to.
    """
    return matmul_fp8_step(x, x.new_empty(0, dtype=sum_dtype), False, config)


def product_args(
    x: torch.Tensor, weights: Weights, sum_dtype: torch.dtype, config: Config
) -> dict[str, Any]:
    """Arguments of `product_tile` for scaled operands, none for others: kernels have defaults.

    The kernel's rows of x are those of the scales, if it says nothing else.
    """
    if not weights.scalings:
        return {}
    (scaling,) = weights.scalings
    return {
        "x_scale_ptr": scaling.x,
        "w_scale_ptr": scaling.weight,
        **_strides("x", "m", scaling.x),
        **_strides("w", "n", scaling.weight),
        "SCALES": scaling.kind,
        "INTEGER": x.dtype is torch.int8,
        "FP8_STEP": fp8_step(x, sum_dtype, config),
    }


def _strides(name: str, row: str, scale: torch.Tensor) -> dict[str, int]:
    """Strides along rows, 0 for one scale of all, and along blocks of K, 1 if there are none."""
    return {
        f"stride_{name}s{row}": scale.stride(0) if scale.numel() > 1 else 0,
        f"stride_{name}sk": scale.stride(1) if scale.dim() == 2 else 1,
    }


__all__ = [
    "check_call",
    "check_operand_scales",
    "default_out_dtype",
    "default_reduce_dtype",
    "every_scaling",
    "fp8_step",
    "gather_scalings",
    "gathered_reference_scaling",
    "is_quantized",
    "product_args",
    "why_unfused",
]
