"""Device code of `plait.matmul`, and the GEMM tile loop every overlapped operator is built on.

Shapes: A [M, K] (x), B [N, K] (a weight), out [M, N] = epilogue(A @ B^T), accumulated in fp32.
Operands come as tensor descriptors (DESC) or as pointers with any strides. Whatever a peer or the
copy engine writes must have been waited for by the caller; nothing here synchronises.
"""

import triton
import triton.language as tl

# --- the tile loop ------------------------------------------------------------------------------


@triton.jit
def load_a_tile(
    a, row, rows, rows_ok, k, K, stride_am, stride_ak, BLOCK_K: tl.constexpr, DESC: tl.constexpr
):
    """A[rows, k : k + BLOCK_K], zero where rows_ok is false or beyond K; DESC: from `row` on."""
    if DESC:
        tile = a.load([row, k])
    else:
        offs_k = k + tl.arange(0, BLOCK_K)
        offsets = rows.to(tl.int64)[:, None] * stride_am + offs_k.to(tl.int64)[None, :] * stride_ak
        tile = tl.load(a + offsets, mask=rows_ok[:, None] & (offs_k < K)[None, :], other=0.0)
    return tile


@triton.jit
def load_b_tile(
    b,
    col,
    k,
    N,
    K,
    stride_bn,
    stride_bk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    b_first=0,
):
    """B[col : col + BLOCK_N, k : k + BLOCK_K]^T as [BLOCK_K, BLOCK_N], zero beyond N and K.

    A descriptor's rows (N, or K if B_KN) count from `b_first`.
    """
    if DESC:
        if B_KN:
            tile = b.load([b_first + k, col])
        else:
            tile = b.load([b_first + col, k]).T
    else:
        offs_k = k + tl.arange(0, BLOCK_K)
        offs_n = col + tl.arange(0, BLOCK_N)
        offsets = (
            offs_k.to(tl.int64)[:, None] * stride_bk + offs_n.to(tl.int64)[None, :] * stride_bn
        )
        tile = tl.load(b + offsets, mask=(offs_k < K)[:, None] & (offs_n < N)[None, :], other=0.0)
    return tile


@triton.jit
def add_dot(acc, a_tile, b_tile, PRECISION: tl.constexpr, IMPRECISE_ACC: tl.constexpr = None):
    """acc + a_tile @ b_tile.

    Exact fp32 sums each block of K on its own first: one running sum over all of K would err more
    than twice as much as PyTorch does. The fma keeps the compiler from joining the two sums again.
    """
    if (a_tile.dtype == tl.float32) & (PRECISION == "ieee"):
        acc = tl.fma(tl.dot(a_tile, b_tile, input_precision=PRECISION), 1.0, acc)
    elif a_tile.dtype == tl.int8:
        acc = tl.dot(a_tile, b_tile, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(
            a_tile,
            b_tile,
            acc,
            input_precision=PRECISION,
            max_num_imprecise_acc=IMPRECISE_ACC,
        )
    return acc


@triton.jit
def accumulate_scaled_tile(
    acc,
    a,
    b,
    a_scale_ptr,
    b_scale_ptr,
    row,
    rows,
    rows_ok,
    col,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    stride_asm,
    stride_ask,
    stride_bsn,
    stride_bsk,
    BLOCK_N: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    k_begin=0,
    k_end=None,
    b_first=0,
):
    """`accumulate_tile` for operands scaled in blocks: A by 1 x SCALE_BLOCK, B by squares of it.

    a_scale [M, K / SCALE_BLOCK] and b_scale [N / SCALE_BLOCK, K / SCALE_BLOCK], fp32, rounded up.
    One step of K is one block, so each product is scaled once, in fp32.
    """
    stop = K if k_end is None else k_end
    cols = col + tl.arange(0, BLOCK_N)
    a_scale_row = a_scale_ptr + rows.to(tl.int64) * stride_asm
    b_scale_col = b_scale_ptr + (cols // SCALE_BLOCK).to(tl.int64) * stride_bsn
    for k in range(k_begin, stop, SCALE_BLOCK):
        a_tile = load_a_tile(a, row, rows, rows_ok, k, K, stride_am, stride_ak, SCALE_BLOCK, DESC)
        b_tile = load_b_tile(
            b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, SCALE_BLOCK, DESC, B_KN, b_first
        )
        block = k // SCALE_BLOCK
        a_scale = tl.load(a_scale_row + block * stride_ask, mask=rows_ok, other=0.0)
        b_scale = tl.load(b_scale_col + block * stride_bsk, mask=cols < N, other=0.0)
        acc += tl.dot(a_tile, b_tile) * (a_scale[:, None] * b_scale[None, :])
    return acc


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
def accumulate_tile(
    acc,
    a,
    b,
    row,
    rows,
    rows_ok,
    col,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
    k_begin=0,
    k_end=None,
    b_first=0,
    IMPRECISE_ACC: tl.constexpr = None,
):
    """acc + A[rows, k] @ B[col : col + BLOCK_N, k]^T over k in [k_begin, k_end), all of K if None.

    DESC: `a` is a descriptor over [M, K] with block [BLOCK_M, BLOCK_K], read from `row` on; `b` one
    over [N, K] with block [BLOCK_N, BLOCK_K], or over [K, N] with block [BLOCK_K, BLOCK_N] if B_KN.
    Not DESC: `a` and `b` are pointers, `rows` (int [BLOCK_M]) are the rows of A and `rows_ok` masks
    them; strides count elements and may be anything. PRECISION is `tl.dot`'s input_precision.
    k_begin is a multiple of BLOCK_K, k_end too or K. Descriptors of B start at its row `b_first`
    (of a batch). acc is fp32, or int32 for int8 operands. IMPRECISE_ACC: after how many products
    fp8 sums move from the tensor core's short accumulator into fp32.

    Example: acc 0, A = [[1, 2]], B = [[3, 4], [5, 6]] gives [[1*3 + 2*4, 1*5 + 2*6]] = [[11, 17]].
    """
    stop = K if k_end is None else k_end
    for k in range(k_begin, stop, BLOCK_K):
        a_tile = load_a_tile(a, row, rows, rows_ok, k, K, stride_am, stride_ak, BLOCK_K, DESC)
        b_tile = load_b_tile(
            b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, DESC, B_KN, b_first
        )
        acc = add_dot(acc, a_tile, b_tile, PRECISION, IMPRECISE_ACC)
    return acc


@triton.jit
def accumulate_tile_pair(
    acc0,
    acc1,
    a,
    b0,
    b1,
    row,
    rows,
    rows_ok,
    col,
    N,
    K,
    stride_am,
    stride_ak,
    stride_b0n,
    stride_b0k,
    stride_b1n,
    stride_b1k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESC: tl.constexpr,
    B_KN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`accumulate_tile` for two weights of one [N, K]: each tile of A is read once for both."""
    for k in range(0, K, BLOCK_K):
        a_tile = load_a_tile(a, row, rows, rows_ok, k, K, stride_am, stride_ak, BLOCK_K, DESC)
        tile0 = load_b_tile(b0, col, k, N, K, stride_b0n, stride_b0k, BLOCK_N, BLOCK_K, DESC, B_KN)
        tile1 = load_b_tile(b1, col, k, N, K, stride_b1n, stride_b1k, BLOCK_N, BLOCK_K, DESC, B_KN)
        acc0 = add_dot(acc0, a_tile, tile0, PRECISION)
        acc1 = add_dot(acc1, a_tile, tile1, PRECISION)
    return acc0, acc1


# --- epilogues ----------------------------------------------------------------------------------


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
    )  # fmt: skip
    _finish_piece(
        right, right_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
        pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
        rows, rows_ok, col + HALF, N, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
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
):
    """Bias, pre-activation outputs, activation or gate, and the store of one fp32 tile.

    acc [BLOCK_M, BLOCK_N] is the only product, or the gate's if NUM_WEIGHTS is 2; then `up` is the
    other one (pass acc otherwise). `pre*_ptr` share their strides and are written if STORE_PRE.
    Large tiles are finished a quarter of their columns at a time: at once, an error function over
    128 x 256 elements spills registers.
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
        )  # fmt: skip
        _finish_halves(
            right, right_up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col + HALF, N, BLOCK_M, HALF, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
        )  # fmt: skip
    else:
        _finish_piece(
            acc, up, bias0_ptr, bias1_ptr, stride_bias0, stride_bias1,
            pre0_ptr, pre1_ptr, stride_pm, stride_pn, out_ptr, stride_om, stride_on,
            rows, rows_ok, col, N, BLOCK_N, NUM_WEIGHTS, ACT, HAS_BIAS, STORE_PRE,
        )  # fmt: skip


__all__ = [
    "accumulate_scaled_tile",
    "accumulate_tile",
    "accumulate_tile_pair",
    "activate",
    "add_bias",
    "finish_tile",
    "gate",
    "gelu_erf",
    "load_a_tile",
    "load_b_tile",
    "logistic",
    "split_columns",
    "store_tile",
]
