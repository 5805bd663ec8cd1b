"""The product of one tile as every overlapped GEMM computes it: of floats, fp8 or int8.

Shapes: x [M, K], w [N, K], a tile [BLOCK_M, BLOCK_N] of x @ w^T. Scales are fp32.
"""

import triton
import triton.language as tl

from plait.ops.matmul.epilogue_kernels import scale_rows_and_columns
from plait.ops.matmul.kernels import (
    accumulate_scaled_tile,
    accumulate_tile,
    accumulate_tile_in_steps,
)


@triton.jit
def product_tile(
    x,
    w,
    x_scale_ptr,
    w_scale_ptr,
    row,
    rows,
    rows_ok,
    col,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    stride_wsk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    INTEGER: tl.constexpr,
    FP8_STEP: tl.constexpr,
):
    """scale * (x[rows] @ w[col : col + BLOCK_N]^T) in fp32; operands as in `accumulate_tile`.

    SCALES: "none" (the scale pointers are unused), "rows" (x_scale [M] and w_scale [N], stride 0
    for one scale) or "blocks" (x_scale [M, K / 128] and w_scale [N / 128, K / 128]; BLOCK_K is
    128). INTEGER: int8, whose products are summed in int32. FP8_STEP: fp8 sums move to fp32 after
    so many products, 0: never.
    """
    if SCALES == "blocks":
        acc = accumulate_scaled_tile(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x, w, x_scale_ptr, w_scale_ptr,
            row, rows, rows_ok, col, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
            stride_xsm, stride_xsk, stride_wsn, stride_wsk, BLOCK_N, BLOCK_K, DESC, B_KN,
        )  # fmt: skip
    elif FP8_STEP > 0:
        acc = accumulate_tile_in_steps(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x, w, row, rows, rows_ok, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, 0, K, 0, FP8_STEP,
        )  # fmt: skip
    else:
        SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
        acc = accumulate_tile(
            tl.zeros((BLOCK_M, BLOCK_N), SUMS), x, w, row, rows, rows_ok, col, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, DESC, B_KN, PRECISION,
        )  # fmt: skip
    if SCALES == "rows":
        acc = scale_rows_and_columns(
            acc, x_scale_ptr, w_scale_ptr, rows, rows_ok, col, N, stride_xsm, stride_wsn, BLOCK_N
        )
    return acc


__all__ = ["product_tile"]
