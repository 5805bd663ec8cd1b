"""Address ranges and the lookup of many addresses at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Interval(Generic[T]):
    """The bytes [start, end) and what belongs to them."""

    start: int
    end: int
    value: T


class IntervalMap(Generic[T]):
    """Disjoint address ranges. A new range replaces every older one that it overlaps: the memory
    has been handed out again."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._intervals: list[Interval[T]] = []

    def add(self, start: int, nbytes: int, value: T) -> None:
        """Add [start, start + nbytes); an empty range is ignored."""
        if nbytes <= 0:
            return
        first, last = self._touching(start, start + nbytes)
        self._starts[first:last] = [start]
        self._intervals[first:last] = [Interval(start, start + nbytes, value)]

    def remove(self, start: int) -> Interval[T] | None:
        """Remove and return the range that begins at `start`, if there is one."""
        i = bisect_left(self._starts, start)
        if i == len(self._starts) or self._starts[i] != start:
            return None
        del self._starts[i]
        return self._intervals.pop(i)

    def find(self, address: int) -> Interval[T] | None:
        """The range that contains `address`."""
        i = bisect_right(self._starts, address) - 1
        if i >= 0 and address < self._intervals[i].end:
            return self._intervals[i]
        return None

    def split(
        self, addresses: np.ndarray
    ) -> tuple[list[tuple[Interval[T], np.ndarray]], np.ndarray]:
        """Sort uint64 addresses by range: (range, its addresses) pairs, and those in no range."""
        low, high = int(addresses.min()), int(addresses.max())
        first, last = self._touching(low, high + 1)
        if first == last:
            return [], addresses
        touched = self._intervals[first:last]
        if len(touched) == 1 and touched[0].start <= low and high < touched[0].end:
            return [(touched[0], addresses)], addresses[:0]
        parts, rest = [], np.ones(addresses.size, bool)
        for interval in touched:
            inside = (addresses >= np.uint64(interval.start)) & (
                addresses < np.uint64(interval.end)
            )
            if inside.any():
                parts.append((interval, addresses[inside]))
                rest &= ~inside
        return parts, addresses[rest]

    def __len__(self) -> int:
        return len(self._starts)

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Positions [first, last) of the ranges that share a byte with [start, end)."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._intervals[first].end <= start:
            first += 1
        return first, bisect_left(self._starts, end, lo=first)


__all__ = ["Interval", "IntervalMap"]
