"""Signals and waits: the patterns that `plait.symm.lang` documents."""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import fence_proxy_async, globaltimer
from plait.symm.lang.words import (
    ABORT,
    ABORT_CLAIMED,
    ABORT_RECORDED,
    ARRIVED,
    CONSUMED,
    CTX_DEADLINE_NS,
    CTX_MIRROR,
    CTX_REGION,
    CTX_STATUS,
    CTX_WORDS,
    EPOCH,
    MAX_RANKS,
    READY,
    RECORD,
    TARGET,
    get_epoch,
    get_rank,
    get_world_size,
    group_word_ptr,
    word_ptr,
)


@triton.jit
def signal(ctx_ptr, peer, word, epoch):
    """Set `word` of `peer` to `epoch` after all stores of this block."""
    tl.debug_barrier()
    tl.atomic_xchg(word_ptr(ctx_ptr, peer, word), epoch, sem="release", scope="sys")


@triton.jit
def signal_all(ctx_ptr, word, epoch, SELF: tl.constexpr):
    """`signal` every peer, and this rank if SELF.

    One thread a peer, so that the round trips go on together.
    """
    rank = get_rank(ctx_ptr)
    peers = tl.arange(0, MAX_RANKS)
    mask = peers < get_world_size(ctx_ptr)
    if not SELF:
        mask = mask & (peers != rank)
    bases = tl.load(ctx_ptr + CTX_WORDS + peers, mask=mask, other=0)
    ptrs = bases.to(tl.pointer_type(tl.int32)) + (tl.load(ctx_ptr + CTX_REGION) + word)
    tl.debug_barrier()
    values = tl.zeros((MAX_RANKS,), tl.int32) + epoch
    tl.atomic_xchg(ptrs, values, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_all(ctx_ptr, first, stride, epoch, SELF: tl.constexpr, OP: tl.constexpr):
    """`wait` for word first + p * stride of every peer p, and of this rank if SELF.

    All words are looked at together; only the peers that are late are then waited for in turn.
    """
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    peers = tl.arange(0, MAX_RANKS)
    mask = peers < world_size
    if not SELF:
        mask = mask & (peers != rank)
    ptrs = word_ptr(ctx_ptr, rank, first) + peers * stride
    seen = tl.atomic_add(ptrs, 0, mask=mask, sem="acquire", scope="sys")
    late = (mask & (seen - epoch < 0)).to(tl.int32)
    # Each thread acquired one peer's stores: the others may read them after the barrier.
    tl.debug_barrier()
    ok = True
    if tl.sum(late, 0) > 0:
        for peer in range(world_size):
            if tl.sum(tl.where(peers == peer, late, 0), 0) > 0:
                ok = wait(ctx_ptr, first + peer * stride, epoch, peer, OP) & ok
    return ok


@triton.jit
def _give_up(ctx_ptr, word, epoch, seen, peer, OP: tl.constexpr):
    """Tell every rank that this wait passed its deadline; the first to tell a rank is recorded.

    Whoever reads ABORT_RECORDED with acquire sees the whole record.
    """
    rank = get_rank(ctx_ptr)
    region = tl.load(ctx_ptr + CTX_REGION).to(tl.int32)
    for other in range(get_world_size(ctx_ptr)):
        abort_ptr = group_word_ptr(ctx_ptr, other, ABORT)
        first = tl.atomic_cas(abort_ptr, 0, ABORT_CLAIMED, sem="acq_rel", scope="sys")
        if first == 0:
            record_ptr = group_word_ptr(ctx_ptr, other, RECORD)
            tl.atomic_xchg(record_ptr, rank, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 1, OP, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 2, word, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 3, peer, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 4, epoch, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 5, seen, sem="relaxed", scope="sys")
            tl.atomic_xchg(record_ptr + 6, region, sem="relaxed", scope="sys")
            tl.atomic_xchg(abort_ptr, ABORT_RECORDED, sem="release", scope="sys")


@triton.jit
def _tell_host(ctx_ptr):
    """Make the host raise at its next call, once the record of the wait that gave up is complete.

    Whoever writes that record needs microseconds; the deadline is for a GPU that died meanwhile.
    """
    abort_ptr = group_word_ptr(ctx_ptr, get_rank(ctx_ptr), ABORT)
    deadline_ns = tl.load(ctx_ptr + CTX_DEADLINE_NS)
    start = globaltimer()
    state = tl.atomic_add(abort_ptr, 0, sem="acquire", scope="sys")
    while (state != ABORT_RECORDED) & (globaltimer() - start < deadline_ns):
        state = tl.atomic_add(abort_ptr, 0, sem="acquire", scope="sys")
    status_ptr = tl.load(ctx_ptr + CTX_STATUS).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(status_ptr, 1, sem="release", scope="sys")


@triton.jit
def wait(ctx_ptr, word, epoch, peer, OP: tl.constexpr):
    """Wait until `word` of this rank has reached `epoch`; `peer` is who sets it.

    True: everything before the signal is visible to this block. False: the deadline of the group
    passed, here or on another rank; the host raises PeerTimeoutError at its next call.
    """
    rank = get_rank(ctx_ptr)
    ptr = word_ptr(ctx_ptr, rank, word)
    seen = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
    if seen - epoch < 0:
        abort_ptr = group_word_ptr(ctx_ptr, rank, ABORT)
        deadline_ns = tl.load(ctx_ptr + CTX_DEADLINE_NS)
        start = globaltimer()
        aborted = tl.load(abort_ptr, volatile=True)
        while (seen - epoch < 0) & (aborted == 0):
            seen = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
            if (seen - epoch < 0) & (globaltimer() - start > deadline_ns):
                _give_up(ctx_ptr, word, epoch, seen, peer, OP)
            aborted = tl.load(abort_ptr, volatile=True)
        if aborted != 0:
            _tell_host(ctx_ptr)
    return seen - epoch >= 0


@triton.jit
def begin(ctx_ptr, num_arrivals, OP: tl.constexpr):
    """Open a call on this region: one block, before the call's other work.

    Waits until every peer has consumed the previous epoch, then advances the epoch, sets how many
    blocks (`num_arrivals`) will call `finish`, and mirrors the epoch for copy-engine signals.
    """
    rank = get_rank(ctx_ptr)
    epoch = get_epoch(ctx_ptr) + 1
    ok = wait_all(ctx_ptr, CONSUMED, 1, epoch - 1, True, OP)
    tl.store(word_ptr(ctx_ptr, rank, EPOCH), epoch)
    arrived = tl.load(word_ptr(ctx_ptr, rank, ARRIVED))
    tl.store(word_ptr(ctx_ptr, rank, TARGET), arrived + num_arrivals)
    tl.store(tl.load(ctx_ptr + CTX_MIRROR).to(tl.pointer_type(tl.int32)), epoch)
    return ok


@triton.jit
def finish(ctx_ptr, epoch):
    """Close a call on this region: every block of the call's last kernel, when it has read all.

    The last block to arrive tells every peer that this rank has consumed the region. All reads of
    this block, descriptor loads included, come before its arrival.
    """
    rank = get_rank(ctx_ptr)
    target = tl.load(word_ptr(ctx_ptr, rank, TARGET))
    fence_proxy_async()
    tl.debug_barrier()
    arrived = tl.atomic_add(word_ptr(ctx_ptr, rank, ARRIVED), 1, sem="acq_rel", scope="gpu")
    if arrived + 1 == target:
        signal_all(ctx_ptr, CONSUMED + rank, epoch, True)
        # A peer that gave up on this rank may have overwritten what this call still read.
        if tl.load(group_word_ptr(ctx_ptr, rank, ABORT), volatile=True) != 0:
            _tell_host(ctx_ptr)


@triton.jit
def barrier(ctx_ptr, OP: tl.constexpr):
    """All ranks have arrived: one block; needs a region of its own words."""
    rank = get_rank(ctx_ptr)
    epoch = get_epoch(ctx_ptr) + 1
    signal_all(ctx_ptr, READY + rank, epoch, True)
    ok = wait_all(ctx_ptr, READY, 1, epoch, True, OP)
    tl.store(word_ptr(ctx_ptr, rank, EPOCH), epoch)
    return ok


@triton.jit
def put(ctx_ptr, peer, dst_ptr, offsets, values, mask):
    """Store `values` at `dst_ptr + offsets`, which lies in `peer`'s memory; `signal` afterwards."""
    tl.store(dst_ptr + offsets, values, mask=mask)


@triton.jit
def get(src_ptr, offsets, mask, other):
    """Load from a region after `wait`; `other` where masked off."""
    return tl.load(src_ptr + offsets, mask=mask, other=other)
