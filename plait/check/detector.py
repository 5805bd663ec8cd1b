"""Happens-before race detector for overlapped operators on the virtual device.

Every access is stamped with the vector clock of who made it (`clocks.py`) and compared with what
the shadow memory holds (`shadow.py`). A race is reported when nothing orders two accesses, even if
this schedule happened to give the right values. What orders: streams, events, host
synchronisation, a release read by an acquire of sufficient scope, CTA barriers between the thread
that executes an atomic and the others, and the proxy fence between plain and TMA accesses.
Threads of one block are not checked against each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.check.clocks import COPY_ENGINE, BlockClocks, ThreadIds, VectorClock, WordClock
from plait.check.intervals import IntervalMap
from plait.check.report import UNKNOWN_SITE, Access, Race, RaceKind, raise_if_races
from plait.check.shadow import Conflict, ConflictKind, Shadow
from plait.check.statistics import Counters, RankCounts
from plait.symm.virtual.observe import HOST_SITE, Block, Item, Observer, Site

HISTORY_LENGTH = 16_384  # accesses whose source line is remembered, per thread id (128 KiB)
_MAX_EVENTS = 4_096  # recorded events kept; each is waited for soon after it was recorded
_STATE = "race_detector"  # this observer's key in Item.data and Block.data

_KINDS: dict[ConflictKind, RaceKind] = {
    "write-write": "write-write race",
    "write-read": "write-read race (stale read possible)",
    "read-write": "read-write race (overwritten while needed)",
}


@dataclass
class _ItemState:
    start: VectorClock  # what is ordered before the item
    end: VectorClock  # the same and what the item did: blocks join it when they end


@dataclass
class _BlockState:
    clocks: BlockClocks
    tid: int
    async_tid: int = 0  # made at the first TMA access


class _History:
    """The accesses of each thread id by clock, the latest `HISTORY_LENGTH` of each."""

    def __init__(self) -> None:
        self._rings: dict[int, list[Access | None]] = {}
        self._latest: dict[int, int] = {}
        self._interned: dict[tuple[Any, ...], Access] = {}

    def record(self, tid: int, clock: int, key: tuple[Any, ...]) -> Access:
        access = self._interned.get(key)
        if access is None:
            if len(self._interned) >= HISTORY_LENGTH:  # names that differ in every round
                self._interned.clear()
            access = self._interned[key] = Access(*key)
        ring = self._rings.setdefault(tid, [])
        at = (clock - 1) % HISTORY_LENGTH
        if at >= len(ring):
            ring.extend([None] * (at + 1 - len(ring)))
        ring[at] = access
        self._latest[tid] = clock
        return access

    def find(self, tid: int, clock: int) -> Access | None:
        if self._latest[tid] - clock >= HISTORY_LENGTH:
            return None
        return self._rings[tid][(clock - 1) % HISTORY_LENGTH]


class RaceDetector(Observer):
    """Listens to a virtual world and collects races.

    `races` are deduplicated by kind, region name and the source lines of both sides, and survive
    from world to world until `clear()`; clocks and shadow memory begin anew with every world.
    """

    def __init__(self) -> None:
        self._counters = Counters()
        self._found: dict[tuple[str, str, str, str], Race] = {}
        self._reset()

    def _reset(self) -> None:
        self._ids = ThreadIds()
        self._history = _History()
        self._hosts: dict[int, VectorClock] = {}
        self._streams: dict[tuple[int, str], VectorClock] = {}
        self._events: OrderedDict[tuple[int, int], VectorClock] = OrderedDict()
        self._words: dict[int, WordClock] = {}
        self._regions: IntervalMap[Shadow] = IntervalMap()
        self._signal_words: IntervalMap[int] = IntervalMap()

    # --- results
    @property
    def races(self) -> list[Race]:
        """The races found so far, in the order of their discovery."""
        return list(self._found.values())

    @property
    def statistics(self) -> dict[int, RankCounts]:
        """Accesses, signals, polls, waits and bytes of every rank."""
        return dict(self._counters.ranks)

    @property
    def num_thread_ids(self) -> int:
        """Thread ids in use: bounded by streams and grids, not by the number of calls."""
        return len(self._ids)

    def raise_if_races(self) -> None:
        """Raise `plait.errors.RaceError` if a race was found."""
        raise_if_races(self.races)

    def clear(self) -> None:
        """Forget the races and statistics."""
        self._found.clear()
        self._counters.ranks.clear()

    # --- memory
    def world_started(self, world: Any) -> None:
        """Begin anew; the races found before stay."""
        self._counters.world_started(world)
        self._reset()

    def region_added(self, name: str, rank: int, address: int, nbytes: int) -> None:
        """Check accesses of this memory from now on."""
        self._counters.region_added(name, rank, address, nbytes)
        self._regions.add(address, nbytes, Shadow(name, rank, nbytes))

    def region_removed(self, address: int) -> None:
        """Drop the shadow memory: the address may be handed out again."""
        self._counters.region_removed(address)
        interval = self._regions.remove(address)
        if interval is not None:
            self._forget_words(interval.start, interval.end)

    def signal_words_added(self, rank: int, address: int, nbytes: int) -> None:
        """These words order accesses; plain loads and own stores of them are not checked."""
        self._signal_words.add(address, nbytes, rank)

    def signal_words_removed(self, address: int) -> None:
        """Forget what was published to these words."""
        interval = self._signal_words.remove(address)
        if interval is not None:
            self._forget_words(interval.start, interval.end)

    def _forget_words(self, start: int, end: int) -> None:
        for address in [a for a in self._words if start <= a < end]:
            del self._words[address]

    # --- host and streams
    def enqueued(self, item: Item) -> None:
        """The item knows what the host knew when it enqueued it."""
        start = self._host(item.rank).copy()
        item.data[_STATE] = _ItemState(start, start)

    def item_started(self, item: Item) -> None:
        """It also knows what its stream did before."""
        self._counters.item_started(item)
        state: _ItemState = item.data[_STATE]
        state.start.join(self._stream(item.rank, item.stream))
        state.end = state.start.copy()

    def item_finished(self, item: Item) -> None:
        """What the item did is ordered before the rest of its stream."""
        state: _ItemState = item.data.pop(_STATE)
        self._stream(item.rank, item.stream).join(state.end)

    def event_recorded(self, rank: int, stream: str, event: int) -> None:
        """Keep what the stream has done so far."""
        self._events[rank, event] = self._stream(rank, stream).copy()
        self._events.move_to_end((rank, event))
        if len(self._events) > _MAX_EVENTS:
            self._events.popitem(last=False)

    def event_waited(self, rank: int, stream: str, event: int) -> None:
        """The stream knows what was kept."""
        recorded = self._events.get((rank, event))
        if recorded is not None:  # waiting for an event that was never recorded orders nothing
            self._stream(rank, stream).join(recorded)

    def host_synchronized(self, rank: int, stream: str) -> None:
        """The host knows what the stream did."""
        self._host(rank).join(self._stream(rank, stream))

    def hosts_met(self, ranks: tuple[int, ...]) -> None:
        """Each host knows what all of them knew."""
        joined = VectorClock()
        for rank in ranks:
            joined.join(self._host(rank))
        for rank in ranks:
            self._host(rank).join(joined)

    def _host(self, rank: int) -> VectorClock:
        return self._hosts.setdefault(rank, VectorClock())

    def _stream(self, rank: int, stream: str) -> VectorClock:
        return self._streams.setdefault((rank, stream), VectorClock())

    # --- blocks
    def block_started(self, block: Block) -> None:
        """All three clocks of a block begin at its launch's start."""
        self._counters.block_started(block)
        item = block.item
        start = item.data[_STATE].start
        block.data[_STATE] = _BlockState(
            BlockClocks(start), self._ids.get(item.rank, item.stream, block.index)
        )

    def block_finished(self, block: Block) -> None:
        """Keep what the block did for the end of its launch."""
        block.data.pop(_STATE).clocks.merge_into(block.item.data[_STATE].end)

    def block_asleep(self, block: Block, address: int) -> None:
        """Only counted."""
        self._counters.block_asleep(block, address)

    def cta_barrier(self, block: Block) -> None:
        """Thread 0 learns of the other threads' accesses, and they of what it acquired."""
        block.data[_STATE].clocks.barrier()

    def proxy_fence(self, block: Block) -> None:
        """Plain and TMA accesses of the block are ordered."""
        block.data[_STATE].clocks.proxy_fence()

    def atomic(
        self,
        block: Block,
        address: int,
        *,
        acquire: bool,
        release: bool,
        poll: bool,
        scope: str,
        site: Site,
        vector: bool = False,
    ) -> None:
        """Release: publish what the executing thread knows. Acquire: learn.

        The result of a scalar acquire reaches all threads through shared memory, which takes a CTA
        barrier. The lanes of a vector's stay with their threads until the kernel has a barrier.
        """
        assert scope in ("cta", "gpu", "sys"), f"unknown scope {scope!r}"
        self._counters.atomic(
            block, address, acquire=acquire, release=release, poll=poll, scope=scope, site=site
        )
        clocks: BlockClocks = block.data[_STATE].clocks
        if release and not poll:
            # One thread executes the atomic: without a barrier before it, the other threads'
            # stores are in `cta` only and stay unpublished.
            known = clocks.last_barrier if vector else clocks.lead
            self._word(address).publish(known, scope, block.rank)
        if acquire and scope != "cta":
            if address in self._words:
                learns = clocks.lanes if vector else clocks.lead
                self._words[address].acquire_into(learns, scope, block.rank)
            if not vector:
                clocks.barrier()

    def _word(self, address: int) -> WordClock:
        return self._words.setdefault(address, WordClock())

    # --- accesses
    def access(
        self,
        block: Block,
        addresses: np.ndarray,
        itemsize: int,
        *,
        write: bool,
        async_proxy: bool,
        site: Site,
    ) -> None:
        """Plain accesses use the CTA's clock, descriptors the async proxy's."""
        if not addresses.size:
            return
        self._counters.access(
            block, addresses, itemsize, write=write, async_proxy=async_proxy, site=site
        )
        state: _BlockState = block.data[_STATE]
        item = block.item
        tid, clock = state.tid, state.clocks.cta
        if async_proxy:
            if not state.async_tid:
                state.async_tid = self._ids.get(item.rank, item.stream, block.index, "async")
            tid, clock = state.async_tid, state.clocks.async_proxy
        key = (item.rank, block.index, item.name, site, write, async_proxy)
        self._touch(addresses, itemsize, tid, clock, key, write)

    def copied(self, item: Item, dst: np.ndarray, src: np.ndarray, itemsize: int) -> None:
        """The copy engine reads `src`, then writes `dst`."""
        self._counters.copied(item, dst, src, itemsize)
        tid = self._ids.get(item.rank, item.stream, COPY_ENGINE)
        for addresses, write in ((src, False), (dst, True)):
            if addresses.size:
                name = f"{item.operator} {item.name}"
                key = (item.rank, None, name, HOST_SITE, write, False)
                self._touch(addresses, itemsize, tid, item.data[_STATE].end, key, write)

    def signalled(self, item: Item, address: int) -> None:
        """All that came before in the stream is published to the word."""
        self._counters.signalled(item, address)
        self._word(address).publish(item.data[_STATE].end, "sys", None)

    def _touch(
        self,
        addresses: np.ndarray,
        itemsize: int,
        tid: int,
        clock: VectorClock,
        key: tuple[Any, ...],
        write: bool,
    ) -> None:
        addresses = addresses.reshape(-1)
        signal_parts: list[Any] = []
        if len(self._signal_words):
            signal_parts, addresses = self._signal_words.split(addresses)
        region_parts = self._regions.split(addresses)[0] if addresses.size else []
        if not signal_parts and not region_parts:
            return
        access = self._history.record(tid, clock.tick(tid), key)
        for words, part in signal_parts:
            if write and words.value != access.rank and access.block is not None:
                offset = int(part[0]) - words.start
                kind: RaceKind = "plain store to a peer's signal word"
                self._add(Race(kind, "signal words", words.value, offset, None, access))
        for region, part in region_parts:
            shadow = region.value
            offsets = (part - np.uint64(region.start)).view(np.int64)
            touch = shadow.write if write else shadow.read
            for conflict in touch(offsets, itemsize, tid, clock):
                self._report(shadow, conflict, access)

    # --- reports
    def _report(self, shadow: Shadow, conflict: Conflict, second: Access) -> None:
        first = self._history.find(conflict.tid, conflict.clock)
        if first is None:
            key = self._ids.key(conflict.tid)
            block = None if key.block == COPY_ENGINE else key.block
            wrote = conflict.kind != "read-write"
            name = f"a command of stream {key.stream}"
            first = Access(key.rank, block, name, UNKNOWN_SITE, wrote, key.proxy == "async")
        kind = _KINDS[conflict.kind]
        self._add(Race(kind, shadow.name, shadow.rank, conflict.offset_bytes, first, second))

    def _add(self, race: Race) -> None:
        self._found.setdefault(race.key, race)


__all__ = ["HISTORY_LENGTH", "RaceDetector"]
