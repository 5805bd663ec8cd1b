"""Whether the values of two results agree: bitwise, or within ATen's own error against fp64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.testing.compare import assert_close_to_fp64

# A result of few elements may be exact by chance, so ATen's error is that on more such inputs.
_MORE_INPUTS = 8
# fp64 has nothing wider to compare with: ATen errs as it does in fp32, in units this much smaller.
_FP64_UNITS = 2.0**-29


class Values:
    """Result number `index` of `call(sample)`, which runs ATen and returns results in any form."""

    def __init__(self, call: Callable[[Any], Any], sample: Any, index: int) -> None:
        self._call, self._sample, self._index = call, sample, index

    def difference(self, plain: torch.Tensor, ours: torch.Tensor, *, exact: bool) -> str:
        """What is wrong with `ours`, or ""; `plain` is ATen's."""
        plain, ours = plain.detach(), ours.detach()
        if exact or not plain.is_floating_point():
            return _bitwise(plain, ours)
        wide = self._result(self._sample, torch.float64).double()
        problem = _far(plain, ours, wide, 0.0 if plain.dtype != torch.float64 else self._error(0))
        if problem:
            usual = max(self._error(seed) for seed in range(_MORE_INPUTS + 1))
            problem = _far(plain, ours, wide, usual)
        return problem

    def _error(self, seed: int) -> float:
        """ATen's largest error on the sample; on another one of the kind, if `seed` is not 0."""
        sample = self._sample.transform(_shrunk(seed)) if seed else self._sample
        exact = self._result(sample, torch.float64).double()
        found, single = self._result(sample, None), self._result(sample, torch.float32)
        # Of a result in fp64 that is all there is, and of others what the exact values lack.
        error = _largest(single.double() - exact) * 1.5 * _FP64_UNITS
        return max(error, _largest(found.double() - exact)) if found.dtype != exact.dtype else error

    def _result(self, sample: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """By ATen; with `dtype` everything that is floating is of that dtype."""
        default = torch.get_default_dtype()
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)  # which integers become where floats are wanted
                sample = sample.transform(_converter(dtype))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they were compared already
                values = self._call(sample)
            return pytree.tree_leaves(values)[self._index].detach()
        finally:
            torch.set_default_dtype(default)


def _converter(dtype: torch.dtype) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().to(dtype).requires_grad_(value.requires_grad)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    return convert


def _shrunk(seed: int) -> Callable[[Any], Any]:
    """Floating values times a number from 0.5 to 1: signs, infinities and magnitudes stay."""
    generator = torch.Generator().manual_seed(seed)

    def shrink(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            factor = 0.5 + 0.5 * torch.rand(value.shape, generator=generator)
            found = value.detach() * factor.to(value.device, value.dtype)
            return found.requires_grad_(value.requires_grad)
        return value

    return shrink


def _far(plain: torch.Tensor, ours: torch.Tensor, wide: torch.Tensor, error: float) -> str:
    """Why `ours` errs too much where ATen may be `error` away from `wide`."""
    largest, eps = _largest(wide), torch.finfo(plain.dtype).eps
    error = max(error, _largest(plain.double() - wide))
    if largest:  # the comparison adds half an epsilon of it, which is less than a unit
        error += (2.0 ** math.floor(math.log2(largest)) - largest / 2) * eps / 2
    try:
        assert_close_to_fp64(
            ours, wide, plain, "values", plain_error_share=error / largest if largest else 0.0
        )
    except AssertionError as problem:
        return str(problem)
    return ""


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().nan_to_num(0, 0, 0).max()) if values.numel() else 0.0


def _bitwise(plain: torch.Tensor, ours: torch.Tensor) -> str:
    """Bits, but for those of NaNs."""
    same = plain == ours
    if plain.is_floating_point():
        same = (same & (plain.signbit() == ours.signbit())) | (plain.isnan() & ours.isnan())
    if bool(same.all()):
        return ""
    first = tuple((~same).nonzero()[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} elements differ, first at {list(first)}: "
        f"{ours[first].item()}, ATen {plain[first].item()}"
    )


__all__ = ["Values"]
