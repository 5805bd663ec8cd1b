"""Operators of the scan engine with their references, and tensors of every layout."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
INDEXED = ("cummax", "cummin")


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    """What the operator takes."""
    return FLOATS if name == "logcumsumexp" else (*FLOATS, *INTEGERS, torch.bool)


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Numbers near 1, so that products stay finite, of which every third is a tie with another."""
    made = 1 + torch.randn(shape) / 4
    made = torch.where(torch.rand(shape) < 0.3, made.round(), made)
    if dtype is torch.bool:
        return (made > 1).to(device)
    if not dtype.is_floating_point:
        made = (made * 3).round().clamp(0 if dtype is torch.uint8 else -100, 100)
    return made.to(dtype).to(device)


def layouts(dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Tensors by what is special about them."""

    def make(*shape: int) -> Tensor:
        return values(shape, dtype, device)

    return {
        "0-d": make(),
        "one": make(1),
        "row": make(37),
        "empty": make(3, 0, 2),
        "rows": make(5, 23),
        "columns": make(23, 5).t(),
        "steps": make(10, 46)[::2, 1::2],
        "expanded": make(4, 1, 7).expand(4, 6, 7),
        "apart": make(3, 4, 5, 6)[:, ::2, 1:4, ::3].permute(2, 0, 3, 1),
        "middle": make(3, 9, 6),
    }


def results(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """One or two results as a list."""
    return [found] if isinstance(found, Tensor) else list(found)


def assert_alike(name: str, ours: Tensor, aten: Tensor, exact: Tensor) -> None:
    """Form exactly as ATen's; values, too, but for floating sums and products: those are within
    twice ATen's error against `exact` and two units of the largest. In fp64, where nothing is wider
    and `exact` has rounding errors of its own, within those of a random walk of so many steps."""
    assert (ours.dtype, ours.shape, ours.stride()) == (aten.dtype, aten.shape, aten.stride())
    if name in INDEXED or not aten.is_floating_point():
        assert torch.equal(ours.nan_to_num(nan=7), aten.nan_to_num(nan=7))
    elif aten.numel():
        largest, eps = exact.abs().max(), torch.finfo(aten.dtype).eps
        error = (aten.double() - exact).abs().max()
        units = 2.0 if aten.dtype is not torch.float64 else 4 * aten.numel() ** 0.5
        assert (ours.double() - exact).abs().max() <= 2 * error + units * eps * largest


__all__ = ["FLOATS", "INDEXED", "NAMES", "assert_alike", "dtypes", "layouts", "results", "values"]
