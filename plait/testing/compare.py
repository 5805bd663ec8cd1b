"""Comparisons whose tolerance is derived, not chosen.

What only moves data is compared bit by bit; what computes may err at most twice as much as plain
PyTorch in the same low precision does, both measured against a run in fp64.
"""

from __future__ import annotations

import torch

_ALLOWED_RATIO = 2.0
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Fail with the first differing coordinate unless shape, dtype and every bit agree.

    NaNs are equal only to NaNs of the same bits, 0.0 and -0.0 differ. Complex dtypes are not taken.
    """
    _assert_same_form(actual, expected, what)
    integer = _INTEGERS[actual.element_size()]
    differs = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if bool(differs.any()):
        raise AssertionError(f"{what} differs bitwise{_first(differs, actual, expected)}")


def assert_close_to_fp64(
    actual: torch.Tensor,
    exact_fp64: torch.Tensor,
    plain_low_precision: torch.Tensor,
    what: str = "result",
    *,
    plain_error_share: float = 0.0,
) -> None:
    """Fail unless the largest error of `actual` is at most twice that of plain low precision.

    Errors are absolute differences from `exact_fp64`; one rounding of the largest exact value is
    added, since plain PyTorch may happen to be exact. Where plain PyTorch is not finite, `actual`
    must have the same value (NaN for NaN). `plain_error_share`: largest error of plain PyTorch on
    other values of the kind, as a share of the largest exact one; for results of few elements, on
    which plain PyTorch may err less than it does as a rule.
    """
    if exact_fp64.dtype != torch.float64:
        raise AssertionError(f"{what}: the exact values are {exact_fp64.dtype}, not torch.float64")
    _assert_same_form(actual, plain_low_precision, what)
    if actual.shape != exact_fp64.shape:
        raise AssertionError(
            f"{what}: shape {list(actual.shape)}, expected {list(exact_fp64.shape)}"
        )
    finite = plain_low_precision.isfinite() & exact_fp64.isfinite()
    plain_wide, wide = plain_low_precision.double(), actual.double()
    same = (wide == plain_wide) | (wide.isnan() & plain_wide.isnan())
    wrong = ~(wide.isfinite() & finite) & ~same
    if bool(wrong.any()):
        raise AssertionError(
            f"{what} is not finite, or ought not to be{_first(wrong, actual, exact_fp64)}"
        )
    error = torch.where(finite, (wide - exact_fp64).abs(), 0.0)
    plain_error = torch.where(finite, (plain_wide - exact_fp64).abs(), 0.0)
    largest_exact = _largest(torch.where(finite, exact_fp64, 0.0))
    rounding = torch.finfo(actual.dtype).eps / 2 * largest_exact
    plain = max(_largest(plain_error), plain_error_share * largest_exact)
    allowed = _ALLOWED_RATIO * plain + rounding
    if _largest(error) > allowed:
        raise AssertionError(
            f"{what}: largest error {_largest(error):.3e}, allowed {allowed:.3e} (plain "
            f"{actual.dtype} errs {plain:.3e})"
            f"{_first(error > allowed, actual, exact_fp64)}"
        )


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _assert_same_form(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {list(actual.shape)}, "
            f"expected {expected.dtype} {list(expected.shape)}"
        )


def _first(where: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    coordinate = tuple(int(index) for index in where.nonzero()[0])
    return (
        f" in {int(where.sum())} of {where.numel()} elements, first at {list(coordinate)}: "
        f"{actual[coordinate].item()}, expected {expected[coordinate].item()}"
    )


__all__ = ["assert_bitwise", "assert_close_to_fp64"]
