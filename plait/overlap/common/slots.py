"""Slots: where the partial sums of all ranks for one tile meet.

A region holds [world_size, slot_rows, N] of PARTIAL; slot p is what rank p computed. A tile's word
is READY + p * words_per_rank + tile. Offsets within a tile are 32-bit and its start is one 64-bit
scalar: 64-bit offsets for every element would spill registers beside the accumulator.
"""

import triton
import triton.language as tl

from plait.symm.lang.patterns import wait
from plait.symm.lang.words import READY, data_ptr, get_rank, get_world_size


@triton.jit
def store_rows(ptr, tile, row, num_rows, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile at (row, col) of a contiguous [num_rows, N] matrix, rounded to its dtype."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    start = ptr + tl.cast(row, tl.int64) * N + col
    mask = (row + rows < num_rows)[:, None] & (col + cols < N)[None, :]
    tl.store(start + rows[:, None] * N + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, row, num_rows, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile at (row, col) of a contiguous [num_rows, N] matrix in fp32, zero outside."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    start = ptr + tl.cast(row, tl.int64) * N + col
    mask = (row + rows < num_rows)[:, None] & (col + cols < N)[None, :]
    return tl.load(start + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def slot_ptr(ctx_ptr, peer, slot, slot_rows, N, PARTIAL: tl.constexpr):
    """Start of slot `slot` in `peer`'s region."""
    return data_ptr(ctx_ptr, peer, PARTIAL) + tl.cast(slot, tl.int64) * slot_rows * N


@triton.jit
def store_slot(
    ctx_ptr, peer, acc, row, num_rows, col, N, slot_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Store a tile into this rank's slot of `peer`'s region; `signal` its word afterwards."""
    slot = slot_ptr(ctx_ptr, peer, get_rank(ctx_ptr), slot_rows, N, PARTIAL)
    store_rows(slot, acc, row, num_rows, col, N, BLOCK_M, BLOCK_N)


@triton.jit
def sum_slots(
    ctx_ptr,
    row,
    num_rows,
    col,
    N,
    slot_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Sum of one tile over all slots of this rank, in rank order, fp32 [BLOCK_M, BLOCK_N]."""
    rank = get_rank(ctx_ptr)
    first = slot_ptr(ctx_ptr, rank, 0, slot_rows, N, PARTIAL)
    total = load_rows(first, row, num_rows, col, N, BLOCK_M, BLOCK_N)  # 0 + it would lose a -0.0
    for slot in range(1, get_world_size(ctx_ptr)):
        part = slot_ptr(ctx_ptr, rank, slot, slot_rows, N, PARTIAL)
        total += load_rows(part, row, num_rows, col, N, BLOCK_M, BLOCK_N)
    return total


@triton.jit
def wait_for_slots(ctx_ptr, word, words_per_rank, epoch, OP: tl.constexpr):
    """Wait until every peer has stored its part of the tile of index `word`."""
    rank = get_rank(ctx_ptr)
    ok = True
    for peer in range(get_world_size(ctx_ptr)):
        if peer != rank:
            ok = wait(ctx_ptr, READY + peer * words_per_rank + word, epoch, peer, OP) & ok
    return ok
