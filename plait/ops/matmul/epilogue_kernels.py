"""Epilogues of GEMM tiles: scales, bias, activation or gate, and the store.

Shapes: acc [BLOCK_M, BLOCK_N] in fp32 at (rows, col) of out [M, N]. Every function takes part of a
tile as well, so large tiles are finished in pieces.
"""

import triton
import triton.language as tl


@triton.jit
def scale_rows_and_columns(
    acc, a_scale_ptr, b_scale_ptr, rows, rows_ok, col, N, stride_asm, stride_bsn,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc * a_scale[rows] * b_scale[cols] in fp32; stride 0 is one scale for all."""
    cols = col + tl.arange(0, BLOCK_N)
    a_scale = tl.load(a_scale_ptr + rows.to(tl.int64) * stride_asm, mask=rows_ok, other=0.0)
    b_scale = tl.load(b_scale_ptr + cols.to(tl.int64) * stride_bsn, mask=cols < N, other=0.0)
    return acc.to(tl.float32) * (a_scale[:, None] * b_scale[None, :])


@triton.jit
def add_bias(acc, bias_ptr, stride_bias, col, N, BLOCK_N: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] + bias[col : col + BLOCK_N], in fp32."""
    offs_n = col + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + offs_n.to(tl.int64) * stride_bias, mask=offs_n < N, other=0.0)
    return acc + bias.to(tl.float32)[None, :]


@triton.jit
def logistic(x):
    """1 / (1 + e^-x); exact limits, because e^-x may be infinite."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gelu_erf(x):
    """x * Phi(x) with the error function."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(acc, ACT: tl.constexpr):
    """Elementwise activation in fp32: "none", "gelu" (erf), "gelu_tanh", "silu" or "relu"."""
    if ACT == "none":
        result = acc
    elif ACT == "gelu":
        result = gelu_erf(acc)
    elif ACT == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the logistic function of 2 y: no tanh, and the limits are exact.
        result = acc * logistic(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    elif ACT == "silu":
        result = acc * logistic(acc)
    else:
        tl.static_assert(ACT == "relu", "unknown activation")
        result = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def gate(acc_gate, acc_up, ACT: tl.constexpr):
    """Gated activation in fp32: "swiglu" silu(gate) * up, "geglu" gelu(gate) * up."""
    if ACT == "swiglu":
        result = acc_gate * logistic(acc_gate) * acc_up
    else:
        tl.static_assert(ACT == "geglu", "unknown gated activation")
        result = gelu_erf(acc_gate) * acc_up
    return result


@triton.jit
def store_tile(ptr, stride_m, stride_n, acc, rows, rows_ok, col, N, BLOCK_N: tl.constexpr):
    """Store acc [BLOCK_M, BLOCK_N] at (rows, col), rounded to the dtype of `ptr`."""
    offs_n = col + tl.arange(0, BLOCK_N)
    offsets = rows.to(tl.int64)[:, None] * stride_m + offs_n.to(tl.int64)[None, :] * stride_n
    mask = rows_ok[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + offsets, acc.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_described_tile(out, acc, batch, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store acc at (row, col) of a described [M, N] matrix, or of matrix `batch` of [B, M, N]."""
    tile = acc.to(out.dtype)
    if len(out.block_shape) == 3:
        out.store([batch, row, col], tile.reshape(1, BLOCK_M, BLOCK_N))
    else:
        out.store([row, col], tile)


@triton.jit
def split_columns(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Left and right half of a [BLOCK_M, BLOCK_N] tile; free in the layout of `tl.dot`'s result."""
    return tile.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def _finish_piece(
    acc,
    up,
    bias0_ptr,
    bias1_ptr,
    stride_bias0,
    stride_bias1,
    pre0_ptr,
    pre1_ptr,
    stride_pm,
    stride_pn,
    out_ptr,
    stride_om,
    stride_on,
    rows,
    rows_ok,
    col,
    N,
    BLOCK_N: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_PRE: tl.constexpr,
    batch,
    row,
    BLOCK_M: tl.constexpr,
    OUT_DESC: tl.constexpr,
):
    """`finish_tile` for as many columns as the registers take at once."""
    if HAS_BIAS:
        acc = add_bias(acc, bias0_ptr, stride_bias0, col, N, BLOCK_N)
    if STORE_PRE:
        store_tile(pre0_ptr, stride_pm, stride_pn, acc, rows, rows_ok, col, N, BLOCK_N)
    if NUM_WEIGHTS == 2:
        if HAS_BIAS:
            up = add_bias(up, bias1_ptr, stride_bias1, col, N, BLOCK_N)
        if STORE_PRE:
            store_tile(pre1_ptr, stride_pm, stride_pn, up, rows, rows_ok, col, N, BLOCK_N)
        result = gate(acc, up, ACT)
    else:
        result = activate(acc, ACT)
    if OUT_DESC:
        store_described_tile(out_ptr, result, batch, row, col, BLOCK_M, BLOCK_N)
    else:
        store_tile(out_ptr, stride_om, stride_on, result, rows, rows_ok, col, N, BLOCK_N)


@triton.jit
def _finish_halves(
    acc,
    up,
    bias0_ptr,
    bias1_ptr,
    stride_bias0,
    stride_bias1,
    pre0_ptr,
    pre1_ptr,
    stride_pm,
    stride_pn,
    out_ptr,
    stride_om,
    stride_on,
    rows,
    rows_ok,
    col,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_PRE: tl.constexpr,
    batch,
    row,
    OUT_DESC: tl.constexpr,
):
    """`_finish_piece` for the left half of the columns, then for the right half."""
    HALF: tl.constexpr = BLOCK_N // 2
    left, right = split_columns(acc, BLOCK_M, BLOCK_N)
    if NUM_WEIGHTS == 2:
        left_up, right_up = split_columns(up, BLOCK_M, BLOCK_N)
    else:
        left_up, right_up = left, right
    _finish_piece(
        left, left_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
        pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
        rows, rows_ok, col, N, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
        batch, row, BLOCK_M, OUT_DESC,
    )  # fmt: skip
    _finish_piece(
        right, right_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
        pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
        rows, rows_ok, col + HALF, N, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
        batch, row, BLOCK_M, OUT_DESC,
    )  # fmt: skip


@triton.jit
def finish_tile(
    acc,
    up,
    bias0_ptr,
    bias1_ptr,
    stride_bias0,
    stride_bias1,
    pre0_ptr,
    pre1_ptr,
    stride_pm,
    stride_pn,
    out_ptr,
    stride_om,
    stride_on,
    rows,
    rows_ok,
    col,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_PRE: tl.constexpr,
    batch=0,
    row=0,
    OUT_DESC: tl.constexpr = False,
):
    """Bias, pre-activation outputs, activation or gate, and the store of one fp32 tile.

    acc [BLOCK_M, BLOCK_N] is the only product, or the gate's if NUM_WEIGHTS is 2; then `up` is the
    other one (pass acc otherwise). `pre*_ptr` share their strides and are written if STORE_PRE.
    Large tiles are finished a quarter of their columns at a time: at once, an error function over
    128 x 256 elements spills registers. OUT_DESC: `out_ptr` is a descriptor with blocks [BLOCK_M,
    `finish_columns`], after a 1 if it has batches, and the tile lies at `row` of its `batch`.
    """
    if NUM_WEIGHTS * BLOCK_M * BLOCK_N > 128 * 128:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        if NUM_WEIGHTS == 2:
            left_up, right_up = split_columns(up, BLOCK_M, BLOCK_N)
        else:
            left_up, right_up = left, right
        _finish_halves(
            left, left_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col, N, BLOCK_M, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
            batch, row, OUT_DESC,
        )  # fmt: skip
        _finish_halves(
            right, right_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col + HALF, N, BLOCK_M, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
            batch, row, OUT_DESC,
        )  # fmt: skip
    elif OUT_DESC and NUM_WEIGHTS * BLOCK_M * BLOCK_N > 64 * 128:
        # Half of the shared memory to store from, so that two blocks fit an SM.
        _finish_halves(
            acc, up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col, N, BLOCK_M, BLOCK_N, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
            batch, row, OUT_DESC,
        )  # fmt: skip
    else:
        _finish_piece(
            acc, up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col, N, BLOCK_N, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
            batch, row, BLOCK_M, OUT_DESC,
        )  # fmt: skip


__all__ = [
    "activate",
    "add_bias",
    "finish_tile",
    "gate",
    "gelu_erf",
    "logistic",
    "scale_rows_and_columns",
    "split_columns",
    "store_described_tile",
    "store_tile",
]
