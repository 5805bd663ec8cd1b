"""How a reduction is cut into blocks: tile shape, warps, and shares of a result."""

from __future__ import annotations

from dataclasses import dataclass

from plait.ops.engine.dims import next_power_of_2
from plait.ops.reduction.layout import Layout

_THREAD_BYTES = 64  # of a tile, each thread: four loads of 16 bytes under way
_VECTOR_BYTES = 16
_COLUMN_BYTES = 128  # side by side, where the next result is closer than the next element
_LEAST_COLUMN_BYTES, _MOST_COLUMN_BYTES = 32, 2048  # a sector; 16 bytes of 128 threads
_MAX_WARPS = 32
_FEW_WARPS, _MANY_WARPS = 4, 8  # of a block among many
_MAX_SHARES = 1024  # of one result: a second launch reads them in one tile
_ALONE_BYTES = 1 << 17  # up to here a block of its own is faster than shares and a second launch
_INTERPRETED_TILE = 1 << 16


@dataclass(frozen=True)
class Tiles:
    """BLOCK_K results by BLOCK_O outer by BLOCK_I inner elements, all powers of two.

    `shares`: blocks that share a result, each with tiles of its own. `stages`: tiles under way in
    shared memory. `unroll`: tiles that a step of a block's loop reads.
    """

    block_k: int
    block_o: int
    block_i: int
    num_warps: int
    shares: int
    stages: int = 1
    unroll: int = 1

    def inner_tiles(self, layout: Layout) -> int:
        """Tiles along the inner dim."""
        return -(-layout.inner.size // self.block_i)

    def num_tiles(self, layout: Layout) -> int:
        """Tiles of one result."""
        return self.inner_tiles(layout) * -(-layout.num_outer // self.block_o)

    def k_blocks(self, layout: Layout) -> int:
        """Blocks of one share."""
        return -(-layout.num_results // self.block_k)


def choose(
    layout: Layout, itemsize: int, *, weight: int, whole: bool, num_sms: int, interpreted: bool
) -> Tiles:
    """The tiles of a reduction.

    Args:
        itemsize: bytes of an input element.
        weight: 4-byte registers of an element's accumulator; heavy ones get smaller tiles.
        whole: a tile is kept while its rows are looked at more than once.
        num_sms: of the device.
        interpreted: blocks are slow to start and tiles cheap.
    """
    if interpreted:
        block_i, block_o, block_k = _fill(layout, _INTERPRETED_TILE, 1)
        return Tiles(block_k, block_o, block_i, 1, 1)
    per_thread = max(min(_THREAD_BYTES // itemsize, 32 // next_power_of_2(weight)), 4)
    vector = max(_VECTOR_BYTES // itemsize, 1)
    columns = _columns_first(layout)
    least_k = _side_by_side(layout, itemsize, num_sms) if columns else 1
    k_blocks = -(-layout.num_results // least_k)
    few = k_blocks * 4 < num_sms * 3
    share = few and layout.reduced * least_k * itemsize > _ALONE_BYTES
    elements = next_power_of_2(layout.reduced) * least_k
    if share:
        warps = _MANY_WARPS
    elif k_blocks <= num_sms * 2:  # each block has an SM to itself
        most = _MAX_WARPS // 2 if whole or weight > 1 else _MAX_WARPS
        warps = max(min(elements // (32 * vector), most), 1)
    else:
        warps = _MANY_WARPS if elements > _FEW_WARPS * 32 * per_thread else _FEW_WARPS
    block_i, block_o, block_k = _fill(layout, warps * 32 * per_thread, least_k)
    while block_k > least_k and layout.num_results < block_k * num_sms * 2:
        block_k //= 2
    while warps > 1 and block_i * block_o * block_k < warps * 32 * vector:
        warps //= 2
    tiles = Tiles(block_k, block_o, block_i, warps, 1)
    if not share:
        return tiles
    wanted = num_sms * 1024 // (warps * 32) // tiles.k_blocks(layout)
    shares = max(min(wanted, tiles.num_tiles(layout) // 2, _MAX_SHARES), 1)
    return Tiles(block_k, block_o, block_i, warps, shares)


def _side_by_side(layout: Layout, itemsize: int, num_sms: int) -> int:
    """BLOCK_K, at least, of results that lie side by side: enough bytes, or enough blocks."""
    least_k = min(_COLUMN_BYTES // itemsize, next_power_of_2(layout.num_results))
    while (
        least_k * itemsize > _LEAST_COLUMN_BYTES and layout.num_results * 4 < least_k * num_sms * 3
    ):
        least_k //= 2
    # Of very many, so many that a block's threads need not meet to add theirs.
    while least_k * itemsize < _MOST_COLUMN_BYTES and layout.num_results >= least_k * num_sms * 8:
        least_k *= 2
    return least_k


def _columns_first(layout: Layout) -> bool:
    """Whether the next result is closer in memory than the next element of the same one."""
    reduced = [each for each in (*layout.outer, layout.inner) if each.size > 1]
    steps = [each.strides[0] for each in reduced if each.strides[0]]
    kept = layout.kept[-1]
    return kept.size > 1 and 0 < kept.strides[0] < min(steps, default=2**62)


def _fill(layout: Layout, size: int, least_k: int) -> tuple[int, int, int]:
    """BLOCK_I, BLOCK_O, BLOCK_K of a tile of about `size` elements; the closest dim comes first."""
    room = max(size // least_k, 1)
    inner, outer = next_power_of_2(layout.inner.size), next_power_of_2(layout.num_outer)
    if layout.outer and 0 < layout.outer[-1].strides[0] < layout.inner.strides[0]:
        block_o = min(outer, room)
        block_i = min(inner, max(room // block_o, 1))
    else:
        block_i = min(inner, room)
        block_o = min(outer, max(room // block_i, 1))
    most_k = max(size // (block_i * block_o), least_k)
    return block_i, block_o, min(next_power_of_2(layout.num_results), most_k)


__all__ = ["Tiles", "choose"]
