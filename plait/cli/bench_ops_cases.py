"""What `plait bench ops` and `plait tune ops` call: one `Case` an operator, for any arrangement."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from plait.cli import bench_ops_operands as operands
from plait.cli.bench_ops_operands import Arrangement, Make
from plait.errors import ArgumentError

aten = torch.ops.aten
FLOATS = ("bfloat16", "float16", "float32")
FAMILIES = ("reduction", "scan", "softmax", "norm")


@dataclass(frozen=True)
class Case:
    """An operator: `call(dim, *operands)` of what `make` gives, and in which layouts it is asked.

    `dtypes` are its own where it takes no floats.
    """

    name: str
    family: str
    call: Callable[..., Any]
    make: Make
    layouts: tuple[str, ...] = ("kr", "rk", "r")
    dtypes: tuple[str, ...] = FLOATS

    def dtypes_of(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted dtypes that it is measured in; its own if it takes no floats."""
        return self.dtypes if self.dtypes != FLOATS else tuple(wanted)


# --- calls
def _over(whole: Callable[..., Any], along: Callable[..., Any] | None = None) -> Any:
    """A function of torch that takes a dim or leaves it out."""

    def call(dim: int | None, *operands: Any) -> Any:
        return whole(*operands) if dim is None else (along or whole)(*operands, dim)

    return call


def _along(function: Callable[..., Any]) -> Any:
    """A function of torch that needs a dim; of a flat operand its only one."""
    return lambda dim, x: function(x, dim or 0)


def _batch_norm(dim: Any, x: Any, weight: Any, bias: Any) -> Any:
    del dim
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, operands.EPS)


def _batch_norm_backward(dim: Any, grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
    del dim
    mask = [True, True, True]
    return aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, rstd, True, operands.EPS, mask
    )


def _layer_norm_backward(
    dim: Any, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any
) -> Any:
    del dim
    mask, shape = [True, True, True], list(weight.shape)
    return aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask)


def _reduction(name: str, call: Any, **options: Any) -> Case:
    options = {"make": operands.values, **options}
    return Case(name, "reduction", call, **options)


def _rowwise(name: str, family: str, call: Any, make: Any, *, layouts: Any = ("kr",)) -> Case:
    return Case(name, family, call, make, layouts)


_ROWS = ("kr", "rk")
_TRUTHS: dict[str, Any] = {"dtypes": ("bool",)}
_norm_of = partial(torch.linalg.vector_norm, ord=2)


def _losses() -> tuple[Case, ...]:
    """Losses of two operands of a shape, reduced to their mean, and their gradients."""
    found = []
    for name, middle, after in (
        ("mse_loss", (), ()),
        ("smooth_l1_loss", (), (1.0,)),
        ("huber_loss", (), (1.0,)),
        ("soft_margin_loss", (), ()),
        ("binary_cross_entropy", (None,), ()),
        ("binary_cross_entropy_with_logits", (None, None), ()),
    ):
        shares = name == "binary_cross_entropy"
        make = operands.shares if shares else partial(operands.values, copies=2)
        mean = (*middle, 1, *after)  # `reduction` between a weight and beta or delta
        call = _loss_call(getattr(aten, name), mean)
        found.append(Case(name, "softmax", call, make, ("r",)))
        backward = getattr(aten, f"{name}_backward", None)
        if backward is not None:
            call, make = _loss_call(backward, mean), partial(operands.loss_gradient, make)
            found.append(Case(f"{name}_backward", "softmax", call, make, ("r",)))
    return tuple(found)


def _loss_call(function: Callable[..., Any], more: tuple[Any, ...]) -> Any:
    return lambda dim, *operands: function(*operands, *more)


_LOSSES = _losses()
CASES: tuple[Case, ...] = (
    _reduction("sum", _over(torch.sum)),
    _reduction("nansum", _over(torch.nansum)),
    _reduction("mean", _over(torch.mean)),
    _reduction("prod", _over(torch.prod), make=operands.near_one),
    _reduction("max", _over(torch.max)),
    _reduction("min", _over(torch.min)),
    _reduction("amax", _over(torch.amax)),
    _reduction("amin", _over(torch.amin)),
    _reduction("aminmax", lambda dim, x: torch.aminmax(x, dim=dim)),
    _reduction("argmax", _over(torch.argmax)),
    _reduction("argmin", _over(torch.argmin)),
    _reduction("any", _over(torch.any), make=partial(operands.truths, False), **_TRUTHS),
    _reduction("all", _over(torch.all), make=partial(operands.truths, True), **_TRUTHS),
    _reduction("count_nonzero", _over(torch.count_nonzero)),
    _reduction("var", _over(torch.var)),
    _reduction("std", _over(torch.std)),
    _reduction("var_mean", _over(torch.var_mean)),
    _reduction("std_mean", _over(torch.std_mean)),
    _reduction("vector_norm", lambda dim, x: _norm_of(x, dim=dim)),
    _reduction("logsumexp", _along(torch.logsumexp)),
    _reduction("dot", _over(torch.dot), make=partial(operands.values, copies=2), layouts=("r",)),
    _reduction("vdot", _over(torch.vdot), make=partial(operands.values, copies=2), layouts=("r",)),
    _reduction("trace", _over(torch.trace), make=operands.square, layouts=("r",)),
    *(
        Case(name, "scan", _along(getattr(torch, name)), make, _ROWS)
        for name, make in (
            ("cumsum", operands.values),
            ("cumprod", operands.near_one),
            ("cummax", operands.values),
            ("cummin", operands.values),
            ("logcumsumexp", operands.values),
        )
    ),
    _rowwise("softmax", "softmax", _along(torch.softmax), operands.values, layouts=_ROWS),
    _rowwise("log_softmax", "softmax", _along(torch.log_softmax), operands.values, layouts=_ROWS),
    _rowwise("safe_softmax", "softmax", _along(aten._safe_softmax), operands.values, layouts=_ROWS),
    _rowwise(
        "softmax_backward",
        "softmax",
        lambda dim, g, y: aten._softmax_backward_data(g, y, dim, g.dtype),
        partial(operands.softmaxed, torch.softmax),
        layouts=_ROWS,
    ),
    _rowwise(
        "log_softmax_backward",
        "softmax",
        lambda dim, g, y: aten._log_softmax_backward_data(g, y, dim, g.dtype),
        partial(operands.softmaxed, torch.log_softmax),
        layouts=_ROWS,
    ),
    _rowwise(
        "nll_loss",
        "softmax",
        lambda dim, x, labels: aten.nll_loss_forward(x, labels, None, 1, -100),
        operands.log_probabilities,
    ),
    _rowwise(
        "nll_loss_backward",
        "softmax",
        lambda dim, g, x, labels, total: aten.nll_loss_backward(g, x, labels, None, 1, -100, total),
        operands.nll_gradient,
    ),
    _rowwise(
        "nll_loss2d",
        "softmax",
        lambda dim, x, labels: aten.nll_loss2d_forward(x, labels, None, 1, -100),
        operands.nll2d,
    ),
    _rowwise(
        "nll_loss2d_backward",
        "softmax",
        lambda dim, g, x, labels, total: aten.nll_loss2d_backward(
            g, x, labels, None, 1, -100, total
        ),
        operands.nll2d_gradient,
    ),
    *_LOSSES,
    _rowwise(
        "cross_entropy",
        "softmax",
        lambda dim, x, labels: functional.cross_entropy(x, labels),
        operands.labelled,
    ),
    _rowwise(
        "layer_norm",
        "norm",
        lambda dim, x, w, b: functional.layer_norm(x, w.shape, w, b, operands.EPS),
        operands.affine,
    ),
    _rowwise("layer_norm_backward", "norm", _layer_norm_backward, operands.layer_norm_gradient),
    _rowwise(
        "rms_norm",
        "norm",
        lambda dim, x, w, b: functional.rms_norm(x, w.shape, w, operands.EPS),
        operands.affine,
    ),
    _rowwise(
        "rms_norm_backward",
        "norm",
        lambda dim, g, x, rstd, w: aten._fused_rms_norm_backward(
            g, x, list(w.shape), rstd, w, [True, True]
        ),
        operands.rms_norm_gradient,
    ),
    _rowwise(
        "group_norm",
        "norm",
        lambda dim, x, w, b, sizes: aten.native_group_norm(x, w, b, *sizes, operands.EPS),
        operands.grouped,
    ),
    _rowwise(
        "group_norm_backward",
        "norm",
        lambda dim, g, x, mean, rstd, w, sizes: aten.native_group_norm_backward(
            g, x, mean, rstd, w, *sizes, [True, True, True]
        ),
        operands.group_norm_gradient,
    ),
    _rowwise("batch_norm", "norm", _batch_norm, operands.channels),
    _rowwise("batch_norm_backward", "norm", _batch_norm_backward, operands.batch_norm_gradient),
    _rowwise(
        "weight_norm",
        "norm",
        lambda dim, v, g: aten._weight_norm_interface(v, g, 0),
        operands.weights,
    ),
    _rowwise(
        "weight_norm_backward",
        "norm",
        lambda dim, w, v, g, norms: aten._weight_norm_interface_backward(w, v, g, norms, 0),
        operands.weight_norm_gradient,
    ),
)


def find_cases(names: Sequence[str]) -> list[Case]:
    """The cases that names, families or patterns mean; all for none. ArgumentError lists them."""
    if not names:
        return list(CASES)
    found: dict[str, Case] = {}
    for name in names:
        fitting = [
            each for each in CASES if each.family == name or fnmatch.fnmatchcase(each.name, name)
        ]
        if not fitting:
            known = ", ".join((*FAMILIES, *(each.name for each in CASES)))
            raise ArgumentError("names", f"some of {known}", repr(name))
        found.update((each.name, each) for each in fitting)
    return list(found.values())


__all__ = ["CASES", "FAMILIES", "FLOATS", "Arrangement", "Case", "find_cases"]
