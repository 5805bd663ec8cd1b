"""Norms with a residual stream as PyTorch operators: schemas, shape inference, gradients.

`plait::residual_norm` returns [y, x + residual, mean, 1 / deviation]; a result that there is not
(the sum without a residual, the mean of a root-mean-square norm) has no elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "residual_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool rms) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "residual_norm_backward(Tensor dy, Tensor? add, Tensor x, Tensor mean, Tensor rstd, "
    "Tensor? weight, Tensor? bias, bool rms, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[torch.Tensor, ...]:
    from plait.ops.norm.residual_run import forward

    return forward(x, residual, weight, bias, eps, rms)


def _norm_backward(
    dy: torch.Tensor,
    add: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    from plait.ops.norm.residual_run import backward

    return backward(dy, add, x, mean, rstd, weight, bias, rms, list(output_mask))


for _key in ("CPU", "CUDA"):
    _library.impl("residual_norm", _norm, _key)
    _library.impl("residual_norm_backward", _norm_backward, _key)


def stats_dtype(x: torch.Tensor) -> torch.dtype:
    """Of mean and 1 / deviation."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.register_fake("plait::residual_norm")
def _norm_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[torch.Tensor, ...]:
    stats = x.new_empty(x.shape[:-1], dtype=stats_dtype(x))
    total = x.new_empty(x.shape if residual is not None else (0,))
    return (
        x.new_empty(x.shape),
        total,
        stats.new_empty(0) if rms else stats,
        torch.empty_like(stats),
    )


@torch.library.register_fake("plait::residual_norm_backward")
def _norm_backward_fake(
    dy: torch.Tensor,
    add: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    likes = (x, weight, bias)
    return tuple(
        x.new_empty(0) if like is None or not wanted else like.new_empty(like.shape)
        for like, wanted in zip(likes, output_mask, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, bias, _, rms = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.has_residual, ctx.rms = residual is not None, rms
    ctx.save_for_backward(x if residual is None else total, mean, rstd, weight, bias)


def _gradients(ctx: Any, dy: Any, dtotal: Any, *_: Any) -> tuple[Any, ...]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
    if not ctx.has_residual:
        dtotal = None
    if dy is None:  # only the sum was used
        return (dtotal, dtotal if needs_residual else None, None, None, None, None)
    mask = [needs_x or needs_residual, needs_weight, needs_bias]
    dx, dweight, dbias = torch.ops.plait.residual_norm_backward(
        dy, dtotal, x, mean, rstd, weight, bias, ctx.rms, mask
    )
    return (
        dx if needs_x else None,
        dx if needs_residual else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        None,
        None,
    )


torch.library.register_autograd("plait::residual_norm", _gradients, setup_context=_setup)

__all__ = ["stats_dtype"]
