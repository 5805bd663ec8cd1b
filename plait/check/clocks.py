"""Vector clocks of the race detector: who knows which accesses of whom.

A thread id names everything that runs one after the other: the plain accesses of block i of one
stream's kernels, the TMA accesses of the same block, or the copy engine of one stream. Launches of
one stream are ordered by the stream, so ids are shared by all launches and their number is bounded
by the largest grid, not by the number of rounds. Component t of a clock is the number of accesses
of thread id t that are ordered before what comes next. Id 0 belongs to nobody and stays 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

COPY_ENGINE = -1  # block index of the id that stands for a stream's copy engine
_MIN_CAPACITY = 16

Proxy = Literal["generic", "async"]


class ThreadKey(NamedTuple):
    """What one thread id stands for."""

    rank: int
    stream: str
    block: int  # COPY_ENGINE for the copy engine
    proxy: Proxy


class ThreadIds:
    """Small integers for thread keys, from 1 on; the same key always gets the same id."""

    def __init__(self) -> None:
        self._ids: dict[ThreadKey, int] = {}
        self._keys: list[ThreadKey | None] = [None]

    def get(self, rank: int, stream: str, block: int, proxy: Proxy = "generic") -> int:
        """The id of the key, made at its first use."""
        key = ThreadKey(rank, stream, block, proxy)
        tid = self._ids.get(key)
        if tid is None:
            tid = self._ids[key] = len(self._keys)
            self._keys.append(key)
        return tid

    def key(self, tid: int) -> ThreadKey:
        """What `tid` stands for."""
        key = self._keys[tid]
        assert key is not None, f"thread id {tid} belongs to nobody"
        return key

    def __len__(self) -> int:
        return len(self._ids)


class VectorClock:
    """int32 components indexed by thread id; missing components are 0; components only grow."""

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray | None = None) -> None:
        self._values = np.zeros(_MIN_CAPACITY, np.int32) if values is None else values

    def dense(self, size: int) -> np.ndarray:
        """The components 0 .. size-1 (the clock's own memory: read it, do not keep it)."""
        if size > self._values.size:
            self._grow(size)
        return self._values[:size]

    def tick(self, tid: int) -> int:
        """Add one to component `tid` and return it."""
        if tid >= self._values.size:
            self._grow(tid + 1)
        self._values[tid] += 1
        return int(self._values[tid])

    def join(self, other: VectorClock) -> None:
        """Learn all that `other` knows."""
        theirs = other._values
        if theirs.size > self._values.size:
            self._grow(theirs.size)
        mine = self._values[: theirs.size]
        np.maximum(mine, theirs, out=mine)

    def copy(self) -> VectorClock:
        """An independent clock of equal content."""
        return VectorClock(self._values.copy())

    def __getitem__(self, tid: int) -> int:
        return int(self._values[tid]) if tid < self._values.size else 0

    def _grow(self, size: int) -> None:
        values = np.zeros(max(size, 2 * self._values.size), np.int32)
        values[: self._values.size] = self._values
        self._values = values


class BlockClocks:
    """The clocks of one block.

    `lead` is what thread 0 knows, who alone executes scalar atomics; `cta` is what the block's
    threads know and did; `async_proxy` is what TMA operations of the block know and did. Which
    thread executes a lane of a vector atomic is not known: it surely knows what all threads knew
    at the `last_barrier`, and the others learn what it acquired (`lanes`) at the next one.
    """

    __slots__ = ("async_proxy", "cta", "lanes", "last_barrier", "lead")

    def __init__(self, start: VectorClock) -> None:
        self.lead = start.copy()
        self.cta = start.copy()
        self.async_proxy = start.copy()
        self.last_barrier = start.copy()
        self.lanes = start.copy()

    def barrier(self) -> None:
        """A CTA barrier: all threads know the same."""
        self.lead.join(self.cta)
        self.lead.join(self.lanes)
        self.cta.join(self.lead)
        self.last_barrier.join(self.lead)

    def proxy_fence(self) -> None:
        """`fence.proxy.async`: plain and TMA accesses are ordered with each other, both ways.

        Thread 0 learns of it at the next barrier only.
        """
        self.async_proxy.join(self.cta)
        self.cta.join(self.async_proxy)

    def merge_into(self, clock: VectorClock) -> None:
        """At the end of the block: all it knew and did becomes part of `clock`."""
        for mine in (self.lead, self.cta, self.async_proxy, self.lanes):
            clock.join(mine)


class WordClock:
    """What the releases to one signal word published, by the scope that reaches a reader."""

    __slots__ = ("_by_rank", "_sys")

    def __init__(self) -> None:
        self._sys = VectorClock()
        self._by_rank: dict[int, VectorClock] = {}

    def publish(self, clock: VectorClock, scope: str, rank: int | None) -> None:
        """A release by a block of `rank`; `rank=None` is a copy engine (system scope)."""
        if scope == "cta":
            return
        if scope == "sys":
            self._sys.join(clock)
        if rank is not None:
            self._by_rank.setdefault(rank, VectorClock()).join(clock)

    def acquire_into(self, clock: VectorClock, scope: str, rank: int) -> None:
        """An acquire by a block of `rank`.

        A release and an acquire synchronise if the scope of each includes the other: system scope
        on both sides between ranks, system or GPU scope within a rank.
        """
        if scope == "cta":
            return
        if scope == "sys":
            clock.join(self._sys)
        own = self._by_rank.get(rank)
        if own is not None:
            clock.join(own)


__all__ = ["COPY_ENGINE", "BlockClocks", "ThreadIds", "ThreadKey", "VectorClock", "WordClock"]
