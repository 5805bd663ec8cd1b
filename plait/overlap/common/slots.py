"""Slots: where the partial sums of all ranks for one tile meet.

A region holds [world_size, slot_rows, N] of PARTIAL; slot p is what rank p computed. A tile's word
is READY + p * words_per_rank + tile. Offsets within a tile are 32-bit and its start is one 64-bit
scalar: 64-bit offsets for every element would spill registers beside the accumulator.
"""

import triton
import triton.language as tl

from plait.ops.matmul.epilogue_kernels import add_bias, split_columns
from plait.symm.lang.patterns import wait_all
from plait.symm.lang.words import READY, data_ptr, get_rank


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
    if BLOCK_M * BLOCK_N > 64 * 128:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        store_rows(slot, left, row, num_rows, col, N, BLOCK_M, HALF)
        store_rows(slot, right, row, num_rows, col + HALF, N, BLOCK_M, HALF)
    else:
        store_rows(slot, acc, row, num_rows, col, N, BLOCK_M, BLOCK_N)


@triton.jit
def sum_slots(
    ctx_ptr, row, num_rows, col, N, slot_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Sum of one tile over all slots of this rank, in rank order, fp32 [BLOCK_M, BLOCK_N].

    The loads of all slots are in flight together: for tiles that leave room for them in registers.
    """
    rank = get_rank(ctx_ptr)
    first = slot_ptr(ctx_ptr, rank, 0, slot_rows, N, PARTIAL)
    total = load_rows(first, row, num_rows, col, N, BLOCK_M, BLOCK_N)  # 0 + it would lose a -0.0
    for slot in tl.static_range(1, WORLD_SIZE):
        part = slot_ptr(ctx_ptr, rank, slot, slot_rows, N, PARTIAL)
        total += load_rows(part, row, num_rows, col, N, BLOCK_M, BLOCK_N)
    return total


@triton.jit
def result_ptr(ctx_ptr, peer, result_offset, first_row, N, DTYPE: tl.constexpr):
    """Row `first_row` of the result area [M, N], result_offset bytes into `peer`'s region."""
    start = (data_ptr(ctx_ptr, peer, tl.int8) + result_offset).to(tl.pointer_type(DTYPE))
    return start + tl.cast(first_row, tl.int64) * N


@triton.jit
def store_sums(
    ctx_ptr, alive, bias_ptr, stride_bias, out_ptr, result_offset, first_row,
    row, num_rows, col, N, slot_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE_N: tl.constexpr, HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr,
    WORLD_SIZE: tl.constexpr, TO_ALL: tl.constexpr,
):  # fmt: skip
    """Sum a tile of the own rows over all slots, add the bias, store it; NaN where not `alive`.

    Into out [rows, N], or with TO_ALL into every rank's result area (see `result_ptr`). PIECE_N
    columns at a time. This rank's part goes through memory as well: added to the accumulator, the
    others' would be read in its layout, two bytes at a time.
    """
    for piece in tl.range(0, BLOCK_N, PIECE_N):
        summed = sum_slots(
            ctx_ptr, row, num_rows, col + piece, N, slot_rows, BLOCK_M, PIECE_N, PARTIAL, WORLD_SIZE
        )
        if HAS_BIAS:
            summed = add_bias(summed, bias_ptr, stride_bias, col + piece, N, PIECE_N)
        summed = tl.where(alive, summed, float("nan"))
        if TO_ALL:
            for peer in range(WORLD_SIZE):
                there = result_ptr(
                    ctx_ptr, peer, result_offset, first_row, N, out_ptr.dtype.element_ty
                )
                store_rows(there, summed, row, num_rows, col + piece, N, BLOCK_M, PIECE_N)
        else:
            store_rows(out_ptr, summed, row, num_rows, col + piece, N, BLOCK_M, PIECE_N)


@triton.jit
def wait_for_slots(ctx_ptr, word, words_per_rank, epoch, OP: tl.constexpr):
    """Wait until every peer has stored its part of the tile of index `word`."""
    return wait_all(ctx_ptr, READY + word, words_per_rank, epoch, False, OP)
