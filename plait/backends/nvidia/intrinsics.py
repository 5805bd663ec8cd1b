"""Inline assembly of NVIDIA GPUs, each with the string by which the interpreter knows it."""

import triton
import triton.language as tl

FENCE_PROXY_ASYNC = "fence.proxy.async; mov.u32 $0, 0;"
GLOBALTIMER = "mov.u64 $0, %globaltimer;"
SMID = "mov.u32 $0, %smid;"
NANOSLEEP = "nanosleep.u32 100; mov.u32 $0, 0;"
GRID_WAIT = "griddepcontrol.wait; mov.u32 $0, 0;"
GRID_LAUNCH_DEPENDENTS = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"

_FENCE_PROXY_ASYNC = tl.constexpr(FENCE_PROXY_ASYNC)
_GLOBALTIMER = tl.constexpr(GLOBALTIMER)
_SMID = tl.constexpr(SMID)
_NANOSLEEP = tl.constexpr(NANOSLEEP)
_GRID_WAIT = tl.constexpr(GRID_WAIT)
_GRID_LAUNCH_DEPENDENTS = tl.constexpr(GRID_LAUNCH_DEPENDENTS)


@triton.jit
def fence_proxy_async():
    """Order the CTA's generic accesses with its TMA (async proxy) accesses, both ways."""
    tl.inline_asm_elementwise(_FENCE_PROXY_ASYNC, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def globaltimer():
    """Nanoseconds of a clock that all SMs share."""
    return tl.inline_asm_elementwise(_GLOBALTIMER, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def smid():
    """Number of the SM that this block runs on (int32)."""
    return tl.inline_asm_elementwise(_SMID, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def nanosleep():
    """Yield the issue slots for about 100 ns."""
    tl.inline_asm_elementwise(_NANOSLEEP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_wait():
    """In a kernel launched early (`Launch.early`): wait for the kernel before it, and its stores.

    sm_90 and up. Without an early launch it does nothing.
    """
    tl.inline_asm_elementwise(_GRID_WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_launch_dependents():
    """Allow the next kernel, if it is launched early, to take free SM room from now on."""
    tl.inline_asm_elementwise(
        _GRID_LAUNCH_DEPENDENTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
