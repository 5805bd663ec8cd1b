"""Kernels of the plain collectives: wait for what the peers pushed, then move or sum it.

Legend: a region holds [world_size, slot rows, features], slot s written by rank s.
"""

import triton
import triton.language as tl

from plait.symm.lang.patterns import finish, wait
from plait.symm.lang.words import READY, get_epoch, get_rank, get_world_size


@triton.jit(do_not_specialize=["num_chunks", "chunk_rows", "slot_words"])
def _arrive_kernel(
    ctx_ptr,
    table_ptr,
    slots_ptr,
    slot_words,
    num_chunks,
    chunk_rows,
    BLOCK: tl.constexpr,
    OP: tl.constexpr,
):
    """One block: wait until every peer's rows are in this rank's region.

    table holds each rank's rows first; slots_ptr is the region as int32, `slot_words` a slot. Later
    work of the stream may read the region; it must be closed afterwards (`_finish_kernel`). The
    slot of a peer that did not come is filled with ones: NaN in every floating dtype.
    """
    rank = get_rank(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    for peer in range(get_world_size(ctx_ptr)):
        rows = tl.load(table_ptr + peer)
        if (peer != rank) & (rows > 0):
            word = READY + peer * num_chunks + (rows - 1) // chunk_rows
            arrived = wait(ctx_ptr, word, epoch, peer, OP)
            if arrived == 0:
                slot_ptr = slots_ptr + tl.cast(peer, tl.int64) * slot_words
                for start in range(0, slot_words, BLOCK):
                    offs = start + tl.arange(0, BLOCK)
                    tl.store(
                        slot_ptr + offs, tl.full((BLOCK,), -1, tl.int32), mask=offs < slot_words
                    )


@triton.jit(do_not_specialize=["num_chunks", "chunk_elements"])
def _sum_segments_kernel(
    ctx_ptr,
    own_ptr,
    slots_ptr,
    out_ptr,
    num_elements,
    slot_elements,
    num_chunks,
    chunk_elements,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OP: tl.constexpr,
    bias_ptr=None,
    stride_bias=1,
    num_cols=1,
    HAS_BIAS: tl.constexpr = False,
):
    """out = sum over ranks in rank order, in fp32, rounded once; closes the region.

    HAS_BIAS: bias [num_cols] is added once to each row of num_cols elements.

    own [num_elements] is this rank's part, slots [world_size, slot_elements] this rank's region,
    which peers fill (own slot unused), out [num_elements]; all flat and contiguous. A tile waits
    for the chunk of every peer that holds its last element; chunks of one sender arrive in order.

    Example: world 2, rank 0, 3 elements, BLOCK 2, chunks of 2: tile 0 waits for READY + num_chunks
    and writes own[0:2] + slots[1, 0:2]; tile 1 waits for READY + num_chunks + 1 and writes own[2] +
    slots[1, 2].
    """
    rank = get_rank(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    alive = True
    waited = -1
    for tile in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK), tl.num_programs(0)):
        start = tile * BLOCK
        chunk = (tl.minimum(start + BLOCK, num_elements) - 1) // chunk_elements
        if chunk != waited:
            for peer in range(WORLD_SIZE):
                if peer != rank:
                    alive = (
                        wait(ctx_ptr, READY + peer * num_chunks + chunk, epoch, peer, OP) & alive
                    )
            waited = chunk
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_elements
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD_SIZE):
            if peer == rank:
                part = tl.load(own_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            else:
                slot_ptr = slots_ptr + tl.cast(slot_elements, tl.int64) * peer
                part = tl.load(slot_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            if peer == 0:
                total = part  # not 0 + part: that would lose the sign of a zero
            else:
                total += part
        if HAS_BIAS:
            cols = (offs % num_cols).to(tl.int64)
            total += tl.load(bias_ptr + cols * stride_bias, mask=mask, other=0.0).to(tl.float32)
        total = tl.where(alive, total, float("nan"))
        tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)
    finish(ctx_ptr, epoch)
