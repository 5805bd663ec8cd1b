"""Kernels that stand for emulated peers: the pacer, the wait of a call without computation, and
background traffic.

Legend: a table is int64 [4, num_entries]: address of the word that says a piece is on its way (0:
at once), address of the word to set, the piece's time on the link, and room for the pacer's own
use. Times on the link are in 1/256 ns, counted from the start of the kernel.
"""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import globaltimer, nanosleep
from plait.symm.lang.patterns import finish
from plait.symm.lang.words import (
    ABORT,
    CONSUMED,
    CTX_DEADLINE_NS,
    get_epoch,
    get_rank,
    get_world_size,
    group_word_ptr,
    word_ptr,
)

_FRACTION = tl.constexpr(256)
_BEFORE_ALL = tl.constexpr(-(1 << 60))


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _book(
    table_ptr, num_entries, booked, epoch, now, link_free, latency, BLOCK: tl.constexpr
):  # fmt: skip
    """Book the link for the entries from `booked` on that are on their way, in order.

    Writes when each is to be signalled; returns how many were booked and when the link is free.
    """
    offs = tl.arange(0, BLOCK)
    index = booked + offs
    inside = index < num_entries
    trigger = tl.load(table_ptr + index, mask=inside, other=0)
    waits = inside & (trigger != 0)
    seen = tl.load(trigger.to(tl.pointer_type(tl.int32)), mask=waits, other=0, volatile=True)
    ready = inside & ((trigger == 0) | (seen - epoch >= 0))
    count = tl.min(tl.where(ready, BLOCK, offs), 0)  # what comes before the first that is not
    taken = offs < count
    cost = tl.load(table_ptr + 2 * num_entries + index, mask=taken, other=0)
    total = tl.cumsum(cost, 0)
    # end[i] = max(link_free, ready[j] - cost before j, for all j <= i) + cost up to i
    since = tl.where(waits, now, 0)
    start = tl.associative_scan(tl.where(taken, since - (total - cost), _BEFORE_ALL), 0, _later)
    end = tl.maximum(start, link_free) + total
    tl.store(table_ptr + 3 * num_entries + index, end + latency, mask=taken)
    link_free = tl.maximum(link_free, tl.max(tl.where(taken, end, 0), 0))
    return count, link_free


@triton.jit
def _send(table_ptr, num_entries, booked, sent, epoch, now, BLOCK: tl.constexpr):
    """Set the words of the booked entries whose time has come; returns how many.

    Relaxed: the pacer wrote nothing that a waiter reads, and a release would cost a round 1 us.
    Each thread reads the clock for itself, so an entry may be due while an earlier one is not yet:
    only those before the first that is not are sent, and counted.
    """
    offs = tl.arange(0, BLOCK)
    index = sent + offs
    mask = index < booked
    release = tl.load(table_ptr + 3 * num_entries + index, mask=mask, other=0, volatile=True)
    due = mask & (release <= now)
    count = tl.min(tl.where(due, BLOCK, offs), 0)
    taken = offs < count
    target = tl.load(table_ptr + num_entries + index, mask=taken, other=0)
    values = tl.zeros((BLOCK,), tl.int32) + epoch
    tl.atomic_xchg(
        target.to(tl.pointer_type(tl.int32)),
        values,
        mask=taken & (target != 0),
        sem="relaxed",
        scope="sys",
    )
    return count


@triton.jit(do_not_specialize=["num_entries", "latency"])
def _pacer_kernel(
    ctx_ptr, table_ptr, num_entries, latency, BLOCK: tl.constexpr, CONSUME: tl.constexpr
):  # fmt: skip
    """One block: set this rank's words for its peers, no sooner than a link would deliver.

    Entries pass in the order of the table; each is signalled at max(on its way, link free) + its
    time + latency. Booking runs ahead of signalling, so the latency is not time on the link. With
    CONSUME every peer says at the end that it has consumed the region. Gives up where a trigger
    does not come within the deadline of the group; whoever waits for the words then reports it.

    Example: two entries of 100 ns without trigger, latency 3000 ns: words are set at 3100 and 3200
    ns. With a trigger at 500 ns for the second: at 3100 and 3600.
    """
    rank = get_rank(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    deadline_ns = tl.load(ctx_ptr + CTX_DEADLINE_NS)
    abort_ptr = group_word_ptr(ctx_ptr, rank, ABORT)
    start = globaltimer()
    progress = start
    link_free = start - start
    booked = 0
    sent = 0
    alive = num_entries >= 0
    while (sent < num_entries) & alive:
        time = globaltimer()
        now = (time - start) * _FRACTION
        moved = 0
        if booked < num_entries:
            moved, link_free = _book(
                table_ptr, num_entries, booked, epoch, now, link_free, latency, BLOCK
            )
            booked += moved
            tl.debug_barrier()
        if sent < booked:
            num_sent = _send(table_ptr, num_entries, booked, sent, epoch, now, BLOCK)
            sent += num_sent
            moved += num_sent
        if moved > 0:
            progress = time
        else:
            nanosleep()
            waited_ns = time - progress
            alive = (waited_ns < deadline_ns) & (tl.load(abort_ptr, volatile=True) == 0)
    if CONSUME:
        if alive:
            offs = tl.arange(0, BLOCK)
            peers = (offs < get_world_size(ctx_ptr)) & (offs != rank)
            consumed_ptrs = word_ptr(ctx_ptr, rank, CONSUMED) + offs
            values = tl.zeros((BLOCK,), tl.int32) + epoch
            tl.atomic_xchg(consumed_ptrs, values, mask=peers, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["num_entries"])
def _await_kernel(ctx_ptr, table_ptr, num_entries, BLOCK: tl.constexpr):
    """One block: wait for every word that the table sets, then close the region."""
    epoch = get_epoch(ctx_ptr)
    deadline_ns = tl.load(ctx_ptr + CTX_DEADLINE_NS)
    abort_ptr = group_word_ptr(ctx_ptr, get_rank(ctx_ptr), ABORT)
    start = globaltimer()
    come = 0
    alive = num_entries >= 0
    while (come < num_entries) & alive:
        offs = tl.arange(0, BLOCK)
        mask = come + offs < num_entries
        word = tl.load(table_ptr + num_entries + come + offs, mask=mask, other=0)
        seen = tl.load(
            word.to(tl.pointer_type(tl.int32)), mask=mask & (word != 0), other=0, volatile=True
        )
        here = mask & ((word == 0) | (seen - epoch >= 0))
        count = tl.min(tl.where(here, BLOCK, offs), 0)
        come += count
        if count == 0:
            nanosleep()
            alive = (globaltimer() - start < deadline_ns) & (tl.load(abort_ptr, volatile=True) == 0)
    finish(ctx_ptr, epoch)


@triton.jit(do_not_specialize=["num_words", "round_time"])
def _traffic_kernel(dst_ptr, src_ptr, num_words, round_time, BLOCK: tl.constexpr):
    """Copy num_words x 4 bytes no faster than the link: each block moves BLOCK in `round_time`.

    Nobody waits for it, and few registers and no shared memory let it run beside a GEMM.
    """
    dst_ptr = dst_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    src_ptr = src_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    start = globaltimer()
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    due = round_time - round_time
    while begin < num_words:
        offs = begin + tl.arange(0, BLOCK)
        values = tl.load(src_ptr + offs, mask=offs < num_words)
        tl.store(dst_ptr + offs, values, mask=offs < num_words)
        begin += step
        due += round_time
        while (globaltimer() - start) * _FRACTION < due:
            nanosleep()
