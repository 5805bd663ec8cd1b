"""`_weight_norm_interface` and its backward: one norm for each index of the first or last dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.norm import weight_norm_kernels as kernels
from plait.ops.norm.batch_norm import spread
from plait.ops.norm.batch_norm_layout import blocks_for, channels_of
from plait.ops.norm.layer_norm_backward import launch
from plait.ops.norm.layer_norm_forward import FLOATS, accumulator, accumulator_dtype, stats_of


def _check(call: Call, v: torch.Tensor, g: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Decline what ATen refuses; the shape of `g` and of the norms."""
    if v.dtype not in FLOATS or g.dtype != v.dtype:
        call.decline("a dtype that is not a plain floating one, or two of them")
    if v.dim() == 0 or v.numel() == 0 or dim not in (0, v.dim() - 1):
        call.decline("a dim that is neither the first nor the last, or no elements")
    shape = tuple(n if d == dim else 1 for d, n in enumerate(v.shape))
    if tuple(g.shape) != shape or not g.is_contiguous():
        call.decline("a magnitude of another shape, or with gaps")
    return shape


def _as_channels(dim: int, values: Sequence[int], one: int) -> tuple[int, ...]:
    """Sizes or strides of (N, C, ...) where dim is C; `one` for N where C is the first dim."""
    if dim == 0:
        return (one, *values)
    return (values[0], values[-1], *values[1:-1])


def _arguments(
    call: Call, v: torch.Tensor, dim: int, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], Any]:
    """Launch arguments for tensors like v, v among them and first."""
    shape = _as_channels(dim, v.shape, 1)
    strides = [_as_channels(dim, each.stride(), 0) for each in tensors.values()]
    found = channels_of(call, shape, strides)
    blocks = blocks_for(call, found, v.dtype)
    args = {
        **found.sizes(), **blocks.constants(), **found.constants(),
        "WHOLE": blocks.whole, "ACC": accumulator(v.dtype),
        "dw_ptr": None, "partial_ptr": None,
    }  # fmt: skip
    for index, (name, each) in enumerate(tensors.items()):
        args |= {f"{name}_ptr": each, **found.places(name, index)}
    if not blocks.whole:
        shape = (blocks.num_parts, found.num_channels)
        args["partial_ptr"] = call.empty(shape, accumulator_dtype(v.dtype))
        args["GRADIENT"] = args["dw_ptr"] is not None
        for name in ("dw_sc", "dw_sn", "dw_s0", "dw_s1"):
            args.setdefault(name, 0)
        grid = blocks.grid_channels * blocks.num_parts
        launch(call, kernels.weight_sums_kernel, grid, args, blocks.num_warps)
    return args, blocks


def weight_norm(call: Call, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> None:
    """w = v * (g / norm(v)), and the norms."""
    shape = _check(call, v, g, dim)
    w = call.result(v.shape, v.dtype)
    norms = stats_of(call, shape, accumulator_dtype(v.dtype))
    args, blocks = _arguments(call, v, dim, {"v": v, "w": w})
    args |= {"g_ptr": g, "norm_ptr": norms, "num_blocks": spread(call, blocks)}
    grid = blocks.grid_channels * args["num_blocks"]
    launch(call, kernels.weight_norm_kernel, grid, args, blocks.num_warps)


def weight_norm_backward(
    call: Call,
    grad_w: torch.Tensor,
    saved_v: torch.Tensor,
    saved_g: torch.Tensor,
    saved_norms: torch.Tensor,
    dim: int,
) -> None:
    """Gradients of v and g."""
    v, g = saved_v, saved_g
    shape = _check(call, v, g, dim)
    if not v.is_contiguous() or not saved_norms.is_contiguous():
        call.decline("saved tensors that are not contiguous")
    if tuple(saved_norms.shape) != shape or saved_norms.dtype != accumulator_dtype(v.dtype):
        call.decline("saved norms of another shape or dtype")
    if grad_w.shape != v.shape or grad_w.dtype != v.dtype:
        call.decline("a gradient of another shape or dtype")
    dv = call.result(v.shape, v.dtype)
    dg = stats_of(call, shape, g.dtype)
    args, blocks = _arguments(call, v, dim, {"v": v, "dw": grad_w, "dv": dv})
    args |= {"g_ptr": g, "norm_ptr": saved_norms, "dg_ptr": dg, "num_blocks": spread(call, blocks)}
    grid = blocks.grid_channels * args["num_blocks"]
    launch(call, kernels.weight_norm_backward_kernel, grid, args, blocks.num_warps)


def weight_norm_reference(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of `_weight_norm_interface`."""
    dims = tuple(d for d in range(v.dim()) if d != dim)
    norms = torch.linalg.vector_norm(v, 2, dims, keepdim=True) if dims else v.abs()
    return v * (g / norms), norms


def weight_norm_backward_reference(
    grad_w: torch.Tensor,
    saved_v: torch.Tensor,
    saved_g: torch.Tensor,
    saved_norms: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of `_weight_norm_interface_backward`."""
    dims = tuple(d for d in range(saved_v.dim()) if d != dim)
    product = grad_w * saved_v
    total = product.sum(dims, keepdim=True) if dims else product
    dv = (grad_w - saved_v * total / saved_norms**2) * (saved_g / saved_norms)
    return dv, total / saved_norms


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        "weight_norm",
        ("_weight_norm_interface", "_weight_norm_interface.out"),
        compute=weight_norm,
        reference=weight_norm_reference,
    ),
    OpSpec(
        "weight_norm_backward",
        ("_weight_norm_interface_backward", "_weight_norm_interface_backward.out"),
        compute=weight_norm_backward,
        reference=weight_norm_backward_reference,
    ),
)

__all__ = ["SPECS", "weight_norm", "weight_norm_backward"]
