"""Kernels of the negative log likelihood of a target class, and of its gradient.

Samples are the rows of plait/ops/norm/rows.py. A target that is no class reads nothing: its loss is
NaN, its gradient 0.
"""

import triton
import triton.language as tl

from plait.ops.norm.loss_kernels import store_fp64, sum_fp64
from plait.ops.norm.rows_kernels import block_rows, lane_offset, row_offset
from plait.ops.norm.softmax_kernels import quotient, widened


@triton.jit
def _sample_losses(
    x_ptr, t_ptr, w_ptr, outer, inner, mask, n1, n2, num_classes, ignore_index,
    x_s0, x_s1, x_s2, x_s3, x_step, t_s0, t_s1, t_s2, t_s3, w_step,
    HAS_W: tl.constexpr, NDIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Loss and weight of samples; both 0 where the target is `ignore_index`."""
    offs = row_offset(outer, inner, n1, n2, t_s0, t_s1, t_s2, t_s3, NDIM, WIDE)
    target = tl.load(t_ptr + offs, mask=mask, other=0).to(tl.int64)
    counts = mask & (target != ignore_index)
    is_class = (target >= 0) & (target < num_classes)
    offs = row_offset(outer, inner, n1, n2, x_s0, x_s1, x_s2, x_s3, NDIM, WIDE) + target * x_step
    x = widened(tl.load(x_ptr + offs, mask=counts & is_class, other=0.0))
    x = tl.where(is_class, x, float("nan"))
    if HAS_W:
        weight = widened(tl.load(w_ptr + target * w_step, mask=counts & is_class, other=0.0))
    else:
        weight = tl.full(x.shape, 1.0, x.dtype)
    return tl.where(counts, -x * weight, 0.0), tl.where(counts, weight, 0.0)


@triton.jit
def _nll_kernel(
    x_ptr, t_ptr, w_ptr, out_ptr, total_ptr, num_rows, n1, n2, n3, num_classes, ignore_index,
    x_s0, x_s1, x_s2, x_s3, x_step, t_s0, t_s1, t_s2, t_s3, w_step,
    out_s0, out_s1, out_s2, out_s3,
    HAS_W: tl.constexpr,
    ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The loss of every sample; the total weight is 0 by ATen's contract."""
    outer, inner, mask = block_rows(tl.program_id(0), num_rows, n3, ROWS, NDIM, TILED)
    loss, weight = _sample_losses(
        x_ptr, t_ptr, w_ptr, outer, inner, mask, n1, n2, num_classes, ignore_index,
        x_s0, x_s1, x_s2, x_s3, x_step, t_s0, t_s1, t_s2, t_s3, w_step, HAS_W, NDIM, WIDE,
    )  # fmt: skip
    offs = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    tl.store(out_ptr + offs, loss.to(out_ptr.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(total_ptr, 0.0)


@triton.jit
def _store_sums(
    out_ptr, total_ptr, index, loss, weight, divisor, MEAN: tl.constexpr
):  # fmt: skip
    """The summed or mean loss and the total weight of (n,) losses and weights."""
    result = sum_fp64(loss)
    if MEAN:
        result = result / sum_fp64(divisor)
    store_fp64(out_ptr, index, result)
    store_fp64(total_ptr, index, sum_fp64(weight))


@triton.jit
def _nll_sum_kernel(
    x_ptr, t_ptr, w_ptr, out_ptr, total_ptr, num_rows, n1, n2, n3, num_classes, ignore_index,
    blocks,
    x_s0, x_s1, x_s2, x_s3, x_step, t_s0, t_s1, t_s2, t_s3, w_step,
    HAS_W: tl.constexpr, MEAN: tl.constexpr, IGNORED_IS_0: tl.constexpr,
    ROWS: tl.constexpr, NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Loss and weight of every num_programs-th tile of ROWS samples, to out and total[program]."""
    if x_ptr.dtype.element_ty == tl.float64:
        losses = tl.zeros((ROWS,), tl.float64)
    else:
        losses = tl.zeros((ROWS,), tl.float32)
    weights = tl.zeros_like(losses)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        outer, inner, mask = block_rows(block, num_rows, n3, ROWS, NDIM, TILED)
        loss, weight = _sample_losses(
            x_ptr, t_ptr, w_ptr, outer, inner, mask, n1, n2, num_classes, ignore_index,
            x_s0, x_s1, x_s2, x_s3, x_step, t_s0, t_s1, t_s2, t_s3, w_step, HAS_W, NDIM, WIDE,
        )  # fmt: skip
        losses += loss
        weights += weight
    divisor = weights
    if IGNORED_IS_0:  # of the only sample, in a tile of one
        target = tl.load(t_ptr + tl.arange(0, ROWS)).to(tl.int64)
        divisor += tl.where(target == ignore_index, 1.0, 0.0).to(weights.dtype)
    _store_sums(out_ptr, total_ptr, tl.program_id(0), losses, weights, divisor, MEAN)


@triton.jit
def _nll_combine_kernel(
    part_ptr, out_ptr, total_ptr, num_parts, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Loss and total weight from part[0 and 1, program]."""
    lane = tl.arange(0, BLOCK)
    loss = tl.load(part_ptr + lane, mask=lane < num_parts, other=0.0)
    weight = tl.load(part_ptr + num_parts + lane, mask=lane < num_parts, other=0.0)
    _store_sums(out_ptr, total_ptr, 0, loss, weight, weight, MEAN)


@triton.jit
def _nll_backward_kernel(
    g_ptr, t_ptr, w_ptr, total_ptr, out_ptr, num_rows, n1, n2, n3, num_classes, ignore_index,
    row_blocks, g_s0, g_s1, g_s2, g_s3, t_s0, t_s1, t_s2, t_s3, w_step,
    out_s0, out_s1, out_s2, out_s3, out_step,
    HAS_W: tl.constexpr, MEAN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    NDIM: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK classes of ROWS samples: the gradient at the target, 0 elsewhere."""
    block = tl.program_id(0)
    outer, inner, mask = block_rows(block % row_blocks, num_rows, n3, ROWS, NDIM, TILED)
    classes = (block // row_blocks) * BLOCK + tl.arange(0, BLOCK)
    offs = row_offset(outer, inner, n1, n2, t_s0, t_s1, t_s2, t_s3, NDIM, WIDE)
    target = tl.load(t_ptr + offs, mask=mask, other=0).to(tl.int64)
    counts = mask & (target != ignore_index) & (target >= 0) & (target < num_classes)
    offs = row_offset(outer, inner, n1, n2, g_s0, g_s1, g_s2, g_s3, NDIM, WIDE)
    value = -widened(tl.load(g_ptr + offs, mask=counts, other=0.0))
    if MEAN:
        total = widened(tl.load(total_ptr + tl.arange(0, 1)))
        value = quotient(value, tl.broadcast_to(total, value.shape))
    if HAS_W:
        value *= widened(tl.load(w_ptr + target * w_step, mask=counts, other=0.0))
    hit = (classes[None, :] == target[:, None]) & counts[:, None]
    gradient = tl.where(hit, value[:, None], 0.0)
    offs = row_offset(outer, inner, n1, n2, out_s0, out_s1, out_s2, out_s3, NDIM, WIDE)
    offs = offs[:, None] + lane_offset(classes, out_step, WIDE)[None, :]
    valid = mask[:, None] & (classes < num_classes)[None, :]
    tl.store(out_ptr + offs, gradient.to(out_ptr.dtype.element_ty), mask=valid)


__all__: list[str] = []
