"""Dims of strided tensors: sorted by closeness in memory, merged where one stride describes two.

A `Dim` is a size and its stride, in elements, in each of several tensors of one shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Offsets from here on are 64-bit; a tile may step a little past the last element.
WIDE_FROM = 2**31 - 2**20


@dataclass(frozen=True)
class Dim:
    """`size` elements, `strides[i]` apart in tensor number i."""

    size: int
    strides: tuple[int, ...]


def by_closeness(dims: Iterable[Dim]) -> list[Dim]:
    """Farthest apart in the first tensor first; stride 0, which costs no reading, before all."""
    return sorted(dims, key=lambda each: _nonzero(each.strides), reverse=True)


def _nonzero(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(each or 2**62 for each in strides)


def merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The same elements in the same order, without dims of size 1 and with neighbours merged where
    all tensors allow it."""
    found: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if found:
            outer = found[-1]
            if all(a == b * dim.size for a, b in zip(outer.strides, dim.strides, strict=True)):
                found[-1] = Dim(outer.size * dim.size, dim.strides)
                continue
        found.append(dim)
    return tuple(found)


def count(dims: Iterable[Dim]) -> int:
    """Elements that the dims number; 1 without any."""
    total = 1
    for each in dims:
        total *= each.size
    return total


def reach(dims: Iterable[Dim], tensor: int) -> int:
    """How far from the first element the last one lies in tensor number `tensor`."""
    return sum(max(each.size - 1, 0) * abs(each.strides[tensor]) for each in dims)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


__all__ = ["WIDE_FROM", "Dim", "by_closeness", "count", "merged", "next_power_of_2", "reach"]
