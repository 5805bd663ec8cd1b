"""GEMM+AR: a GEMM whose partial tiles are summed over the ranks, with the whole sum on every rank.

Legend: x is [M, K], w is [N, K], K this rank's share of the sum; out is [M, N] on every rank.
"""

import triton
import triton.language as tl

from plait.ops.matmul.kernels import accumulate_tile, add_bias
from plait.overlap.common.slots import load_rows, store_rows, store_slot, sum_slots, wait_for_slots
from plait.schedules.lang import grouped_raster, segmented_tile
from plait.symm.lang.patterns import finish, signal, wait
from plait.symm.lang.words import READY, data_ptr, get_epoch, get_rank, get_world_size


@triton.jit(do_not_specialize=["words_per_rank"])
def _gemm_ar_one_shot_kernel(
    ctx_ptr,
    x,
    w,
    bias_ptr,
    out_ptr,
    words_per_rank,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PIECE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    OP: tl.constexpr,
):
    """Every rank sends every tile to every peer and sums all slots itself: one hop, for few rows.

    Each region holds [world_size, M, N]. All tiles are sent before the first is waited for.
    """
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        acc = accumulate_tile(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x, w, row, rows, rows < M, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
        )  # fmt: skip
        for step in range(world_size):
            peer = (rank + step) % world_size
            store_slot(ctx_ptr, peer, acc, row, M, col, N, M, BLOCK_M, BLOCK_N, PARTIAL)
            if peer != rank:
                signal(ctx_ptr, peer, READY + rank * words_per_rank + tile, epoch)
    tl.debug_barrier()
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        alive = wait_for_slots(ctx_ptr, tile, words_per_rank, epoch, OP)
        for piece in tl.range(0, BLOCK_N, PIECE_N):
            summed = sum_slots(ctx_ptr, row, M, col + piece, N, M, BLOCK_M, PIECE_N, PARTIAL)
            if HAS_BIAS:
                summed = add_bias(summed, bias_ptr, stride_bias, col + piece, N, PIECE_N)
            summed = tl.where(alive, summed, float("nan"))
            store_rows(out_ptr, summed, row, M, col + piece, N, BLOCK_M, PIECE_N)
    finish(ctx_ptr, epoch)


@triton.jit
def result_ptr(ctx_ptr, peer, result_offset, first_row, N, DTYPE: tl.constexpr):
    """Row `first_row` of the result area [M, N], result_offset bytes into `peer`'s region."""
    start = (data_ptr(ctx_ptr, peer, tl.int8) + result_offset).to(tl.pointer_type(DTYPE))
    return start + tl.cast(first_row, tl.int64) * N


@triton.jit(do_not_specialize=["num_tiles", "words_per_rank"])
def _gemm_ar_two_shot_kernel(
    ctx_ptr,
    x,
    w,
    bias_ptr,
    out_ptr,
    table_ptr,
    num_tiles,
    words_per_rank,
    slot_rows,
    result_offset,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PIECE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    OP: tl.constexpr,
):
    """Tiles go to the owner of their rows, which sums them and sends the sum to everyone.

    Rows are shared out as table says (outer blocks: one). Each region holds slots [world_size,
    slot_rows, N] and, result_offset bytes on, the result [M, N] in out's dtype. Partial tiles set
    READY + sender * words_per_rank + tile, sums READY + (world_size + owner) * words_per_rank +
    tile.
    A block sends all its partial tiles before it waits, and all its sums before it collects.
    """
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, table_ptr, num_n, BLOCK_M, GROUP_M, False
        )
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        num_rows = tl.load(table_ptr + segment)
        first_row = tl.load(table_ptr + 2 * world_size + segment)
        word = pid_m * num_n + pid_n
        acc = accumulate_tile(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x, w,
            first_row + row, first_row + rows, rows < num_rows, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
        )  # fmt: skip
        store_slot(
            ctx_ptr, segment, acc, row, num_rows, col, N, slot_rows, BLOCK_M, BLOCK_N, PARTIAL
        )
        if segment != rank:
            signal(ctx_ptr, segment, READY + rank * words_per_rank + word, epoch)
        else:
            tl.debug_barrier()
            alive = wait_for_slots(ctx_ptr, word, words_per_rank, epoch, OP)
            for piece in tl.range(0, BLOCK_N, PIECE_N):
                summed = sum_slots(
                    ctx_ptr, row, num_rows, col + piece, N, slot_rows, BLOCK_M, PIECE_N, PARTIAL
                )
                if HAS_BIAS:
                    summed = add_bias(summed, bias_ptr, stride_bias, col + piece, N, PIECE_N)
                summed = tl.where(alive, summed, float("nan"))
                for peer in range(world_size):
                    result = result_ptr(ctx_ptr, peer, result_offset, first_row, N, DTYPE)
                    store_rows(result, summed, row, num_rows, col + piece, N, BLOCK_M, PIECE_N)
            for peer in range(world_size):
                signal(ctx_ptr, peer, READY + (world_size + rank) * words_per_rank + word, epoch)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, table_ptr, num_n, BLOCK_M, GROUP_M, True
        )
        row = pid_m * BLOCK_M
        num_rows = tl.load(table_ptr + segment)
        first_row = tl.load(table_ptr + 2 * world_size + segment)
        word = READY + (world_size + segment) * words_per_rank + pid_m * num_n + pid_n
        alive = wait(ctx_ptr, word, epoch, segment, OP)
        result = result_ptr(ctx_ptr, rank, result_offset, first_row, N, DTYPE)
        target = out_ptr + tl.cast(first_row, tl.int64) * N
        for piece in tl.range(0, BLOCK_N, PIECE_N):
            col = pid_n * BLOCK_N + piece
            tile_values = load_rows(result, row, num_rows, col, N, BLOCK_M, PIECE_N)
            tile_values = tl.where(alive, tile_values, float("nan"))
            store_rows(target, tile_values, row, num_rows, col, N, BLOCK_M, PIECE_N)
    finish(ctx_ptr, epoch)
