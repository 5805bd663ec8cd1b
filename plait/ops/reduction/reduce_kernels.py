"""The kernels of the reduction engine: elements to results or partial results, partials to results.

A block holds a tile (BLOCK_K results, BLOCK_O outer, BLOCK_I inner elements); it walks the tiles of
its results, every `splits`-th if several blocks share them. Layouts are those of
plait/ops/reduction/layout.py, numbered from the innermost dim outwards.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import grid_launch_dependents, grid_wait
from plait.ops.reduction.combine_kernels import (
    beats,
    combined,
    finished,
    folded,
    loaded,
    nothing_like,
    single,
    start,
    tile_logsumexp,
    tile_moments,
)


@triton.jit
def strided(index, n0, n1, n2, s0, s1, s2, s3, NUM: tl.constexpr):
    """Where element `index` of NUM dims lies; dim 0 is the innermost, the outermost has no end."""
    if NUM == 1:
        return index * s0
    offset = (index % n0) * s0
    index = index // n0
    if NUM == 2:
        return offset + index * s1
    offset += (index % n1) * s1
    index = index // n1
    if NUM == 3:
        return offset + index * s2
    return offset + (index % n2) * s2 + (index // n2) * s3


@triton.jit
def _lanes(first, SIZE: tl.constexpr, WIDE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    if WIDE:
        lanes = lanes.to(tl.int64)
    return first + lanes


@triton.jit
def _index(
    place, inner, inner_tiles, INDEX: tl.constexpr, NUM_O: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The index among the elements of a result of each lane's best one, in tile `place`.

    Padding and what nothing has beaten count as infinite (or as the least integer). If that is the
    best, all elements are, and the right index is 0: that of the first lane, and no lane's is less.
    """
    if ONE:
        place = tl.zeros([1, 1, 1], tl.int32)
    lane_i = tl.arange(0, BLOCK_I).to(INDEX)[None, None, :]
    if NUM_O == 0:
        index = place.to(INDEX) * BLOCK_I + lane_i
    else:
        lane_o = tl.arange(0, BLOCK_O).to(INDEX)[None, :, None]
        i = (place % inner_tiles).to(INDEX) * BLOCK_I + lane_i
        o = (place // inner_tiles).to(INDEX) * BLOCK_O + lane_o
        index = o * inner + i
    return index + tl.zeros([BLOCK_K, BLOCK_O, BLOCK_I], INDEX)


@triton.jit
def _store(acc, first_ptr, second_ptr, offsets, mask):
    tl.store(first_ptr + offsets, acc[0].to(first_ptr.dtype.element_ty), mask=mask)
    if second_ptr is not None:
        tl.store(second_ptr + offsets, acc[1].to(second_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "splits", "num_tiles", "inner_tiles", "num_outer"])
def reduce_kernel(
    x_ptr, y_ptr, first_ptr, second_ptr, third_ptr,
    num_results, num_outer, inner, count, num_tiles, inner_tiles, splits,
    k_size0, k_size1, k_size2, k_stride0, k_stride1, k_stride2, k_stride3,
    r_stride0, r_stride1, r_stride2, r_stride3,
    o_size0, o_size1, o_stride0, o_stride1, o_stride2, inner_stride, y_stride,
    LOAD: tl.constexpr, COMBINE: tl.constexpr, FINISH: tl.constexpr, P: tl.constexpr,
    THROUGH: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    NUM_K: tl.constexpr, NUM_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, PAD: tl.constexpr,
    ONE: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Results, or accumulators of each of `splits` shares, (splits, num_results), where SPLIT.

    `y_ptr` is None or a second factor. PAD: masked elements are loaded as 0, which adds nothing.
    ONE: there is one tile. EARLY: the launch after this one starts early.
    """
    WHOLE: tl.constexpr = COMBINE == "moments" or COMBINE == "logsumexp"
    INDEXED: tl.constexpr = COMBINE == "argmax" or COMBINE == "argmin"
    if EARLY:
        grid_launch_dependents()
    k_blocks = tl.cdiv(num_results, BLOCK_K)
    block = tl.program_id(0)
    share = block // k_blocks
    k_first = block % k_blocks
    if WIDE:
        k_first = k_first.to(tl.int64)
    k = _lanes(k_first * BLOCK_K, BLOCK_K, WIDE)
    k_mask = k < num_results
    k_offset = strided(
        k, k_size0, k_size1, k_size2, k_stride0, k_stride1, k_stride2, k_stride3, NUM_K
    )
    rows = x_ptr + k_offset[:, None, None]
    if WHOLE:
        acc = start(k_offset, COMBINE, ACC, INDEX)
    elif INDEXED:  # the best element so far, and the tile where it is
        best = nothing_like(tl.zeros([BLOCK_K, BLOCK_O, BLOCK_I], ACC), COMBINE, ACC)
        place = tl.zeros([BLOCK_K, BLOCK_O, BLOCK_I], tl.int32) + share
    else:
        acc = start(tl.zeros([BLOCK_K, BLOCK_O, BLOCK_I], tl.int1), COMBINE, ACC, INDEX)
    for tile in tl.range(share, num_tiles, splits, num_stages=STAGES, loop_unroll_factor=UNROLL):
        if NUM_O == 0:
            outer_first = 0
            inner_first = tile
        else:
            outer_first = (tile // inner_tiles) * BLOCK_O
            inner_first = tile % inner_tiles
        if WIDE:
            inner_first = inner_first.to(tl.int64)
        inner_first *= BLOCK_I
        i = _lanes(inner_first, BLOCK_I, WIDE)[None, None, :]
        mask = k_mask[:, None, None] & (i < inner)
        where = rows + i * inner_stride
        if NUM_O > 0:
            o = _lanes(outer_first, BLOCK_O, WIDE)
            mask = mask & (o < num_outer)[None, :, None]
            o_offset = strided(o, o_size0, o_size1, 1, o_stride0, o_stride1, o_stride2, 0, NUM_O)
            where += o_offset[None, :, None]
        if PAD:
            x = tl.load(where, mask=mask, other=0)
        else:
            x = tl.load(where, mask=mask)
        v = loaded(x, LOAD, THROUGH, ACC, P)
        if y_ptr is not None:
            y = tl.load(y_ptr + i * y_stride, mask=mask, other=0)
            v = v * loaded(y, LOAD, THROUGH, ACC, P)
        if COMBINE == "moments":
            number = tl.minimum(inner - inner_first, BLOCK_I)
            if NUM_O > 0:
                number = number * tl.minimum(num_outer - outer_first, BLOCK_O)
            acc = combined(acc, tile_moments(v, mask, number), COMBINE)
        elif COMBINE == "logsumexp":
            acc = combined(acc, tile_logsumexp(v, mask), COMBINE)
        elif INDEXED:
            v = tl.where(mask, v, nothing_like(v, COMBINE, ACC))
            if ONE:
                best = v
            else:
                better = beats(v, best, COMBINE)
                best = tl.where(better, v, best)
                place = tl.where(better, tile, place)
        elif PAD:
            acc = combined(acc, (v,), COMBINE)
        else:
            acc = combined(acc, single(v, mask, COMBINE, ACC), COMBINE)
    if INDEXED:
        index = _index(place, inner, inner_tiles, INDEX, NUM_O, BLOCK_K, BLOCK_O, BLOCK_I, ONE)
        acc = folded((best, index), COMBINE)
    elif not WHOLE:
        acc = folded(acc, COMBINE)
    if SPLIT:
        offset = share * num_results + k
        _store(acc, first_ptr, second_ptr, offset, k_mask)
        if third_ptr is not None:
            tl.store(third_ptr + offset, acc[2], mask=k_mask)
    else:
        offset = strided(
            k, k_size0, k_size1, k_size2, r_stride0, r_stride1, r_stride2, r_stride3, NUM_K
        )
        _store(finished(acc, count, FINISH, P), first_ptr, second_ptr, offset, k_mask)


@triton.jit(do_not_specialize=["count", "splits"])
def partials_kernel(
    a_ptr, b_ptr, c_ptr, first_ptr, second_ptr,
    num_results, count, splits,
    k_size0, k_size1, k_size2, r_stride0, r_stride1, r_stride2, r_stride3,
    COMBINE: tl.constexpr, FINISH: tl.constexpr, P: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, NUM_K: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Results of the accumulators `a`, `b`, `c` (as many as there are), (splits, num_results)."""
    if EARLY:
        grid_wait()
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    k = _lanes(block * BLOCK_K, BLOCK_K, WIDE)
    k_mask = k < num_results
    s = tl.arange(0, BLOCK_S)[None, :]
    mask = k_mask[:, None] & (s < splits)
    where = k[:, None] + s * num_results
    nothing = start(tl.zeros([BLOCK_K, BLOCK_S], tl.int1), COMBINE, ACC, INDEX)
    a = tl.where(mask, tl.load(a_ptr + where, mask=mask), nothing[0])
    if b_ptr is None:
        acc = (a,)
    elif c_ptr is None:
        acc = (a, tl.where(mask, tl.load(b_ptr + where, mask=mask), nothing[1]))
    else:
        b = tl.where(mask, tl.load(b_ptr + where, mask=mask), nothing[1])
        acc = (a, b, tl.where(mask, tl.load(c_ptr + where, mask=mask), nothing[2]))
    offset = strided(
        k, k_size0, k_size1, k_size2, r_stride0, r_stride1, r_stride2, r_stride3, NUM_K
    )
    result = finished(folded(acc, COMBINE), count, FINISH, P)
    _store(result, first_ptr, second_ptr, offset, k_mask)


__all__ = ["partials_kernel", "reduce_kernel", "strided"]
