"""Rows of tensors: where they start, how they lie, and how many of them a block takes.

A row is what an operator treats as one: the elements along a dim, or along neighbouring dims that
one stride describes. The other dims number the rows; those that one stride describes in all
tensors are merged, and they are sorted so that the last is the closest in memory. Kernels get sizes
and strides as numbers and find a block's rows with plait/ops/norm/rows_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from plait.ops.engine.dims import (
    WIDE_FROM,
    Dim,
    by_closeness,
    count,
    merged,
    next_power_of_2,
    reach,
)

MAX_DIMS = 4  # dims that number the rows, after merging
_MAX_TILE = 16384  # elements of a tile that 16 warps keep in registers, as fp32
_MAX_ROW = 32768  # a row that 32 warps keep in registers, as fp32
_INTERPRETED_TILE = 1 << 17


@dataclass(frozen=True)
class RowLayout:
    """The rows of one or several tensors of the same shape.

    Attributes:
        size: elements of a row.
        dims: sizes of the merged dims that number the rows; (1,) if there is a single row.
        strides: of each tensor, the strides of `dims` in elements.
        steps: of each tensor, the stride along a row in elements.
        wide: whether some offset needs 64 bits.
        side_by_side: whether, in the first tensor, the next row is closer than the next element
            of the same row.
    """

    size: int
    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    wide: bool
    side_by_side: bool

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return prod(self.dims)

    def sizes(self) -> dict[str, int]:
        """Launch arguments `num_rows`, `n1`, `n2`, `n3`: sizes of the dims but for the outermost
        of four; those that are missing, at the front, are 1."""
        padded = (1,) * (MAX_DIMS - len(self.dims)) + self.dims
        return {"num_rows": self.num_rows, "n1": padded[1], "n2": padded[2], "n3": padded[3]}

    def places(self, name: str, index: int) -> dict[str, int]:
        """Launch arguments `{name}_s0` to `{name}_s3` and `{name}_step`: the strides of tensor
        number `index` along the dims and along a row; those that are missing are 0."""
        padded = (0,) * (MAX_DIMS - len(self.dims)) + self.strides[index]
        found = {f"{name}_s{number}": stride for number, stride in enumerate(padded)}
        found[f"{name}_step"] = self.steps[index]
        return found


def row_layout(tensors: Sequence[torch.Tensor], dim: int | Sequence[int]) -> RowLayout | None:
    """The rows along `dim` (one, or several that count as one in this order) of tensors of one
    shape.

    Returns None where no `RowLayout` describes them: more than `MAX_DIMS` dims number the rows, or
    the dims of a row have no common stride. A 0-d tensor is one row of one element.
    """
    shape = tuple(tensors[0].shape)
    strides = zip(*(each.stride() for each in tensors), strict=True)
    dims = [Dim(size, each) for size, each in zip(shape, strides, strict=True)]
    along = [dim] if isinstance(dim, int) else list(dim)
    along = [each % len(shape) for each in along] if shape else []
    others = [each for index, each in enumerate(dims) if index not in along]
    return layout_of(others, [dims[each] for each in along], len(tensors))


def layout_of(others: Iterable[Dim], row: Iterable[Dim], num_tensors: int) -> RowLayout | None:
    """The rows that `others` number and `row` spans, in tensors whose strides these dims hold.

    None as for `row_layout`.
    """
    spans, dims = merged(row), merged(by_closeness(others))
    if len(spans) > 1 or len(dims) > MAX_DIMS:
        return None
    span = spans[0] if spans else Dim(1, (1,) * num_tensors)
    if not dims or not count(dims):
        dims = (Dim(count(dims), (0,) * num_tensors),)
    whole = (*dims, span)
    farthest = max(count(whole), *(reach(whole, index) for index in range(num_tensors)))
    closest = dims[-1].strides[0]
    return RowLayout(
        size=span.size,
        dims=tuple(each.size for each in dims),
        strides=tuple(tuple(each.strides[i] for each in dims) for i in range(num_tensors)),
        steps=span.strides,
        wide=farthest >= WIDE_FROM,
        side_by_side=dims[-1].size > 1 and span.size > 1 and 0 < closest < span.strides[0],
    )


@dataclass(frozen=True)
class RowTile:
    """What a block works on: `rows` rows, `block` elements of each at a time.

    Attributes:
        rows, block: powers of two.
        whole: `block` covers a row, so a kernel reads it once and keeps it.
        tiled: the rows of a block differ in the last dim only; else they are consecutive in the
            count over all dims.
        grid: blocks for all rows.
        num_warps: warps of a block.
    """

    rows: int
    block: int
    whole: bool
    tiled: bool
    grid: int
    num_warps: int

    def constants(self, layout: RowLayout) -> dict[str, int | bool]:
        """Compile-time launch arguments ROWS, BLOCK, NDIM, TILED, WIDE."""
        return {
            "ROWS": self.rows,
            "BLOCK": self.block,
            "NDIM": len(layout.dims),
            "TILED": self.tiled,
            "WIDE": layout.wide,
        }


def row_tile(
    layout: RowLayout,
    itemsize: int,
    *,
    num_sms: int,
    interpreted: bool = False,
    max_row: int = _MAX_ROW,
    max_tile: int = _MAX_TILE,
) -> RowTile:
    """How blocks share the rows of `layout`.

    Args:
        itemsize: bytes of the smallest element that is read or written.
        num_sms: of the device; few rows are spread over at least that many blocks.
        max_row: a longer row is not kept whole. Halve it for each further tensor that a kernel
            keeps, and again for fp64.
        max_tile: the same for tiles of several rows.
    """
    size = max(layout.size, 1)
    whole = next_power_of_2(size)
    if interpreted:
        block = min(whole, _INTERPRETED_TILE)
        rows = min(next_power_of_2(layout.num_rows), max(_INTERPRETED_TILE // block, 1))
        return tile_of(layout, rows, block, 1)
    if layout.side_by_side:
        # 128 bytes side by side; a quarter of it where blocks are few.
        rows = min(next_power_of_2(layout.dims[-1]), max(128 // itemsize, 16))
        while rows * itemsize > 32 and layout.num_rows < rows * num_sms:
            rows //= 2
        block = min(whole, max(max_tile // rows, 1))
        if block < whole:
            block = max(min(block, 4096 // rows), 1)
        return tile_of(layout, rows, block, _warps(rows * block, itemsize))
    if whole > max_row:
        return tile_of(layout, 1, max(min(max_row // 4, 8192), 1), 16)
    rows = max(min(2048 // whole, next_power_of_2(layout.num_rows)), 1)
    while rows > 1 and layout.num_rows < rows * num_sms * 2:
        rows //= 2
    return tile_of(layout, rows, whole, _warps(rows * whole, itemsize))


def row_chunks(
    layout: RowLayout, tile: RowTile, *, num_sms: int, interpreted: bool = False
) -> tuple[int, int]:
    """How many chunks each row is cut into, each for a block of its own, and how many elements one
    has (a multiple of `tile.block`); (1, layout.size) where blocks are many or rows short.

    A chunk has at least four steps or 8192 elements of a block's rows, and a row at most 512.
    """
    wanted = 1 if tile.whole or not tile.grid else num_sms * 3 // tile.grid
    steps = -(-layout.size // tile.block)
    least = 1 if tile.rows * tile.block >= 8192 else 4
    chunks = min(wanted, steps // least, 512)
    if interpreted or chunks < 2:
        return 1, layout.size
    per_chunk = -(-steps // chunks)
    return -(-steps // per_chunk), per_chunk * tile.block


def tile_of(layout: RowLayout, rows: int, block: int, num_warps: int) -> RowTile:
    """The tile of `rows` rows by `block` elements, both powers of two."""
    last = layout.dims[-1]
    tiled = len(layout.dims) > 1 and last * 2 > rows
    grid = -(-layout.num_rows // rows)
    if tiled:
        grid = layout.num_rows // last * -(-last // rows) if last else 0
    return RowTile(rows, block, block >= layout.size, tiled, grid, num_warps)


def _warps(elements: int, itemsize: int) -> int:
    """Warps for a tile: 16 bytes a thread up to 4 warps, then more elements a thread."""
    vector = max(16 // itemsize, 1)
    warps = elements // (32 * vector)
    if warps > 4:
        warps = max(4, elements // (32 * 16))
    if warps > 16:
        warps = max(16, elements // (32 * 32))
    return max(min(warps, 32), 1)


__all__ = [
    "MAX_DIMS",
    "RowLayout",
    "RowTile",
    "next_power_of_2",
    "row_chunks",
    "row_layout",
    "row_tile",
    "tile_of",
]
