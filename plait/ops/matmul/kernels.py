"""Device code of `plait.matmul`, and the GEMM tile loop every overlapped operator is built on.

Shapes: A [M, K] (x), B [N, K] (a weight), acc a tile of A @ B^T in fp32; epilogues finish it.
Operands come as tensor descriptors (DESC) or as pointers with any strides. Whatever a peer or the
copy engine writes must have been waited for by the caller; nothing here synchronises.
"""

import triton
import triton.language as tl


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
def add_dot(acc, a_tile, b_tile, PRECISION: tl.constexpr):
    """acc + a_tile @ b_tile.

    Exact fp32 sums each block of K on its own first: one running sum over all of K would err more
    than twice as much as PyTorch does. The fma keeps the compiler from joining the two sums again.
    """
    if (a_tile.dtype == tl.float32) & (PRECISION == "ieee"):
        acc = tl.fma(tl.dot(a_tile, b_tile, input_precision=PRECISION), 1.0, acc)
    elif a_tile.dtype == tl.int8:
        acc = tl.dot(a_tile, b_tile, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
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
):
    """acc + A[rows, k] @ B[col : col + BLOCK_N, k]^T over k in [k_begin, k_end), all of K if None.

    DESC: `a` is a descriptor over [M, K] with block [BLOCK_M, BLOCK_K], read from `row` on; `b` one
    over [N, K] with block [BLOCK_N, BLOCK_K], or over [K, N] with block [BLOCK_K, BLOCK_N] if B_KN.
    Not DESC: `a` and `b` are pointers, `rows` (int [BLOCK_M]) are the rows of A and `rows_ok` masks
    them; strides count elements and may be anything. PRECISION is `tl.dot`'s input_precision.
    k_begin is a multiple of BLOCK_K, k_end too or K. Descriptors of B start at its row `b_first`
    (of a batch). acc is fp32, or int32 for int8 operands; fp8 is summed in the tensor cores' short
    accumulator (see `accumulate_tile_in_steps`).

    Example: acc 0, A = [[1, 2]], B = [[3, 4], [5, 6]] gives [[1*3 + 2*4, 1*5 + 2*6]] = [[11, 17]].
    """
    stop = K if k_end is None else k_end
    for k in range(k_begin, stop, BLOCK_K):
        a_tile = load_a_tile(a, row, rows, rows_ok, k, K, stride_am, stride_ak, BLOCK_K, DESC)
        b_tile = load_b_tile(
            b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, DESC, B_KN, b_first
        )
        acc = add_dot(acc, a_tile, b_tile, PRECISION)
    return acc


@triton.jit
def accumulate_tile_in_steps(
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
    k_begin,
    k_end,
    b_first,
    STEP: tl.constexpr,
):
    """`accumulate_tile` for fp8: sums move to fp32 after every STEP products of each element.

    The tensor cores add fp8 products in an accumulator of 14 bits, whose error grows with the
    number of sums. STEP is a multiple of BLOCK_K.
    """
    short = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        a_tile = load_a_tile(a, row, rows, rows_ok, k, K, stride_am, stride_ak, BLOCK_K, DESC)
        b_tile = load_b_tile(
            b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, DESC, B_KN, b_first
        )
        short = tl.dot(a_tile, b_tile, short)
        if (k + BLOCK_K - k_begin) % STEP == 0:
            acc += short
            short = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return acc + short


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


__all__ = [
    "accumulate_scaled_tile",
    "accumulate_tile",
    "accumulate_tile_in_steps",
    "accumulate_tile_pair",
    "add_dot",
    "load_a_tile",
    "load_b_tile",
]
