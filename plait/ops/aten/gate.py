"""Which keys are on, for the calling thread and for the autograd work that it starts.

`everywhere` holds for all threads. A `use()` block's choice lies in the thread state that PyTorch
itself hands to backward threads; context variables and thread locals are lost there. Reading that
state costs 0.3 us, so it is read only while some thread has a block open.

A key that is to be plait's where plait is faster stands there behind `IF_FASTER`; a key that stands
there plainly, too, is plait's wherever plait supports the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from plait.ops.aten import thread_state

IF_FASTER = "?"
_SLOT = "plait.aten.selection"


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
    """What is on in this thread: keys, plain or behind `IF_FASTER`."""
    found = thread_state.get(_SLOT) if STATE.open_blocks else None
    return STATE.everywhere if found is None else found


@lru_cache(maxsize=256)  # sets of hundreds of keys: uniting them anew costs more than the block
def _combine(base: frozenset[str], on: frozenset[str], off: frozenset[str]) -> frozenset[str]:
    return (base | on) - off


def if_faster(keys: Iterable[str]) -> frozenset[str]:
    """The keys as they stand for default mode."""
    return frozenset(IF_FASTER + key for key in keys)


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
        before = thread_state.get(_SLOT) if STATE.open_blocks else None
        base = STATE.everywhere if before is None else before
        # Counted before it is visible: a call that sees the block must look for its selection.
        with _lock:
            STATE.open_blocks += 1
        thread_state.put(_SLOT, _combine(base, self._on, self._off))
        self._before.append(before)
        return self

    def __exit__(self, *raised: object) -> None:
        thread_state.put(_SLOT, self._before.pop())
        with _lock:
            STATE.open_blocks -= 1


__all__ = ["IF_FASTER", "RUNNING", "STATE", "Block", "if_faster", "selected", "turn"]
