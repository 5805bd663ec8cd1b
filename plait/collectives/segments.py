"""Segments: the rows of each rank in a gathered or scattered dimension, and where they lie.

A tensor [outer..., dim, inner..., features] is seen as a matrix [outer * dim * inner, features].
Rank s owns `lengths[s] = dim_s * inner` consecutive rows in each of the `outer` blocks of
`total = sum(lengths)` rows. Row r of its segment is row
`(r // lengths[s]) * total + starts[s] + r % lengths[s]` of the whole. Kernels read the same from a
table of int32 [4, world_size]: rows, length, start, first row of this slice.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from plait.errors import CapacityError

_TABLES: OrderedDict[tuple[object, ...], torch.Tensor] = OrderedDict()
_MAX_TABLES = 1024


@dataclass(frozen=True)
class Segments:
    """See the module. `first` and `rows` describe one slice of every segment (at first: all)."""

    outer: int
    lengths: tuple[int, ...]
    first: tuple[int, ...]
    rows: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Segments:
        """Segments of `shape` (features last, `dim` before): rank s has `sizes[s]` along dim."""
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
        lengths = tuple(size * inner for size in sizes)
        return Segments(
            outer, lengths, (0,) * len(lengths), tuple(outer * length for length in lengths)
        )

    @property
    def world_size(self) -> int:
        """Number of segments."""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Rows of all segments in one outer block."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment in an outer block."""
        return (0, *accumulate(self.lengths))[: self.world_size]

    @property
    def max_rows(self) -> int:
        """Rows of the longest segment in this slice."""
        return max(self.rows)

    @property
    def contiguous(self) -> bool:
        """Whether each segment's rows are consecutive in the whole."""
        return self.outer == 1

    @property
    def uniform(self) -> bool:
        """Whether this is all of equally long segments, each consecutive in the whole."""
        return (
            self.outer == 1
            and not any(self.first)
            and self.rows == self.lengths
            and len(set(self.rows)) == 1
        )

    def slices(self, max_rows: int) -> Iterator[Segments]:
        """Slices of at most `max_rows` rows a segment, in order, as many on every rank."""
        for begin in range(0, max(self.max_rows, 1), max_rows):
            rows = tuple(min(max_rows, max(0, rows - begin)) for rows in self.rows)
            yield Segments(
                self.outer, self.lengths, tuple(first + begin for first in self.first), rows
            )

    def table(self, device: torch.device) -> torch.Tensor:
        """The table that kernels read; cached, bounded."""
        key = (self, device)
        table = _TABLES.get(key)
        if table is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise CapacityError(
                    argument="shape",
                    expected="one that an operator has seen before graph capture",
                    got=f"segments of {self.rows} rows, new while capturing",
                    remedy="Call the operator once with these shapes before capturing.",
                )
            values = [*self.rows, *self.lengths, *self.starts, *self.first]
            table = _TABLES[key] = torch.tensor(values, dtype=torch.int32).to(device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # other streams read it as well
            if len(_TABLES) > _MAX_TABLES:
                _TABLES.popitem(last=False)
        else:
            _TABLES.move_to_end(key)
        return table

    def pieces(
        self, whole: torch.Tensor, rank: int, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (part of `whole`, part of `source`) that lie opposite each other.

        `whole` is [outer * total, features], `source` [rows[rank], features] is rank's rows of this
        slice. One pair if they are consecutive in the whole, else one for each outer block.
        """
        length, start, begin = self.lengths[rank], self.starts[rank], self.first[rank]
        end = begin + self.rows[rank]
        position = begin
        while position < end:
            outer, within = divmod(position, length)
            count = min(length - within, end - position)
            row = outer * self.total + start + within
            yield whole[row : row + count], source[position - begin : position - begin + count]
            position += count


def max_tile_rows(rows: int) -> int:
    """Tallest tile that stays within the padding of a segment of `rows` rows: 16 to 128."""
    block = 16
    while block < min(rows, 128):
        block *= 2
    return block


def padded_rows(rows: int) -> int:
    """Rows that a segment takes in a region: tiles of up to 128 rows never reach into the next one.

    A function of the rows alone, so that ranks with different configurations agree on addresses.
    """
    block = max_tile_rows(rows)
    return -(-max(rows, 1) // block) * block


__all__ = ["Segments", "max_tile_rows", "padded_rows"]
