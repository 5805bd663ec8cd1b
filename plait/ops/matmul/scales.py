"""Which scales fp8 and int8 operands of `plait.matmul` come with: one, one a row, or blocks.

Shapes: x [..., K], weight [N, K], or [B, M, K] and [B, N, K]. A `Scaling` has x flat, [M, K].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.checks import check_same_device, check_tensor
from plait.errors import ArgumentError, DtypeError, ShapeError
from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.product import QUANTIZED_DTYPES
from plait.ops.matmul.reference import SCALE_BLOCK

Shape = tuple[int, ...]


def check_scales(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    x_scale: Any,
    weight_scales: Sequence[Any],
    marks: Sequence[str],
) -> tuple[Scaling, ...]:
    """One `Scaling` for each weight; () where there are no scales.

    x_scale is one number, [..., M] or [..., M, 1] (one for each row of x), or [..., M, K / 128];
    a weight's is one number, [N], [N, 1] or [1, N], or [N / 128, K / 128], all with B in front if
    x is batched. Quotients are rounded up.
    """
    if x.dtype not in QUANTIZED_DTYPES:
        for name, value in (("x_scale", x_scale), ("weight_scale", weight_scales or None)):
            if value is not None:
                remedy = "Scale x or weight itself; scales are for fp8 and int8."
                raise ArgumentError(name, f"None for {x.dtype}", type(value).__name__, remedy)
        return ()
    if x_scale is None and not weight_scales and x.dtype not in FP8_DTYPES:
        return ()
    for name, missing in (("x_scale", x_scale is None), ("weight_scale", not weight_scales)):
        if missing:
            both = "" if x.dtype in FP8_DTYPES else ", or neither for an int32 result"
            remedy = f"Pass x_scale and weight_scale{both}; ones mean unscaled."
            raise ArgumentError(name, f"an fp32 tensor for {x.dtype}", "None", remedy)
    names = [f"weight_scale{mark}" for mark in marks]
    scales: list[Any] = [x_scale, *weight_scales]
    for name, scale in zip(["x_scale", *names], scales, strict=True):
        check_tensor(name, scale)
        if scale.dtype is not torch.float32:
            raise DtypeError(name, "torch.float32", scale.dtype, f"Pass {name}.float().")
        check_same_device(name, scale, "x", x)
    return tuple(
        _scaling(x, weight, scales[0], scale, name)
        for weight, scale, name in zip(weights, scales[1:], names, strict=True)
    )


def _scaling(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    name: str,
) -> Scaling:
    lead = tuple(weight.shape[:-2])
    rows, num_n, num_k = tuple(x.shape[:-1]), weight.shape[-2], x.shape[-1]
    flat_rows = rows if lead else (math.prod(rows),)
    k_blocks, n_blocks = -(-num_k // SCALE_BLOCK), -(-num_n // SCALE_BLOCK)
    x_rows = {(*each, *one) for each in (rows, flat_rows) for one in ((), (1,))}
    w_rows = {(*lead, num_n), (*lead, num_n, 1), (*lead, 1, num_n)}
    x_blocks = {(*rows, k_blocks), (*flat_rows, k_blocks)}
    w_blocks = {(*lead, n_blocks, k_blocks)}
    x_shape, w_shape = tuple(x_scale.shape), tuple(weight_scale.shape)
    if (x_scale.numel() == 1 or x_shape in x_rows) and (
        weight_scale.numel() == 1 or w_shape in w_rows
    ):
        return Scaling(
            "rows",
            _flat_rows(x_scale, x_shape in x_rows, flat_rows),
            _flat_rows(weight_scale, w_shape in w_rows, (*lead, num_n)),
        )
    if x_shape in x_blocks and w_shape in w_blocks:
        return Scaling("blocks", x_scale.reshape(*flat_rows, k_blocks), weight_scale)
    if w_shape in w_blocks and weight_scale.numel() != 1:
        raise _misfit("x_scale", [[*rows, k_blocks]], f"weight_scale {list(w_shape)}", x_shape)
    if x_scale.numel() != 1 and x_shape not in x_rows | x_blocks:
        expected = [[1], [*rows], [*rows, k_blocks]]
        raise _misfit("x_scale", expected, "x, its rows or its blocks", x_shape)
    expected = [[1], [*lead, num_n]] if x_scale.numel() == 1 or x_shape in x_rows else []
    expected += [[*lead, n_blocks, k_blocks]] if x_shape in x_blocks else []
    raise _misfit(name, expected, f"x_scale {list(x_shape)}", w_shape)


def _misfit(name: str, expected: list[list[int]], fits: str, got: Shape) -> ShapeError:
    shapes = " or ".join(str(shape) for shape in expected)
    remedy = "Pass scales of one kind for x and weight."
    return ShapeError(name, f"shape {shapes} (to fit {fits})", list(got), remedy)


def _flat_rows(scale: torch.Tensor, by_row: bool, shape: Shape) -> torch.Tensor:
    """One scale a row in `shape`, or [1]; a single number may count as either."""
    return scale.reshape(1) if scale.numel() == 1 or not by_row else scale.reshape(shape)


__all__ = ["check_scales"]
