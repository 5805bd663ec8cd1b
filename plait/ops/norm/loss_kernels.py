"""Kernels of losses that compare two tensors element by element, and of their gradients.

KIND says which; PARAM is its beta or delta, a compile-time value, since run-time ones reach a
kernel in fp32. Elements are the rows of plait/ops/norm/rows.py, all of size 1.
"""

import triton
import triton.language as tl

from plait.ops.norm.rows_kernels import block_rows, row_offset
from plait.ops.norm.softmax_kernels import inverse, widened

MSE = tl.constexpr(0)
L1 = tl.constexpr(1)
SMOOTH_L1 = tl.constexpr(2)
HUBER = tl.constexpr(3)
SOFT_MARGIN = tl.constexpr(4)
BCE = tl.constexpr(5)  # of probabilities
BCE_LOGITS = tl.constexpr(6)


@triton.jit
def _log1p_exp(x):
    """log(1 + exp(x)), to the last digits also where it is close to 0 (W. Kahan's log1p)."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    quotient = tl.where(more == 1.0, 1.0, tl.log(more) / tl.where(more == 1.0, 1.0, more - 1.0))
    return tl.where(x > 0.0, x, 0.0) + small * quotient


@triton.jit
def _log_at_least(x):
    """log(x), -100 where it is below; NaN stays."""
    found = tl.log(x)
    return tl.where(found < -100.0, -100.0, found)


@triton.jit
def _loss(x, t, w, p, KIND: tl.constexpr, PARAM: tl.constexpr):
    """The loss of x with target t; w and p are the weights of BCE and of its positives."""
    if KIND == MSE:
        return (x - t) * (x - t)
    elif KIND == L1:
        return tl.abs(x - t)
    elif KIND == SMOOTH_L1:
        distance = tl.abs(x - t)
        near = 0.5 * distance * distance / PARAM
        return tl.where(distance < PARAM, near, distance - 0.5 * PARAM)
    elif KIND == HUBER:
        distance = tl.abs(x - t)
        far = PARAM * (distance - 0.5 * PARAM)
        return tl.where(distance <= PARAM, 0.5 * distance * distance, far)
    elif KIND == SOFT_MARGIN:
        return _log1p_exp(-x * t)
    elif KIND == BCE:
        return ((t - 1.0) * _log_at_least(1.0 - x) - t * _log_at_least(x)) * w
    else:
        return ((1.0 - t) * x + (1.0 + (p - 1.0) * t) * _log1p_exp(-x)) * w


@triton.jit
def _slope(x, t, w, KIND: tl.constexpr, PARAM: tl.constexpr):
    """The derivative of the loss with respect to x."""
    if KIND == MSE:
        return 2.0 * (x - t)
    elif KIND == L1:
        away = x - t
        return tl.where(away > 0.0, 1.0, tl.where(away < 0.0, -1.0, away * 0.0))
    elif KIND == SMOOTH_L1:
        away = x - t
        near = away / PARAM
        return tl.where(away >= PARAM, 1.0, tl.where(away <= -PARAM, -1.0, near))
    elif KIND == HUBER:
        away = x - t
        return tl.where(away >= PARAM, PARAM, tl.where(away <= -PARAM, -PARAM, away))
    elif KIND == SOFT_MARGIN:
        small = tl.exp(-tl.abs(x * t))
        return -t * tl.where(x * t >= 0.0, small, 1.0) / (1.0 + small)
    else:
        spread = (1.0 - x) * x
        return (x - t) / tl.where(spread < 1e-12, 1e-12, spread) * w


@triton.jit
def _element_losses(
    x_ptr, t_ptr, w_ptr, p_ptr, outer, inner, mask, n1, n2,
    x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
    w_s0, w_s1, w_s2, w_s3, p_s0, p_s1, p_s2, p_s3,
    KIND: tl.constexpr, PARAM: tl.constexpr, HAS_W: tl.constexpr, HAS_P: tl.constexpr,
    NDIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    offs = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    x = widened(tl.load(x_ptr + offs, mask=mask, other=0.0))
    offs = row_offset(outer, inner, n1, n2, t_s0, t_s1, t_s2, t_s3, NDIM, WIDE)
    t = widened(tl.load(t_ptr + offs, mask=mask, other=0.0))
    w = 1.0
    p = 1.0
    if HAS_W:
        offs = row_offset(outer, inner, n1, n2, w_s0, w_s1, w_s2, w_s3, NDIM, WIDE)
        w = widened(tl.load(w_ptr + offs, mask=mask, other=0.0))
    if HAS_P:
        offs = row_offset(outer, inner, n1, n2, p_s0, p_s1, p_s2, p_s3, NDIM, WIDE)
        p = widened(tl.load(p_ptr + offs, mask=mask, other=0.0))
    return _loss(x, t, w, p, KIND, PARAM)


@triton.jit
def sum_fp64(x):
    """The sum of (n,) numbers as (1,): there are few, so fp64 costs nothing."""
    return tl.sum(x.to(tl.float64), 0, keep_dims=True)


@triton.jit
def store_fp64(ptr, index, value):
    """Store an fp64 (1,) at `index` in the pointer's dtype."""
    place = ptr + index + tl.arange(0, 1)
    if ptr.dtype.element_ty == tl.float64:
        tl.store(place, value)
    else:
        tl.store(place, value.to(tl.float32).to(ptr.dtype.element_ty))


@triton.jit
def _loss_kernel(
    x_ptr, t_ptr, w_ptr, p_ptr, out_ptr, num_rows, n1, n2, n3,
    x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
    w_s0, w_s1, w_s2, w_s3, p_s0, p_s1, p_s2, p_s3,
    out_s0, out_s1, out_s2, out_s3,
    KIND: tl.constexpr, PARAM: tl.constexpr, HAS_W: tl.constexpr, HAS_P: tl.constexpr,
    ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The loss of every element."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    loss = _element_losses(
        x_ptr, t_ptr, w_ptr, p_ptr, outer, inner, mask, n1, n2,
        x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
        w_s0, w_s1, w_s2, w_s3, p_s0, p_s1, p_s2, p_s3,
        KIND, PARAM, HAS_W, HAS_P, NDIM, WIDE,
    )  # fmt: skip
    offs = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    tl.store(out_ptr + offs, loss.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _loss_sum_kernel(
    x_ptr, t_ptr, w_ptr, p_ptr, out_ptr, num_rows, n1, n2, n3, blocks, count,
    x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
    w_s0, w_s1, w_s2, w_s3, p_s0, p_s1, p_s2, p_s3,
    KIND: tl.constexpr, PARAM: tl.constexpr, HAS_W: tl.constexpr, HAS_P: tl.constexpr,
    ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of every num_programs-th tile of ROWS, divided by `count`, to out[program]."""
    if x_ptr.dtype.element_ty == tl.float64:
        total = tl.zeros((ROWS,), tl.float64)
    else:
        total = tl.zeros((ROWS,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        outer, inner, mask = block_rows(block, num_rows, n3, ROWS, NDIM, TILED)
        loss = _element_losses(
            x_ptr, t_ptr, w_ptr, p_ptr, outer, inner, mask, n1, n2,
            x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
            w_s0, w_s1, w_s2, w_s3, p_s0, p_s1, p_s2, p_s3,
            KIND, PARAM, HAS_W, HAS_P, NDIM, WIDE,
        )  # fmt: skip
        total += tl.where(mask, loss, 0.0)
    result = sum_fp64(total) / tl.full((1,), count, tl.float64)
    store_fp64(out_ptr, tl.program_id(0), result)


@triton.jit
def _sum_kernel(part_ptr, out_ptr, num_parts, count, BLOCK: tl.constexpr):
    """The sum of `num_parts` numbers divided by `count`."""
    lane = tl.arange(0, BLOCK)
    part = tl.load(part_ptr + lane, mask=lane < num_parts, other=0.0)
    store_fp64(out_ptr, 0, sum_fp64(part) / tl.full((1,), count, tl.float64))


@triton.jit
def _loss_backward_kernel(
    g_ptr, x_ptr, t_ptr, w_ptr, out_ptr, num_rows, n1, n2, n3, count,
    x_s0, x_s1, x_s2, x_s3, t_s0, t_s1, t_s2, t_s3,
    w_s0, w_s1, w_s2, w_s3, g_s0, g_s1, g_s2, g_s3,
    out_s0, out_s1, out_s2, out_s3,
    KIND: tl.constexpr, PARAM: tl.constexpr, HAS_W: tl.constexpr,
    ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """g times the derivative divided by `count`, for every element."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    offs = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE)
    x = widened(tl.load(x_ptr + offs, mask=mask, other=0.0))
    offs = row_offset(outer, inner, n1, n2, t_s0, t_s1, t_s2, t_s3, NDIM, WIDE)
    t = widened(tl.load(t_ptr + offs, mask=mask, other=0.0))
    offs = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    g = widened(tl.load(g_ptr + offs, mask=mask, other=0.0))
    w = 1.0
    if HAS_W:
        offs = row_offset(outer, inner, n1, n2, w_s0, w_s1, w_s2, w_s3, NDIM, WIDE)
        w = widened(tl.load(w_ptr + offs, mask=mask, other=0.0))
    result = _slope(x, t, w, KIND, PARAM) * g * inverse(tl.full((1,), count, x.dtype))
    offs = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    tl.store(out_ptr + offs, result.to(out_ptr.dtype.element_ty), mask=mask)


__all__ = [
    "BCE",
    "BCE_LOGITS",
    "HUBER",
    "L1",
    "MSE",
    "SMOOTH_L1",
    "SOFT_MARGIN",
    "store_fp64",
    "sum_fp64",
]
