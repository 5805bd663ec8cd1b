"""Inline assembly of NVIDIA GPUs, each with the string by which the interpreter knows it."""

import triton
import triton.language as tl

FENCE_PROXY_ASYNC = "fence.proxy.async; mov.u32 $0, 0;"
GLOBALTIMER = "mov.u64 $0, %globaltimer;"
NANOSLEEP = "nanosleep.u32 100; mov.u32 $0, 0;"

_FENCE_PROXY_ASYNC = tl.constexpr(FENCE_PROXY_ASYNC)
_GLOBALTIMER = tl.constexpr(GLOBALTIMER)
_NANOSLEEP = tl.constexpr(NANOSLEEP)


@triton.jit
def fence_proxy_async():
    """Order the CTA's generic accesses with its TMA (async proxy) accesses, both ways."""
    tl.inline_asm_elementwise(_FENCE_PROXY_ASYNC, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def globaltimer():
    """Nanoseconds of a clock that all SMs share."""
    return tl.inline_asm_elementwise(_GLOBALTIMER, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def nanosleep():
    """Yield the issue slots for about 100 ns."""
    tl.inline_asm_elementwise(_NANOSLEEP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
