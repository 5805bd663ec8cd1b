"""AG+GEMM: a persistent GEMM that walks the ranks' rows in the order in which they arrive.

Legend: rank s has rows_s rows of x; the gathered x has M = sum(rows_s) rows; w is [N, K].
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import (
    fence_proxy_async,
    grid_launch_dependents,
    grid_wait,
)
from plait.ops.matmul.epilogue_kernels import finish_tile
from plait.ops.matmul.kernels import accumulate_tile_pair
from plait.overlap.common.product_kernels import product_tile
from plait.overlap.common.rows import whole_rows
from plait.overlap.common.trace_kernels import record, record_tile
from plait.schedules.lang import segmented_tile
from plait.symm.lang.patterns import finish, wait
from plait.symm.lang.words import READY, get_epoch, get_rank, get_world_size


@triton.jit
def _wait_for_all(ctx_ptr, table_ptr, epoch, chunk_rows, num_chunks, OP: tl.constexpr):
    """Wait for the last chunk of every peer, and so for all: one sender's copies are ordered."""
    rank = get_rank(ctx_ptr)
    ok = True
    for peer in range(get_world_size(ctx_ptr)):
        rows = tl.load(table_ptr + peer)
        if (peer != rank) & (rows > 0):
            ok = (
                wait(ctx_ptr, READY + peer * num_chunks + (rows - 1) // chunk_rows, epoch, peer, OP)
                & ok
            )
    return ok


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "num_chunks", "chunk_rows", "total"])
def _ag_gemm_kernel(
    ctx_ptr,
    x,
    gathered,
    w0,
    w1,
    bias0_ptr,
    bias1_ptr,
    out_ptr,
    pre0_ptr,
    pre1_ptr,
    table_ptr,
    first_tile,
    num_tiles,
    num_chunks,
    chunk_rows,
    segment_rows,
    total,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_w0n,
    stride_w0k,
    stride_w1n,
    stride_w1k,
    stride_bias0,
    stride_bias1,
    stride_om,
    stride_on,
    stride_pm,
    stride_pn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_PRE: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    OP: tl.constexpr,
    WAIT_ALL: tl.constexpr,
    FINISH: tl.constexpr,
    OUT_DESC: tl.constexpr,
    FLATTEN: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
    LEADS: tl.constexpr,
    trace_ptr=None,
    TRACE: tl.constexpr = False,
    x_scale_ptr=None,
    gathered_scale_ptr=None,
    w_scale_ptr=None,
    scale_slot=1,
    stride_xsm=1,
    stride_xsk=1,
    stride_wsn=1,
    stride_wsk=1,
    SCALES: tl.constexpr = "none",
    INTEGER: tl.constexpr = False,
    FP8_STEP: tl.constexpr = 0,
):
    """out = epilogue(all_gather(x) @ w^T), own rows first, then rank-1's, rank-2's, ...

    x [rows_rank, K] is this rank's rows; gathered [world_size, segment_rows, K] is this rank's
    region, which peers fill (own part unused); table as in collectives.segments. A tile waits for
    the last chunk it reads; chunks of one sender arrive in order. WAIT_ALL: when the kernel ends,
    all rows are here. FINISH closes the region. OUT_DESC: out is a descriptor over [world_size,
    rows, N], all ranks having as many rows.

    The kernel computes num_tiles tiles of BLOCK_M x (PIECES * BLOCK_N) from first_tile on, each in
    PIECES parts: smaller parts let the tiles of the last wave end sooner. LEADS: another launch of
    this kernel may start meanwhile; it is EARLY.

    FLATTEN makes one loop of tiles and K, whose loads run ahead. The wait for a tile is part of
    what their addresses depend on, so it comes before them (a test reads the PTX).

    TRACE: trace_ptr has a row for each tile (see trace_kernels), stamped after its wait, K and
    store; not with FLATTEN, which mixes the tiles.

    SCALES, INTEGER, FP8_STEP: as in `product_tile`, of one weight. x_scale is that of the own rows,
    gathered_scale those of all ranks, which came ahead of the chunks: of row r of rank s it is
    s * scale_slot + (s * segment_rows + r) * stride_xsm from its start, where scale_slot is 0, or
    stride_xsm is: then each rank has one scale.

    Example: world 2, rank 1, one tile a segment: tile 0 multiplies x without waiting, tile 1 waits
    for READY + 0 and multiplies gathered[0].
    """
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    if LEADS:
        grid_launch_dependents()
    num_n = tl.cdiv(N, PIECES * BLOCK_N)
    alive = True
    waited = -1
    for index in tl.range(
        tl.program_id(0), num_tiles * PIECES, tl.num_programs(0), flatten=FLATTEN
    ):
        tile = first_tile + index // PIECES
        step, segment, pid_m, pid_n = segmented_tile(
            tile, rank, world_size, table_ptr, num_n, BLOCK_M, GROUP_M, True
        )
        num_rows = tl.load(table_ptr + segment)
        row = pid_m * BLOCK_M
        col = (pid_n * PIECES + index % PIECES) * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        rows_ok = rows < num_rows
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = acc
        record_tile(trace_ptr, index, segment, pid_m * num_n + pid_n, TRACE)
        # One tile loop for both sources: with two, Triton gives each its own pipeline of tiles, and
        # their shared memory together is more than an SM has.
        a, base, stride_am, stride_ak = x, 0, stride_xm, stride_xk
        x_scale = x_scale_ptr
        if segment != rank:
            chunk = (tl.minimum(row + BLOCK_M, num_rows) - 1) // chunk_rows
            word = segment * num_chunks + chunk
            if word != waited:
                alive = wait(ctx_ptr, READY + word, epoch, segment, OP) & alive
                fence_proxy_async()
                waited = word
            a, base, stride_am, stride_ak = gathered, segment * segment_rows, K, 1
            if SCALES != "none":
                x_scale = gathered_scale_ptr + segment * scale_slot
        record(trace_ptr, index, 1, TRACE)
        if NUM_WEIGHTS == 2:
            acc, up = accumulate_tile_pair(
                acc, up, a, w0, w1, base + row, base + rows, rows_ok, col, N, K,
                stride_am, stride_ak, stride_w0n, stride_w0k, stride_w1n, stride_w1k,
                BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
            )  # fmt: skip
        else:
            acc = product_tile(
                a, w0, x_scale, w_scale_ptr, base + row, base + rows, rows_ok, col, N, K,
                stride_am, stride_ak, stride_w0n, stride_w0k,
                stride_xsm, stride_xsk, stride_wsn, stride_wsk,
                BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION, SCALES, INTEGER, FP8_STEP,
            )  # fmt: skip
        record(trace_ptr, index, 2, TRACE)
        acc = tl.where(alive, acc, float("nan"))
        finish_tile(
            acc, up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            whole_rows(table_ptr, segment, rows, world_size, total), rows_ok, col, N,
            BLOCK_M, BLOCK_N, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE, segment, row, OUT_DESC,
        )  # fmt: skip
        record(trace_ptr, index, 3, TRACE)
    if WAIT_ALL:
        # A rank with few tiles may not have waited for all; a region is reused only when quiet.
        if tl.program_id(0) == 0:
            _wait_for_all(ctx_ptr, table_ptr, epoch, chunk_rows, num_chunks, OP)
    if EARLY:
        grid_wait()  # what follows on the stream follows the kernel before this one, too
    if FINISH:
        finish(ctx_ptr, epoch)
