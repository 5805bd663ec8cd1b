"""Tensors as matrices: leading dims number the rows, trailing dims are a row, any strides.

Neighbouring dims that one stride describes in all tensors are merged. Rows keep their order, so
that saved statistics, one a row, are addressed by the row's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.ops.norm.rows import next_power_of_2

MAX_ROW_DIMS, MAX_COLUMN_DIMS = 3, 2  # after merging
_WIDE = 2**31 - 2**20  # offsets from here on are 64-bit; a tile may step past the last element
_INTERPRETED_TILE = 1 << 16

Dims = list[tuple[int, tuple[int, ...]]]  # size, and the stride in each tensor


@dataclass(frozen=True)
class Matrix:
    """Tensors of one shape as matrices (num_rows, size).

    Attributes:
        rows, columns: the merged dims, at least one of each.
        wide: whether an offset needs 64 bits.
        unit: what divides `size` and all strides of rows, 1, 2, 4 or 8; 1 where 16 does, too, since
            Triton then sees by itself that loads may be wide. They are passed in this unit.
    """

    num_rows: int
    size: int
    rows: tuple[tuple[int, tuple[int, ...]], ...]
    columns: tuple[tuple[int, tuple[int, ...]], ...]
    wide: bool
    unit: int = 1

    def sizes(self) -> dict[str, int]:
        """Launch arguments `num_rows`, `size`, and `r1`, `r2`, `c1`: sizes of inner merged dims."""
        row_sizes = [1] * (MAX_ROW_DIMS - len(self.rows)) + [n for n, _ in self.rows]
        return {
            "num_rows": self.num_rows,
            "size": self.size // self.unit,
            "r1": row_sizes[1],
            "r2": row_sizes[2],
            "c1": self.columns[-1][0],
        }

    def places(self, name: str, index: int) -> dict[str, int]:
        """Launch arguments `{name}_r0`, `_r1`, `_r2`, `_c0`, `_c1`: strides of tensor `index`."""
        row = [0] * (MAX_ROW_DIMS - len(self.rows))
        row += [s[index] // self.unit for _, s in self.rows]
        column = [0] * (MAX_COLUMN_DIMS - len(self.columns)) + [s[index] for _, s in self.columns]
        found = {f"{name}_r{number}": stride for number, stride in enumerate(row)}
        found.update({f"{name}_c{number}": stride for number, stride in enumerate(column)})
        return found

    def constants(self) -> dict[str, int | bool]:
        """Compile-time launch arguments ROW_DIMS, COLUMN_DIMS, WIDE, UNIT."""
        return {
            "ROW_DIMS": len(self.rows),
            "COLUMN_DIMS": len(self.columns),
            "WIDE": self.wide,
            "UNIT": self.unit,
        }


def matrix(
    shape: Sequence[int], num_trailing: int, strides: Sequence[Sequence[int]]
) -> Matrix | None:
    """Tensors of `shape` with these strides, their last `num_trailing` dims as rows' elements.

    Returns None where more dims remain than the kernels have indices for.
    """
    split = len(shape) - num_trailing
    dims = [(n, tuple(s[d] for s in strides)) for d, n in enumerate(shape)]
    rows, columns = _merged(dims[:split], len(strides)), _merged(dims[split:], len(strides))
    if len(rows) > MAX_ROW_DIMS or len(columns) > MAX_COLUMN_DIMS:
        return None
    num_rows, size = _product(rows), _product(columns)
    reach = max(
        sum(s[each] * max(n - 1, 0) for n, s in (*rows, *columns)) for each in range(len(strides))
    )
    wide = max(reach, num_rows * size) >= _WIDE
    unit = unit_of(size, [each for n, s in rows if n > 1 for each in s])
    return Matrix(num_rows, size, tuple(rows), tuple(columns), wide, unit)


def unit_of(*numbers: int | Sequence[int]) -> int:
    """1, 2, 4 or 8: the largest that divides all numbers; 1 if 16 does."""
    common = 0
    for each in numbers:
        common = math.gcd(common, *((each,) if isinstance(each, int) else each))
    return 1 if common % 16 == 0 else common & -common


def step_of(parameter: Tensor | None) -> int | None:
    """The one stride of a weight or bias, read as a vector in the order of its elements; None if it
    has several. A weight that is not there has 0."""
    if parameter is None:
        return 0
    dims = _merged([(n, (s,)) for n, s in zip(parameter.shape, parameter.stride(), strict=True)], 1)
    return dims[0][1][0] if len(dims) == 1 else None


def _merged(dims: Dims, num_tensors: int) -> Dims:
    found: Dims = []
    for size, strides in dims:
        if size == 1:
            continue
        if found and all(a == b * size for a, b in zip(found[-1][1], strides, strict=True)):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found or [(1, (1,) * num_tensors)]


def _product(dims: Dims) -> int:
    count = 1
    for size, _ in dims:
        count *= size
    return count


@dataclass(frozen=True)
class Tile:
    """`rows` rows by `block` elements at a time, both powers of two; `whole`: a row fits."""

    rows: int
    block: int
    whole: bool
    num_warps: int


def tile_for(found: Matrix, *, longest: int, per_thread: int, interpreted: bool) -> Tile:
    """The tile of a block.

    Args:
        longest: elements of the longest row that is kept in registers.
        per_thread: elements a thread works on where a tile is large enough.
    """
    whole = next_power_of_2(found.size)
    if whole > longest:
        block = longest if interpreted else min(longest, 4096)
        return Tile(1, block, False, max(block // (32 * per_thread), 4))
    if interpreted:
        rows = min(next_power_of_2(found.num_rows), max(_INTERPRETED_TILE // whole, 1))
        return Tile(rows, whole, True, 1)
    rows = max(128 * per_thread // whole, 1)
    rows = min(rows, max(next_power_of_2(found.num_rows // 256), 1))  # enough blocks first
    warps = max(min(rows * whole // (32 * per_thread), 16), 1)
    return Tile(rows, whole, True, warps)


__all__ = ["Matrix", "Tile", "matrix", "step_of", "tile_for"]
