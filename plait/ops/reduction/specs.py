"""Operators of the reduction engine: what each reduces, with which words, to which dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.reduction import reference
from plait.ops.reduction.reduction import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    REAL,
    REFUSED,
    UNUSUAL_DTYPE,
    Operand,
    Reduction,
    reduce,
    reduced_dims,
)

Dims = int | Sequence[int] | None
Compute = Callable[..., None]

WARNS = "so few degrees of freedom that ATen warns"
NO_DIMS = "no dims to reduce"
FP64_POWER = "a power of fp64 numbers other than 1/2, 1, 3/2, 2, 5/2, 3, 4"
NARROWING = "a conversion of floats to these integers"

_POWERS = frozenset((0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0))
_ROOTS = frozenset((0.5, 1.0, 2.0, 4.0))


def _check(call: Call, tensor: Tensor, dtypes: frozenset[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        call.decline(UNUSUAL_DTYPE)


def _given_dtype(call: Call) -> torch.dtype | None:
    """The dtype of what an out overload writes."""
    return call.given.tensors[0].dtype if call.given.tensors else None


def _sum_like(combine: str, load: str = "value") -> Compute:
    """Elements are converted to `dtype`, by default int64 for integers, before they are added."""

    def compute(
        call: Call,
        self: Tensor,
        dim: Dims = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(call, self, REAL)
        default = self.dtype if self.dtype in FLOATS else torch.int64
        through = dtype or _given_dtype(call) or default
        if through not in REAL:
            call.decline(UNUSUAL_DTYPE)
        if self.dtype in FLOATS and through not in FLOATS | {torch.int64}:
            call.decline(NARROWING)
        finish = "positive" if through is torch.bool else "value"
        word = "value" if self.dtype not in FLOATS else load
        dims = reduced_dims(call, self.dim(), dim)
        reduction = Reduction(combine, word, finish)
        reduce(call, self, dims, keepdim, reduction, (through,), through=through)

    return compute


def _mean(
    call: Call,
    self: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    _check(call, self, REAL)
    through = dtype or self.dtype
    if through not in FLOATS:
        call.decline(UNUSUAL_DTYPE)
    dims = reduced_dims(call, self.dim(), dim)
    reduce(call, self, dims, keepdim, Reduction("sum", finish="mean"), (through,), through=through)


def _extremum(combine: str) -> Compute:
    """The greatest or least element."""
    reduction = Reduction(combine, needs_elements=True)

    def compute(call: Call, self: Tensor, dim: Dims = None, keepdim: bool = False) -> None:
        _check(call, self, REAL)
        dims = reduced_dims(call, self.dim(), dim)
        reduce(call, self, dims, keepdim, reduction, (self.dtype,))

    return compute


def _extremum_with_index(combine: str) -> Compute:
    """The greatest or least element along one dim, and the first index where it is."""
    reduction = Reduction(combine, finish="both", needs_elements=True, ordered=True)

    def compute(call: Call, self: Tensor, dim: int, keepdim: bool = False) -> None:
        _check(call, self, REAL)
        dims = reduced_dims(call, self.dim(), dim)
        reduce(call, self, dims, keepdim, reduction, (self.dtype, torch.int64))

    return compute


def _index_of_extremum(combine: str) -> Compute:
    """The first index of the greatest or least element, along one dim or in the flattened input."""
    reduction = Reduction(combine, finish="index", needs_elements=True, ordered=True)

    def compute(call: Call, self: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
        _check(call, self, NUMBERS)
        dims = reduced_dims(call, self.dim(), dim)
        reduce(call, self, dims, keepdim, reduction, (torch.int64,))

    return compute


def _aminmax(call: Call, self: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
    _check(call, self, REAL)
    dims = reduced_dims(call, self.dim(), dim)
    reduction = Reduction("minmax", finish="both", needs_elements=True)
    reduce(call, self, dims, keepdim, reduction, (self.dtype, self.dtype))


def _truth(combine: str) -> Compute:
    """Whether any or all elements are not 0; a NaN is not. uint8 for uint8, by tradition."""
    reduction = Reduction(combine, "nonzero", "positive")

    def compute(call: Call, self: Tensor, dim: Dims = None, keepdim: bool = False) -> None:
        _check(call, self, REAL)
        if dim is not None and not isinstance(dim, int) and not len(dim):
            call.decline(NO_DIMS)  # here no dims are not all
        dtype = torch.uint8 if self.dtype is torch.uint8 else torch.bool
        given = _given_dtype(call)
        if given in (torch.uint8, torch.bool):
            dtype = given
        dims = reduced_dims(call, self.dim(), dim)
        reduce(call, self, dims, keepdim, reduction, (dtype,))

    return compute


def _count_nonzero(call: Call, self: Tensor, dim: Dims = None) -> None:
    _check(call, self, REAL)
    dims = reduced_dims(call, self.dim(), dim)
    reduce(call, self, dims, False, Reduction("sum", "nonzero"), (torch.int64,))


def _variance(finish: str) -> Compute:
    """Variance or standard deviation, and the mean where `finish` names it."""
    reduction = Reduction("moments", finish=finish, double_on_cpu=True)

    def compute(
        call: Call,
        self: Tensor,
        dim: Dims = None,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> None:
        _check(call, self, FLOATS)
        if isinstance(correction, complex):
            call.decline(REFUSED)
        correction = 1.0 if correction is None else float(correction)
        dims = reduced_dims(call, self.dim(), dim)
        reduced = 1
        for d in dims:
            reduced *= self.shape[d]
        if reduced <= correction:
            call.decline(WARNS)
        dtypes = [self.dtype] * (2 if "mean" in finish else 1)
        reduce(call, self, dims, keepdim, reduction, dtypes, parameter=correction)

    return compute


def _norm_words(order: float) -> Reduction:
    if order == 0:
        return Reduction("sum", "nonzero")
    if abs(order) == float("inf"):
        return Reduction("max" if order > 0 else "min", "abs", needs_elements=True)
    empty = order < 0
    if order == 1:
        return Reduction("sum", "abs")
    if order == 2:
        return Reduction("sum", "square", "sqrt")
    return Reduction("sum", "power", "root", needs_elements=empty)


def _vector_norm(
    call: Call,
    self: Tensor,
    ord: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Of |x|: how many are not 0, the sum, the root of squares, the greatest, least, a p-norm."""
    _check(call, self, FLOATS)
    through = dtype or self.dtype
    if through not in FLOATS or torch.promote_types(self.dtype, through) is not through:
        call.decline(UNUSUAL_DTYPE)
    if isinstance(ord, complex) or ord != ord:
        call.decline(REFUSED)
    order = float(ord)
    dims = reduced_dims(call, self.dim(), dim)
    if order and all(self.shape[d] == 1 for d in dims):
        order = float("inf")  # one element: as it is, as ATen does
    reduction = _norm_words(order)
    exact = abs(order) in _POWERS and abs(order) in _ROOTS
    if through is torch.float64 and reduction.load == "power" and not exact:
        call.decline(FP64_POWER)
    reduce(call, self, dims, keepdim, reduction, (through,), through=through, parameter=order)


def _logsumexp(call: Call, self: Tensor, dim: Dims, keepdim: bool = False) -> None:
    _check(call, self, REAL)
    through = self.dtype if self.dtype in FLOATS else torch.get_default_dtype()
    if through not in FLOATS or (not isinstance(dim, int) and dim is not None and not len(dim)):
        call.decline(REFUSED)
    dims = reduced_dims(call, self.dim(), dim)
    reduction = Reduction("logsumexp", finish="log")
    reduce(call, self, dims, keepdim, reduction, (through,), through=through)


def _dot(call: Call, self: Tensor, **operands: Tensor) -> None:
    """The sum of products of two vectors."""
    (other,) = operands.values()
    _check(call, self, FLOATS if call.device.type == "cuda" else NUMBERS)
    fits = self.dim() == other.dim() == 1 and self.shape == other.shape
    if not fits or self.dtype is not other.dtype:
        call.decline(REFUSED)
    operand = Operand(self, self.shape, self.stride(), (0,), other)
    reduce(call, operand, (0,), False, Reduction("sum"), (self.dtype,))


def _trace(call: Call, self: Tensor) -> None:
    """The sum of the diagonal of a matrix: a vector with the stride of both dims."""
    _check(call, self, NUMBERS)
    if self.dim() != 2:
        call.decline(REFUSED)
    operand = Operand(self, (min(self.shape),), (sum(self.stride()),), (0,))
    dtype = torch.int64 if self.dtype in INTEGERS else self.dtype
    reduction = Reduction("sum", double_on_cpu=True)
    reduce(call, operand, (0,), False, reduction, (dtype,), through=dtype)


def _spec(name: str, compute: Compute, *keys: str) -> OpSpec:
    return OpSpec(name, keys, compute=compute, reference=getattr(reference, name))


SPECS: tuple[OpSpec, ...] = (
    _spec("sum", _sum_like("sum"), "sum", "sum.out", "sum.dim_IntList", "sum.IntList_out"),
    _spec("nansum", _sum_like("sum", "number"), "nansum", "nansum.out"),
    _spec("prod", _sum_like("prod"), "prod", "prod.out", "prod.dim_int", "prod.int_out"),
    _spec("mean", _mean, "mean", "mean.dtype_out", "mean.dim", "mean.out"),
    _spec("amax", _extremum("max"), "amax", "amax.out", "max", "max.unary_out"),
    _spec("amin", _extremum("min"), "amin", "amin.out", "min", "min.unary_out"),
    _spec("max", _extremum_with_index("argmax"), "max.dim", "max.dim_max"),
    _spec("min", _extremum_with_index("argmin"), "min.dim", "min.dim_min"),
    _spec("argmax", _index_of_extremum("argmax"), "argmax", "argmax.out"),
    _spec("argmin", _index_of_extremum("argmin"), "argmin", "argmin.out"),
    _spec("aminmax", _aminmax, "aminmax", "aminmax.out"),
    _spec(
        "any", _truth("max"),
        "any", "any.all_out", "any.dim", "any.out", "any.dims", "any.dims_out",
    ),
    _spec(
        "all", _truth("min"),
        "all", "all.all_out", "all.dim", "all.out", "all.dims", "all.dims_out",
    ),
    _spec(
        "count_nonzero", _count_nonzero,
        "count_nonzero", "count_nonzero.out",
        "count_nonzero.dim_IntList", "count_nonzero.dim_IntList_out",
    ),
    _spec("var", _variance("var"), "var.correction", "var.correction_out"),
    _spec("std", _variance("std"), "std.correction", "std.correction_out"),
    _spec("var_mean", _variance("var mean"), "var_mean.correction", "var_mean.correction_out"),
    _spec("std_mean", _variance("std mean"), "std_mean.correction", "std_mean.correction_out"),
    _spec("vector_norm", _vector_norm, "linalg_vector_norm", "linalg_vector_norm.out"),
    _spec("logsumexp", _logsumexp, "logsumexp", "logsumexp.out"),
    _spec("dot", _dot, "dot", "dot.out"),
    _spec("vdot", _dot, "vdot", "vdot.out"),
    _spec("trace", _trace, "trace", "trace.out"),
)  # fmt: skip

__all__ = ["SPECS"]
