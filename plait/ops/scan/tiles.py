"""How a scan is cut into blocks: rows and elements of a tile, warps, chunks of long rows."""

from __future__ import annotations

from dataclasses import dataclass

from plait.ops.engine.dims import next_power_of_2
from plait.ops.norm.rows import RowLayout, RowTile, tile_of

_TILE = 4096  # 4-byte registers of accumulators: 16 a thread of 8 warps
_SMALL_TILE = 2048
_PER_THREAD = 16
_MAX_WARPS = 32
_LINE_BYTES = 128  # side by side, where the next row is closer than the next element
_SECTOR_BYTES = 32
_VECTOR_BYTES = 16
_COLUMN_WARPS = 4
_COLUMN_PER_THREAD = 32
_LEAST_SERIAL = 4
_MAX_CHUNKS = 1024  # of a row: every block folds the totals of those before its own
_MAX_TOTALS = 8192  # of a tile's rows together
_BLOCKS_PER_SM = 4
_INTERPRETED_TILE = 1 << 17


@dataclass(frozen=True)
class Cut:
    """A tile, and into how many chunks of how many elements its rows are cut, each for a block.

    `serial` is 0 for tiles (rows, block), else for (serial, block // serial * rows).
    """

    tile: RowTile
    serial: int
    chunks: int
    chunk: int


def cut(layout: RowLayout, itemsize: int, *, weight: int, num_sms: int, interpreted: bool) -> Cut:
    """How blocks share the rows of `layout`.

    Args:
        itemsize: bytes of the smaller of an element and a result.
        weight: 4-byte registers of an element's accumulator.
        num_sms: of the device; rows that give fewer blocks are cut into chunks.
        interpreted: blocks are slow to start and large tiles cheap.
    """
    whole, weight = next_power_of_2(layout.size), next_power_of_2(weight)
    if interpreted:
        block = min(whole, _INTERPRETED_TILE)
        rows = min(next_power_of_2(layout.num_rows), _INTERPRETED_TILE // block)
        return Cut(tile_of(layout, rows, block, 1), 0, 1, layout.size)
    if layout.side_by_side:
        rows, block, serial = _columns(layout, itemsize, weight, num_sms)
        tile = tile_of(layout, rows, block, _COLUMN_WARPS)
    else:
        rows, block = _rows(layout, weight, num_sms)
        tile = tile_of(layout, rows, block, _warps(rows * block, itemsize, weight))
        serial = 0
    return Cut(tile, serial, *_chunks(layout, tile, num_sms))


def _rows(layout: RowLayout, weight: int, num_sms: int) -> tuple[int, int]:
    """ROWS and BLOCK where a row is closer together than its neighbours are."""
    whole, tile = next_power_of_2(layout.size), _TILE // weight
    alone = layout.num_rows <= num_sms  # each row has an SM to itself
    if whole > (tile * 4 if alone else tile * 2):
        # The last tile of a row may be almost empty: many tiles waste less of it.
        return 1, tile if alone or layout.size > tile * 4 else tile // 2
    rows = max(min(_SMALL_TILE // weight // whole, next_power_of_2(layout.num_rows)), 1)
    while rows > 1 and layout.num_rows < rows * num_sms * 2:
        rows //= 2
    return rows, whole


def _columns(layout: RowLayout, itemsize: int, weight: int, num_sms: int) -> tuple[int, int, int]:
    """ROWS, BLOCK and SERIAL where the next row is closer than the next element: a thread has 16
    bytes of rows side by side, SERIAL elements of each."""
    whole, most = next_power_of_2(layout.size), next_power_of_2(layout.dims[-1])
    vector = _VECTOR_BYTES // itemsize
    threads = _COLUMN_WARPS * 32
    serial = min(max(_COLUMN_PER_THREAD // weight // vector, _LEAST_SERIAL), whole)
    rows = max(_LINE_BYTES // itemsize, threads * vector * serial // whole)
    rows = min(rows, most)
    while rows * itemsize > _SECTOR_BYTES and layout.num_rows < rows * num_sms * 2:
        rows //= 2
    segments = max(threads * vector // rows, 1)
    return rows, min(serial * segments, whole), serial


def _warps(elements: int, itemsize: int, weight: int) -> int:
    """16 bytes a thread up to 4 warps, then `_PER_THREAD` registers a thread."""
    warps = min(elements * itemsize // (32 * 16), 4)
    return min(max(warps, elements * weight // (32 * _PER_THREAD), 1), _MAX_WARPS)


def _chunks(layout: RowLayout, tile: RowTile, num_sms: int) -> tuple[int, int]:
    """Chunks of a row and elements of one, a multiple of `tile.block`; (1, size) for many rows:
    with chunks everything is read twice."""
    if tile.whole or not tile.grid or tile.grid > num_sms:
        return 1, layout.size
    steps = -(-layout.size // tile.block)
    wanted = num_sms * _BLOCKS_PER_SM // tile.grid
    chunks = min(wanted, steps, _MAX_CHUNKS, _MAX_TOTALS // tile.rows)
    if chunks < 2:
        return 1, layout.size
    per_chunk = -(-steps // chunks)
    return -(-steps // per_chunk), per_chunk * tile.block


__all__ = ["Cut", "cut"]
