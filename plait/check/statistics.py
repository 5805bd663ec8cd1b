"""Counters of what the ranks did: launches, waits, polls, atomics, bytes between ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.check.intervals import IntervalMap
from plait.symm.virtual.observe import Block, Item, Observer, Site


@dataclass
class RankCounts:
    """Counts of one rank. Bytes to and from peers include kernels' plain stores and loads."""

    launches: int = 0
    blocks: int = 0
    accesses: int = 0
    atomics: int = 0  # polls left out
    polls: int = 0
    waits: int = 0  # times a block went to sleep on a word
    signals: int = 0  # releases by kernels and by the copy engine
    copies: int = 0
    copied_bytes: int = 0
    bytes_to_peers: int = 0
    bytes_from_peers: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed between this rank and its peers because of this rank's commands."""
        return self.bytes_to_peers + self.bytes_from_peers

    def __add__(self, other: RankCounts) -> RankCounts:
        names = [f.name for f in fields(self)]
        return RankCounts(**{n: getattr(self, n) + getattr(other, n) for n in names})


class Counters(Observer):
    """Counts events per rank; `ranks[r]` holds rank r's counts, `total()` their sum."""

    def __init__(self) -> None:
        self.ranks: defaultdict[int, RankCounts] = defaultdict(RankCounts)
        self._owners: IntervalMap[int] = IntervalMap()

    def total(self) -> RankCounts:
        """The sum over all ranks."""
        return sum(self.ranks.values(), RankCounts())

    # --- memory
    def world_started(self, world: Any) -> None:
        """A new world has no regions yet; counts go on."""
        self._owners = IntervalMap()

    def region_added(self, name: str, rank: int, address: int, nbytes: int) -> None:
        """Remember whose memory it is."""
        self._owners.add(address, nbytes, rank)

    def region_removed(self, address: int) -> None:
        """Forget whose memory it was."""
        self._owners.remove(address)

    # --- commands
    def item_started(self, item: Item) -> None:
        """Count launches."""
        if item.kind == "launch":
            self.ranks[item.rank].launches += 1

    def copied(self, item: Item, dst: np.ndarray, src: np.ndarray, itemsize: int) -> None:
        """Count copies and their bytes."""
        if item.kind != "copy":
            return
        counts, nbytes = self.ranks[item.rank], dst.size * itemsize
        counts.copies += 1
        counts.copied_bytes += nbytes
        to, origin = self._owner(dst, item.rank), self._owner(src, item.rank)
        if to != item.rank:
            counts.bytes_to_peers += nbytes
        elif origin != item.rank:
            counts.bytes_from_peers += nbytes
        elif item.peer not in (None, item.rank):  # the peer's memory is not a registered region
            counts.bytes_to_peers += nbytes

    def signalled(self, item: Item, address: int) -> None:
        """Count the copy engine's signals."""
        self.ranks[item.rank].signals += 1

    # --- inside kernels
    def block_started(self, block: Block) -> None:
        """Count blocks."""
        self.ranks[block.rank].blocks += 1

    def block_asleep(self, block: Block, address: int) -> None:
        """Count waits."""
        self.ranks[block.rank].waits += 1

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
        """Count accesses, and bytes that cross to or from a peer's region."""
        counts = self.ranks[block.rank]
        counts.accesses += 1
        if self._owner(addresses, block.rank) != block.rank:
            if write:
                counts.bytes_to_peers += addresses.size * itemsize
            else:
                counts.bytes_from_peers += addresses.size * itemsize

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
        """Count polls, other atomics, and releases as signals."""
        counts = self.ranks[block.rank]
        if poll:
            counts.polls += 1
            return
        counts.atomics += 1
        counts.signals += release

    def _owner(self, addresses: np.ndarray, default: int) -> int:
        """The rank whose region holds the first address: one access stays in one region."""
        if not addresses.size:
            return default
        interval = self._owners.find(int(addresses.flat[0]))
        return default if interval is None else interval.value


__all__ = ["Counters", "RankCounts"]
