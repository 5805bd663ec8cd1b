"""The kernels of `plait.matmul`: one persistent GEMM, and the sum of its parts when K is split.

Legend: x [B, M, K], w [B, N, K], out [B, M, N]; B is 1 unless BATCHED. Scales are fp32.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import grid_launch_dependents, grid_wait
from plait.ops.matmul.epilogue_kernels import finish_tile, scale_rows_and_columns
from plait.ops.matmul.kernels import (
    accumulate_scaled_tile,
    accumulate_tile,
    accumulate_tile_in_steps,
    accumulate_tile_pair,
)
from plait.schedules.lang import grouped_raster


@triton.jit
def add_matrix(acc, ptr, stride_m, stride_n, rows, rows_ok, col, N, BLOCK_N: tl.constexpr):
    """acc + matrix[rows, col : col + BLOCK_N], in the dtype of acc: fp32, or int32 unscaled."""
    offs_n = col + tl.arange(0, BLOCK_N)
    offsets = rows.to(tl.int64)[:, None] * stride_m + offs_n.to(tl.int64)[None, :] * stride_n
    mask = rows_ok[:, None] & (offs_n < N)[None, :]
    return acc + tl.load(ptr + offsets, mask=mask, other=0.0).to(acc.dtype)


@triton.jit
def _part_offsets(part, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where rows and columns (within a tile) of a part lie among all parts."""
    return tl.cast(part, tl.int64) * (BLOCK_M * BLOCK_N) + rows[:, None] * BLOCK_N + cols[None, :]


@triton.jit(do_not_specialize=["num_batches", "split_k", "num_splits", "whole_tiles"])
def _matmul_kernel(
    x,
    w0,
    w1,
    x_scale_ptr,
    w_scale_ptr,
    bias0_ptr,
    bias1_ptr,
    addend_ptr,
    out_ptr,
    pre0_ptr,
    pre1_ptr,
    parts_ptr,
    num_batches,
    M,
    N,
    K,
    split_k,
    num_splits,
    whole_tiles,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_w0b,
    stride_w0n,
    stride_w0k,
    stride_w1n,
    stride_w1k,
    stride_xsb,
    stride_xsm,
    stride_xsk,
    stride_wsb,
    stride_wsn,
    stride_wsk,
    stride_bias0,
    stride_bias1,
    stride_ab,
    stride_am,
    stride_an,
    stride_ob,
    stride_om,
    stride_on,
    stride_pb,
    stride_pm,
    stride_pn,
    x_batch_rows,
    w_batch_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    SCALES: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    STORE_PRE: tl.constexpr,
    BATCHED: tl.constexpr,
    SPLIT: tl.constexpr,
    INTEGER: tl.constexpr,
    DESC: tl.constexpr,
    OUT_DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8_STEP: tl.constexpr,
    EARLY: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out = act(scale * (x @ w0^T) + bias0 + addend), or gate(x @ w0^T + bias0, x @ w1^T + bias1).

    Persistent: any grid covers all tiles of all batches and splits. SPLIT "all": each tile sums
    only split_k of K and stores it, unscaled, into parts [num_splits, tiles, BLOCK_M, BLOCK_N];
    `_sum_splits_kernel` does the rest. SPLIT "tail": so do all tiles but the first whole_tiles,
    which fill waves of the grid; "none": no tile. OUT_DESC: out is a descriptor.
    SCALES: "none", "rows" (x_scale [M] and w_scale [N], stride 0 for one scale) or "blocks"
    (see `accumulate_scaled_tile`). Descriptors see all batches as rows: batch b of x starts at row
    b * x_batch_rows, of w at b * w_batch_rows. INTEGER: int8 operands, int32 sums.

    Example: M=N=1, K=2, x=[[1, 2]], w0=[[3, -4]], bias0=[1], ACT="relu": pre0=[[-4]], out=[[0]].
    """
    if EARLY:
        grid_launch_dependents()
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    total = tiles * num_batches
    if SPLIT != "none":
        total = whole_tiles + (total - whole_tiles) * num_splits
    ACC_DTYPE: tl.constexpr = tl.int32 if INTEGER and SCALES != "blocks" else tl.float32
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        # Splits of one tile run side by side: they share nothing but end together.
        tile = index
        split = 0
        k_begin = 0
        k_end = K
        if SPLIT != "none":
            if index >= whole_tiles:
                part = index - whole_tiles
                tile = part // num_splits
                split = part - tile * num_splits
                tile += whole_tiles
                k_begin = split * split_k
                k_end = tl.minimum(k_begin + split_k, K)
        batch = tile // tiles if BATCHED else 0
        place = tile
        if BATCHED:
            tile = tile - batch * tiles
        pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        rows_ok = rows < M
        x_row = row
        b_first = 0
        x_tile = x
        w_tile = w0
        x_scale = x_scale_ptr
        w_scale = w_scale_ptr
        if BATCHED and SCALES != "none":
            x_scale = x_scale_ptr + tl.cast(batch, tl.int64) * stride_xsb
            w_scale = w_scale_ptr + tl.cast(batch, tl.int64) * stride_wsb
        if BATCHED:
            if DESC:
                x_row = row + batch * x_batch_rows
                b_first = batch * w_batch_rows
            else:
                x_tile = x + tl.cast(batch, tl.int64) * stride_xb
                w_tile = w0 + tl.cast(batch, tl.int64) * stride_w0b
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC_DTYPE)
        up = acc
        if NUM_WEIGHTS == 2:
            acc, up = accumulate_tile_pair(
                acc, up, x, w0, w1, row, rows, rows_ok, col, N, K,
                stride_xm, stride_xk, stride_w0n, stride_w0k, stride_w1n, stride_w1k,
                BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
            )  # fmt: skip
        elif SCALES == "blocks":
            acc = accumulate_scaled_tile(
                acc, x_tile, w_tile, x_scale, w_scale, x_row, rows, rows_ok, col, N, K,
                stride_xm, stride_xk, stride_w0n, stride_w0k,
                stride_xsm, stride_xsk, stride_wsn, stride_wsk,
                BLOCK_N, BLOCK_K, DESC, B_KN, k_begin, k_end, b_first,
            )  # fmt: skip
        elif FP8_STEP > 0:
            acc = accumulate_tile_in_steps(
                acc, x_tile, w_tile, x_row, rows, rows_ok, col, N, K,
                stride_xm, stride_xk, stride_w0n, stride_w0k,
                BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, k_begin, k_end, b_first, FP8_STEP,
            )  # fmt: skip
        else:
            acc = accumulate_tile(
                acc, x_tile, w_tile, x_row, rows, rows_ok, col, N, K,
                stride_xm, stride_xk, stride_w0n, stride_w0k,
                BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
                k_begin, k_end, b_first,
            )  # fmt: skip
        if SPLIT != "none" and index >= whole_tiles:
            offs_m = tl.arange(0, BLOCK_M)
            offs_n = tl.arange(0, BLOCK_N)
            part = split * (tiles * num_batches - whole_tiles) + place - whole_tiles
            offsets = _part_offsets(part, offs_m, offs_n, BLOCK_M, BLOCK_N)
            tl.store(parts_ptr + offsets, acc, mask=rows_ok[:, None] & (col + offs_n < N)[None, :])
        elif SPLIT != "all":
            sums = acc  # another name: scaled, it may have another dtype than in the other branch
            if SCALES == "rows":
                sums = scale_rows_and_columns(
                    sums, x_scale, w_scale, rows, rows_ok, col, N, stride_xsm, stride_wsn, BLOCK_N,
                )  # fmt: skip
            if HAS_ADDEND:
                addend = addend_ptr + tl.cast(batch, tl.int64) * stride_ab
                sums = add_matrix(
                    sums, addend, stride_am, stride_an, rows, rows_ok, col, N, BLOCK_N
                )
            out = out_ptr
            if BATCHED and not OUT_DESC:
                out = out_ptr + tl.cast(batch, tl.int64) * stride_ob
            pre0 = pre0_ptr
            if BATCHED and STORE_PRE:
                pre0 = pre0_ptr + tl.cast(batch, tl.int64) * stride_pb
            finish_tile(
                sums, up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
                pre0, pre1_ptr, stride_pm, stride_pn, out, stride_om, stride_on,
                rows, rows_ok, col, N, BLOCK_M, BLOCK_N,
                NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE, batch, row, OUT_DESC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_splits", "whole_tiles", "rows_per_tile"])
def _sum_splits_kernel(
    parts_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    addend_ptr,
    out_ptr,
    pre_ptr,
    num_tiles,
    M,
    N,
    num_splits,
    whole_tiles,
    rows_per_tile,
    stride_xsb,
    stride_xsm,
    stride_wsb,
    stride_wsn,
    stride_bias,
    stride_ab,
    stride_am,
    stride_an,
    stride_ob,
    stride_om,
    stride_on,
    stride_pb,
    stride_pm,
    stride_pn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_M: tl.constexpr,
    SUM_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCALES: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    STORE_PRE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = act(scale * sum over splits of parts + bias + addend), splits in order: deterministic.

    parts [num_splits, num_tiles, BLOCK_M, BLOCK_N], fp32 (int32 for int8 operands): tile i of them
    is tile whole_tiles + i of the product. One block for SUM_M x SUM_N of a tile; only the first
    rows_per_tile rows of a tile are looked at. EARLY: launched while the parts are computed.
    """
    if EARLY:
        grid_wait()
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    PIECES_N: tl.constexpr = BLOCK_N // SUM_N
    pieces = tl.cdiv(rows_per_tile, SUM_M) * PIECES_N
    place = tl.program_id(0) // pieces
    piece = tl.program_id(0) - place * pieces
    batch = (whole_tiles + place) // (num_m * num_n)
    tile = whole_tiles + place - batch * num_m * num_n
    pid_m, pid_n = grouped_raster(tile, num_m, num_n, GROUP_M)
    offs_m = piece // PIECES_N * SUM_M + tl.arange(0, SUM_M)
    offs_n = piece % PIECES_N * SUM_N + tl.arange(0, SUM_N)
    col = pid_n * BLOCK_N + piece % PIECES_N * SUM_N
    rows = pid_m * BLOCK_M + offs_m
    rows_ok = rows < M
    mask = rows_ok[:, None] & (col + tl.arange(0, SUM_N) < N)[None, :]
    parts = parts_ptr + _part_offsets(place, offs_m, offs_n, BLOCK_M, BLOCK_N)
    part_size = tl.cast(num_tiles, tl.int64) * BLOCK_M * BLOCK_N
    acc = tl.load(parts, mask=mask, other=0)
    for split in range(1, num_splits):
        acc += tl.load(parts + split * part_size, mask=mask, other=0)
    if SCALES == "rows":
        x_scale = x_scale_ptr + tl.cast(batch, tl.int64) * stride_xsb
        w_scale = w_scale_ptr + tl.cast(batch, tl.int64) * stride_wsb
        acc = scale_rows_and_columns(
            acc, x_scale, w_scale, rows, rows_ok, col, N, stride_xsm, stride_wsn, SUM_N
        )
    if HAS_ADDEND:
        addend = addend_ptr + tl.cast(batch, tl.int64) * stride_ab
        acc = add_matrix(acc, addend, stride_am, stride_an, rows, rows_ok, col, N, SUM_N)
    out = out_ptr + tl.cast(batch, tl.int64) * stride_ob
    pre = pre_ptr
    if STORE_PRE:
        pre = pre_ptr + tl.cast(batch, tl.int64) * stride_pb
    finish_tile(
        acc, acc, bias_ptr, bias_ptr, stride_bias, stride_bias,
        pre, pre, stride_pm, stride_pn, out, stride_om, stride_on,
        rows, rows_ok, col, N, SUM_M, SUM_N, 1, ACT, HAS_BIAS, STORE_PRE,
    )  # fmt: skip
