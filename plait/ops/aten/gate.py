"""Which keys are on, for the calling thread and for the autograd work that it starts.

`everywhere` holds for all threads. A `use()` block's choice lies in the thread state that PyTorch
itself hands to backward threads; context variables and thread locals are lost there. Reading that
state costs 0.3 us, so it is read only while some thread has a block open.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch

_SLOT = "plait.aten.selection"
_stash, _fetch = torch._C._stash_obj_in_tls, torch._C._get_obj_in_tls
_present, _drop = torch._C._is_key_in_tls, torch._C._remove_obj_from_tls


class State:
    """One object, read by every overridden call. `open_blocks` counts threads' open blocks."""

    __slots__ = ("everywhere", "open_blocks")

    def __init__(self) -> None:
        self.everywhere: frozenset[str] = frozenset()
        self.open_blocks = 0


STATE = State()
_lock = threading.Lock()


class _Running(threading.local):
    """Set while a kernel of plait runs in this thread: what it calls of ATen is ATen's."""

    inside = False


RUNNING = _Running()


def selected() -> frozenset[str]:
    """The keys that are on in this thread."""
    if STATE.open_blocks and _present(_SLOT):
        return _fetch(_SLOT)
    return STATE.everywhere


@lru_cache(maxsize=256)  # sets of hundreds of keys: uniting them anew costs more than the block
def _combine(base: frozenset[str], on: frozenset[str], off: frozenset[str]) -> frozenset[str]:
    return (base | on) - off


def turn(on: frozenset[str], off: frozenset[str]) -> None:
    """Change what is on in threads without an open block."""
    with _lock:
        STATE.everywhere = _combine(STATE.everywhere, on, off)


class Block:
    """`with Block(on, off)`: this thread's selection plus `on`, without `off`; then as before.

    An object belongs to one thread, which may enter it again, also within itself.
    """

    __slots__ = ("_before", "_off", "_on")

    def __init__(self, on: frozenset[str], off: frozenset[str]) -> None:
        self._on = on
        self._off = off
        self._before: list[Any] = []

    def __enter__(self) -> Block:
        before = _fetch(_SLOT) if STATE.open_blocks and _present(_SLOT) else None
        base = STATE.everywhere if before is None else before
        # Counted before it is visible: a call that sees the block must look for its selection.
        with _lock:
            STATE.open_blocks += 1
        _stash(_SLOT, _combine(base, self._on, self._off))
        self._before.append(before)
        return self

    def __exit__(self, *raised: object) -> None:
        before = self._before.pop()
        if before is None:
            _drop(_SLOT)
        else:
            _stash(_SLOT, before)
        with _lock:
            STATE.open_blocks -= 1


__all__ = ["RUNNING", "STATE", "Block", "selected", "turn"]
