"""Device functions for kernels that talk to peers, as named patterns.

Every pattern holds on Triton 3.6 and later; a test reads the PTX that each emits for sm_90.

**Put, then signal** (`signal`). Stores of all threads of the block come before the word. Triton 3.6
to 3.8 put no CTA barrier before a scalar release atomic, so `signal` issues one itself; the release
is at system scope, for peers on other GPUs.

**Wait, then get** (`wait`). An acquire poll of one word, with a deadline and the group's abort
flag; loads of all threads after it see what came before the signal. Returns False when the wait
was given up: then write NaN and go on, never trap.

**Fence before a descriptor load** (`fence_proxy_async`). TMA reads through another proxy than plain
stores write; after a wait and before `desc.load` of what a peer wrote, and before telling a peer
that descriptor loads are done.

**Begin and finish** (`begin`, `finish`). `begin` (one block, before the call's other work) advances
the region's epoch once all peers have consumed the previous one. `finish` (every block of the
call's last kernel) lets the last block tell all peers that this region is consumed.

**Barrier** (`barrier`): signal every peer, wait for every peer; one block.

**Graphs.** Epochs live in device memory and only grow: a replay advances them as an eager call
does, nothing is zeroed, no host value is baked in.

**Kernels of your own** import names from here, get a region's context as `ctx_ptr` through
`Group.launch`, read the call's epoch with `get_epoch` and use the words from READY on.
examples/user_kernel.py is one. The functions live in `patterns.py` and the addresses in `words.py`;
both load at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PATTERNS = (
    "barrier", "begin", "finish", "get", "put", "signal", "signal_all", "wait", "wait_all",
)  # fmt: skip
_WORDS = ("READY", "USER", "data_ptr", "get_epoch", "get_rank", "get_world_size", "word_ptr")
_MODULES = {
    **dict.fromkeys(_PATTERNS, "plait.symm.lang.patterns"),
    **dict.fromkeys(_WORDS, "plait.symm.lang.words"),
    "fence_proxy_async": "plait.backends.nvidia.intrinsics",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'plait.symm.lang' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


__all__ = [  # noqa: F822 - resolved by __getattr__
    "READY", "USER", "barrier", "begin", "data_ptr", "fence_proxy_async", "finish", "get",
    "get_epoch", "get_rank", "get_world_size", "put", "signal", "signal_all", "wait",
    "wait_all", "word_ptr",
]  # fmt: skip
