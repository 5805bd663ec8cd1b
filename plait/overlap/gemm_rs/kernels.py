"""GEMM+RS: a persistent GEMM that stores its tiles into their owners' memory, own rows last.

Legend: rank s owns rows_s rows of the result; M = sum(rows_s); x is [M, K], w is [N, K], K this
rank's share of the sum.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import grid_wait
from plait.overlap.common.product_kernels import product_tile
from plait.overlap.common.rows import whole_rows
from plait.overlap.common.slots import store_slot, store_sums, wait_for_slots
from plait.overlap.common.trace_kernels import record, record_tile
from plait.schedules.lang import segmented_tile
from plait.symm.lang.patterns import finish, signal
from plait.symm.lang.words import READY, get_epoch, get_rank, get_world_size


@triton.jit(do_not_specialize=["num_tiles", "words_per_rank", "total"])
def _gemm_rs_kernel(
    ctx_ptr,
    x,
    w,
    bias_ptr,
    out_ptr,
    table_ptr,
    num_tiles,
    words_per_rank,
    slot_rows,
    total,
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
    """out = sum over ranks of (x @ w^T)[own rows] (+ bias), partials in PARTIAL, summed in fp32.

    x [M, K] whole rows as in collectives.segments, out [rows_rank, N] contiguous. A tile of rank
    s's rows goes into slot `rank` of s's region [world_size, slot_rows, N] and sets word READY +
    rank * words_per_rank + tile there, tile = m * num_n + n. Tiles of the own rows come last: the
    own part goes into the own slot, then all slots are added in rank order, PIECE_N columns at a
    time. Needs no wait before its own rows, so it cannot hold up a peer, as long as all blocks are
    resident.

    SCALES, INTEGER, FP8_STEP: as in `product_tile`; x_scale counts the rows of x.

    TRACE: trace_ptr has a row for each tile (see trace_kernels), stamped after K and after its
    partial sums are stored and signalled; of the own rows also after the wait and after the sum.

    Example: world 2, one tile a segment, rank 0: the tile of rank 1's rows is sent, then the own
    one waits for READY + words_per_rank and is summed.
    """
    if EARLY:
        grid_wait()
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, table_ptr, num_n, BLOCK_M, GROUP_M, False
        )
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        num_rows = tl.load(table_ptr + segment)
        rows = row + tl.arange(0, BLOCK_M)
        word = pid_m * num_n + pid_n
        x_rows = whole_rows(table_ptr, segment, rows, world_size, total)
        x_row = (
            tl.load(table_ptr + 2 * world_size + segment)
            + tl.load(table_ptr + 3 * world_size + segment)
            + row
        )
        record_tile(trace_ptr, tile, segment, word, TRACE)
        acc = product_tile(
            x, w, x_scale_ptr, w_scale_ptr,
            x_row, x_rows, rows < num_rows, col, N, K,
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
                ctx_ptr, alive, bias_ptr, stride_bias, out_ptr, 0, 0, row, num_rows, col, N,
                slot_rows, BLOCK_M, BLOCK_N, PIECE_N, HAS_BIAS, PARTIAL, WORLD_SIZE, False,
            )  # fmt: skip
            record(trace_ptr, tile, 4, TRACE)
    finish(ctx_ptr, epoch)
