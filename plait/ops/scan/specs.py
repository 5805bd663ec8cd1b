"""Operators of the scan engine: what each combines, and to which dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.ops.aten.spec import OpSpec
from plait.ops.engine.call import Call
from plait.ops.scan import reference
from plait.ops.scan.scan import FLOATS, NUMBERS, REAL, UNUSUAL_DTYPE, Scan, scan

Compute = Callable[..., None]


def _accumulate(what: Scan) -> Compute:
    """Elements are converted to `dtype`, by default that of a given result or, for integers, int64,
    before they are combined."""

    def compute(call: Call, self: Tensor, dim: int, dtype: torch.dtype | None = None) -> None:
        default = self.dtype if self.dtype in FLOATS else torch.int64
        given = call.given.tensors[0].dtype if call.given.tensors else default
        through = dtype or given
        if self.dtype not in REAL or through not in NUMBERS:
            call.decline(UNUSUAL_DTYPE)
        scan(call, self, dim, what, through)

    return compute


def _extremum(what: Scan) -> Compute:
    """The greatest or least element up to each, and the last index where it is."""

    def compute(call: Call, self: Tensor, dim: int) -> None:
        if self.dtype not in REAL:
            call.decline(UNUSUAL_DTYPE)
        scan(call, self, dim, what, self.dtype)

    return compute


def _logcumsumexp(call: Call, self: Tensor, dim: int) -> None:
    """log(sum(exp(x))) of the elements up to each."""
    if self.dtype not in FLOATS:
        call.decline(UNUSUAL_DTYPE)
    scan(call, self, dim, Scan("logsumexp", double_on_cpu=True), self.dtype)


def _spec(name: str, compute: Compute, *keys: str) -> OpSpec:
    return OpSpec(name, keys, compute=compute, reference=getattr(reference, name))


_SUM, _PROD = Scan("sum", double_on_cpu=True), Scan("prod", double_on_cpu=True)

SPECS: tuple[OpSpec, ...] = (
    _spec("cumsum", _accumulate(_SUM), "cumsum", "cumsum.out", "cumsum_"),
    _spec("cumprod", _accumulate(_PROD), "cumprod", "cumprod.out", "cumprod_"),
    _spec("cummax", _extremum(Scan("max")), "cummax", "cummax.out"),
    _spec("cummin", _extremum(Scan("min")), "cummin", "cummin.out"),
    _spec(
        "logcumsumexp", _logcumsumexp,
        "logcumsumexp", "logcumsumexp.out", "_logcumsumexp", "_logcumsumexp.out",
    ),
)  # fmt: skip

__all__ = ["SPECS"]
