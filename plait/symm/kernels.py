"""Kernels of the protocol itself: the prologue, the stand-alone finish and the barrier."""

import triton
import triton.language as tl

from plait.backends.nvidia.intrinsics import globaltimer, grid_launch_dependents, nanosleep
from plait.symm.lang.patterns import barrier, begin, finish
from plait.symm.lang.words import get_epoch


@triton.jit(do_not_specialize=["num_arrivals", "delay_ns"])
def _prologue_kernel(
    ctx_ptr,
    num_arrivals,
    delay_ns,
    OP: tl.constexpr,
    HAS_DELAY: tl.constexpr,
    LEADS: tl.constexpr = False,
):
    """One block: wait until the peers have consumed this region, then advance its epoch.

    LEADS: the next kernel is launched early and waits for this one before it looks at the region.
    """
    if LEADS:
        grid_launch_dependents()
    if HAS_DELAY:
        start = globaltimer()
        while globaltimer() - start < delay_ns:
            nanosleep()
    begin(ctx_ptr, num_arrivals, OP)


@triton.jit
def _finish_kernel(ctx_ptr):
    """One block: tell the peers that this region is consumed, after the stream's earlier work."""
    finish(ctx_ptr, get_epoch(ctx_ptr))


@triton.jit
def _barrier_kernel(ctx_ptr, OP: tl.constexpr):
    """One block: meet all peers."""
    barrier(ctx_ptr, OP)
