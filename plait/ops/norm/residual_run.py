"""Runs the norms with a residual stream: by the row kernels, planned on a GPU, or composed of
PyTorch's operators where a row is too long for one block or its strides are unusual."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from plait.ops.aten import gate
from plait.ops.engine import plans
from plait.ops.engine.call import Call, Declined
from plait.ops.engine.signature import Schema, apart, signature_of_list
from plait.ops.norm.layer_norm_backward import RowGradients, row_gradients
from plait.ops.norm.layer_norm_forward import Affine, Stats, normalize_rows
from plait.ops.norm.residual_ops import stats_dtype

Tensors = tuple[torch.Tensor, ...]


def _forward(
    call: Call,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> None:
    y = call.result(x.shape, x.dtype)
    total = call.result(x.shape if residual is not None else (0,), x.dtype)
    rows, dtype = x.shape[:-1], stats_dtype(x)
    mean, rstd = call.result((0,) if rms else rows, dtype), call.result(rows, dtype)
    stats = Stats(None if rms else mean, rstd)
    added = None if residual is None else (residual, total)
    normalize_rows(call, x, y, 1, Affine(weight, bias), stats, eps, residual=added)


def _backward(
    call: Call,
    dy: torch.Tensor,
    add: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    output_mask: list[bool],
) -> None:
    found: list[torch.Tensor | None] = []
    for like, wanted in zip((x, weight, bias), output_mask, strict=True):
        if like is not None and wanted:
            found.append(call.result(like.shape, like.dtype))
        else:
            call.result((0,), x.dtype)
            found.append(None)
    dx, dweight, dbias = found
    given = RowGradients(dy, x, None if rms else mean, rstd, weight, dx, dweight, dbias, add)
    row_gradients(call, given, 1)


def _composed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> Tensors:
    dtype = stats_dtype(x)
    total = x if residual is None else x + residual
    wide = total.to(dtype)
    mean = wide.mean(-1, keepdim=True)
    centred = wide if rms else wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd
    y = y if weight is None else y * weight.to(dtype)
    y = y if bias is None else y + bias.to(dtype)
    nothing = x.new_empty(0)
    return (
        y.to(x.dtype).contiguous(),
        nothing if residual is None else total.contiguous(),
        nothing.to(dtype) if rms else mean[..., 0].contiguous(),
        rstd[..., 0].contiguous(),
    )


def _composed_backward(
    dy: torch.Tensor,
    add: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rms: bool,
    output_mask: list[bool],
) -> Tensors:
    dtype = stats_dtype(x)
    outer = tuple(range(x.dim() - 1))
    wide, scale = dy.to(dtype), rstd[..., None]
    normed = (x.to(dtype) if rms else x.to(dtype) - mean[..., None]) * scale
    g = wide if weight is None else wide * weight.to(dtype)
    dx = g - normed * (g * normed).mean(-1, keepdim=True)
    dx = (dx if rms else dx - g.mean(-1, keepdim=True)) * scale
    dx = dx if add is None else dx + add.to(dtype)
    product = wide * normed
    dweight = product.sum(outer) if outer else product
    dbias = wide.sum(outer) if outer else wide
    found = []
    for grad, like, wanted in zip(
        (dx, dweight, dbias), (x, weight, bias), output_mask, strict=True
    ):
        if wanted and like is not None:
            found.append(grad.to(like.dtype).contiguous())
        else:
            found.append(x.new_empty(0))
    return tuple(found)


class _Operator:
    """An operator of `plait::` with its plans."""

    def __init__(self, overload: Any, compute: Callable[..., None], composed: Any) -> None:
        self.schema = Schema(overload)
        self.compute, self.composed = compute, composed
        self.plans: dict[Any, Callable[..., Any]] = {}
        space = {
            "_signature_of_list": signature_of_list,
            "_apart": apart,
            "_default_dtype": torch.get_default_dtype,
        }
        signature = self.schema.signature((), lazy=False)
        self.signature = eval(f"lambda {self.schema.variables}: {signature}", space)

    def __call__(self, *args: Any) -> Tensors:
        if args[0].device.type == "cpu":
            return self.run(*args)
        signature = self.signature(*args)
        plan = self.plans.get(signature)
        if plan is not None:
            return plan(*args)
        return self.run(*args, signature=signature)

    def run(self, *args: Any, signature: Any = None) -> Tensors:
        """Without a plan; remembers one for the signature."""
        first = next(each for each in args if isinstance(each, torch.Tensor))
        call = Call(first.device)
        before, gate.RUNNING.inside = gate.RUNNING.inside, True  # what a launch calls is ATen's
        try:
            self.compute(call, *args)
            if signature is not None:
                self._remember(signature, args, call)
            call.run()
        except Declined:
            if signature is not None:
                self._keep(signature, self.composed)
            return self.composed(*args)
        finally:
            gate.RUNNING.inside = before
        return tuple(each for each in call.results if each is not None)

    def _remember(self, signature: Any, args: tuple[Any, ...], call: Call) -> None:
        plan = plans.build(self.schema, self.schema.bind(args, {}), call, self.run, [0.0])
        if plan is not None:
            self._keep(signature, plan)

    def _keep(self, signature: Any, plan: Callable[..., Any]) -> None:
        if len(self.plans) >= plans.MAX_PLANS:
            self.plans.clear()
        self.plans[signature] = plan


@cache
def _forward_operator() -> _Operator:
    return _Operator(torch.ops.plait.residual_norm.default, _forward, _composed)


@cache
def _backward_operator() -> _Operator:
    overload = torch.ops.plait.residual_norm_backward.default
    return _Operator(overload, _backward, _composed_backward)


def forward(*args: Any) -> Tensors:
    """y, sum, mean and 1 / deviation; arguments of `plait::residual_norm`."""
    return _forward_operator()(*args)


def backward(*args: Any) -> Tensors:
    """Gradients of x, weight and bias; arguments of `plait::residual_norm_backward`."""
    return _backward_operator()(*args)


__all__ = ["backward", "forward"]
