"""GEMM+AR: a GEMM whose partial tiles are summed over the ranks, with the whole sum on every rank.

Legend: x is [M, K], w is [N, K], K this rank's share of the sum; out is [M, N] on every rank.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import grid_wait
from plait.ops.matmul.epilogue_kernels import add_bias
from plait.overlap.common.product_kernels import product_tile
from plait.overlap.common.slots import (
    load_rows,
    result_ptr,
    store_rows,
    store_slot,
    store_sums,
    sum_slots,
    wait_for_slots,
)
from plait.overlap.common.trace_kernels import record, record_tile
from plait.schedules.lang import grouped_raster, segmented_tile
from plait.symm.lang.patterns import finish, signal, signal_all, wait
from plait.symm.lang.words import READY, get_epoch, get_rank, get_world_size


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
    WORLD_SIZE: tl.constexpr,
    trace_ptr=None,
    TRACE: tl.constexpr = False,
    x_scale_ptr=None,
    w_scale_ptr=None,
    stride_xsm=1,
    stride_xsk=1,
    stride_wsn=1,
    stride_wsk=1,
    SCALES: tl.constexpr = "none",
    INTEGER: tl.constexpr = False,
    FP8_STEP: tl.constexpr = 0,
    EARLY: tl.constexpr = False,
):
    """Every rank sends every tile to every peer and sums all slots itself: one hop, for few rows.

    Each region holds [world_size, M, N]. All tiles are sent before the first is waited for. SCALES,
    INTEGER, FP8_STEP: as in `product_tile`.

    TRACE: trace_ptr has two rows for each tile (see trace_kernels): row t of tile t is stamped
    after K and after the sends, row num_tiles + t after the wait and after the sum.
    """
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        record_tile(trace_ptr, tile, rank, tile, TRACE)
        acc = product_tile(
            x, w, x_scale_ptr, w_scale_ptr,
            row, rows, rows < M, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            stride_xsm, stride_xsk, stride_wsn, stride_wsk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION, SCALES, INTEGER, FP8_STEP,
        )  # fmt: skip
        record(trace_ptr, tile, 1, TRACE)
        if EARLY:
            grid_wait()
        epoch = get_epoch(ctx_ptr)
        for step in range(world_size):
            peer = (rank + step) % world_size
            store_slot(ctx_ptr, peer, acc, row, M, col, N, M, BLOCK_M, BLOCK_N, PARTIAL)
        signal_all(ctx_ptr, READY + rank * words_per_rank + tile, epoch, False)
        record(trace_ptr, tile, 2, TRACE)
    tl.debug_barrier()
    if EARLY:
        grid_wait()
    epoch = get_epoch(ctx_ptr)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        record_tile(trace_ptr, num_m * num_n + tile, rank, tile, TRACE)
        alive = wait_for_slots(ctx_ptr, tile, words_per_rank, epoch, OP)
        record(trace_ptr, num_m * num_n + tile, 1, TRACE)
        for piece in tl.range(0, BLOCK_N, PIECE_N):
            summed = sum_slots(
                ctx_ptr, row, M, col + piece, N, M, BLOCK_M, PIECE_N, PARTIAL, WORLD_SIZE
            )
            if HAS_BIAS:
                summed = add_bias(summed, bias_ptr, stride_bias, col + piece, N, PIECE_N)
            summed = tl.where(alive, summed, float("nan"))
            store_rows(out_ptr, summed, row, M, col + piece, N, BLOCK_M, PIECE_N)
        record(trace_ptr, num_m * num_n + tile, 2, TRACE)
    finish(ctx_ptr, epoch)


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
    WORLD_SIZE: tl.constexpr,
    trace_ptr=None,
    TRACE: tl.constexpr = False,
    x_scale_ptr=None,
    w_scale_ptr=None,
    stride_xsm=1,
    stride_xsk=1,
    stride_wsn=1,
    stride_wsk=1,
    SCALES: tl.constexpr = "none",
    INTEGER: tl.constexpr = False,
    FP8_STEP: tl.constexpr = 0,
    EARLY: tl.constexpr = False,
):
    """Tiles go to the owner of their rows, which sums them and sends the sum to everyone.

    Rows are shared out as table says (outer blocks: one). Each region holds slots [world_size,
    slot_rows, N] and, result_offset bytes on, the result [M, N] in out's dtype. Partial tiles set
    READY + sender * words_per_rank + tile, sums READY + (world_size + owner) * words_per_rank +
    tile.
    A block sends all its partial tiles before it waits, and all its sums before it collects.
    SCALES, INTEGER, FP8_STEP: as in `product_tile`.

    TRACE: trace_ptr has two rows for each tile (see trace_kernels): the first ones are stamped as
    in GEMM+RS, row num_tiles + t after the wait for the sum and after the tile is collected.
    """
    if EARLY:
        grid_wait()
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
        record_tile(trace_ptr, tile, segment, word, TRACE)
        acc = product_tile(
            x, w, x_scale_ptr, w_scale_ptr,
            first_row + row, first_row + rows, rows < num_rows, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            stride_xsm, stride_xsk, stride_wsn, stride_wsk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION, SCALES, INTEGER, FP8_STEP,
        )  # fmt: skip
        record(trace_ptr, tile, 1, TRACE)
        store_slot(
            ctx_ptr, segment, acc, row, num_rows, col, N, slot_rows, BLOCK_M, BLOCK_N, PARTIAL
        )
        if segment != rank:
            signal(ctx_ptr, segment, READY + rank * words_per_rank + word, epoch)
            record(trace_ptr, tile, 2, TRACE)
        else:
            tl.debug_barrier()
            record(trace_ptr, tile, 2, TRACE)
            alive = wait_for_slots(ctx_ptr, word, words_per_rank, epoch, OP)
            record(trace_ptr, tile, 3, TRACE)
            store_sums(
                ctx_ptr, alive, bias_ptr, stride_bias, out_ptr, result_offset, first_row,
                row, num_rows, col, N, slot_rows,
                BLOCK_M, BLOCK_N, PIECE_N, HAS_BIAS, PARTIAL, WORLD_SIZE, True,
            )  # fmt: skip
            word += (world_size + rank) * words_per_rank
            signal_all(ctx_ptr, READY + word, epoch, True)
            record(trace_ptr, tile, 4, TRACE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, table_ptr, num_n, BLOCK_M, GROUP_M, True
        )
        row = pid_m * BLOCK_M
        num_rows = tl.load(table_ptr + segment)
        first_row = tl.load(table_ptr + 2 * world_size + segment)
        place = pid_m * num_n + pid_n
        word = READY + (world_size + segment) * words_per_rank + place
        record_tile(trace_ptr, num_tiles + tile, segment, place, TRACE)
        alive = wait(ctx_ptr, word, epoch, segment, OP)
        record(trace_ptr, num_tiles + tile, 1, TRACE)
        result = result_ptr(ctx_ptr, rank, result_offset, first_row, N, DTYPE)
        target = out_ptr + tl.cast(first_row, tl.int64) * N
        values = load_rows(result, row, num_rows, pid_n * BLOCK_N, N, BLOCK_M, BLOCK_N)
        values = tl.where(alive, values, float("nan"))
        store_rows(target, values, row, num_rows, pid_n * BLOCK_N, N, BLOCK_M, BLOCK_N)
        record(trace_ptr, num_tiles + tile, 2, TRACE)
    finish(ctx_ptr, epoch)
