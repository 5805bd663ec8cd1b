"""What the virtual device tells whoever listens: the protocol checker, the timeline, the counters.

Every method has an empty body, so an observer overrides what it needs. `Item` is one command in a
virtual stream, `Block` one block of a kernel. Times come from `World.now_ns`, the virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from plait.backends.cpu.site import Site

ItemKind = Literal["launch", "copy", "signal", "call"]


HOST_SITE = Site("copy engine", 0)


@dataclass(eq=False)
class Item:
    """One command of one virtual stream."""

    rank: int
    stream: str
    kind: ItemKind
    operator: str
    name: str
    index: int  # position in its stream, counted from 0 for the life of the world
    num_blocks: int = 0
    nbytes: int = 0
    peer: int | None = None
    data: dict[str, Any] = field(default_factory=dict)  # observers keep their own state here


@dataclass(eq=False)
class Block:
    """One block (program instance) of a kernel launch."""

    item: Item
    index: int
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.item.rank

    def __str__(self) -> str:
        return f"rank {self.rank} {self.item.name}[{self.index}]"


class Observer:
    """Base class: override what you need. Called in the scheduler's thread, one event at a time."""

    def world_started(self, world: Any) -> None: ...
    def world_ended(self, world: Any) -> None: ...

    # --- memory whose accesses are checked
    def region_added(self, name: str, rank: int, address: int, nbytes: int) -> None: ...
    def region_removed(self, address: int) -> None: ...
    def signal_words_added(self, rank: int, address: int, nbytes: int) -> None: ...
    def signal_words_removed(self, address: int) -> None: ...

    # --- host and streams
    def enqueued(self, item: Item) -> None: ...
    def item_started(self, item: Item) -> None: ...
    def item_finished(self, item: Item) -> None: ...
    def event_recorded(self, rank: int, stream: str, event: int) -> None: ...
    def event_waited(self, rank: int, stream: str, event: int) -> None: ...
    def host_synchronized(self, rank: int, stream: str) -> None: ...
    def hosts_met(self, ranks: tuple[int, ...]) -> None: ...

    # --- inside kernels
    def block_started(self, block: Block) -> None: ...
    def block_finished(self, block: Block) -> None: ...
    def block_asleep(self, block: Block, address: int) -> None: ...
    def block_woken(self, block: Block) -> None: ...

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
        """Loads and stores (not atomics) of the addresses (uint64, masked-off lanes left out)."""

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
        """An atomic on one word that took effect; `poll` says that it added 0, so it only read.

        `vector`: one lane of an atomic of several words, which any thread may execute. A scalar
        atomic is thread 0's.
        """

    def cta_barrier(self, block: Block) -> None: ...
    def proxy_fence(self, block: Block) -> None: ...

    # --- copy engine (the item is a "copy" or "signal"; `signal` writes one word with release)
    def copied(self, item: Item, dst: np.ndarray, src: np.ndarray, itemsize: int) -> None:
        """A copy moved bytes: start addresses (uint64) of both sides' elements of `itemsize`."""

    def signalled(self, item: Item, address: int) -> None: ...


class Observers(Observer):
    """Fans every event out to several observers, in order."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers


def _fan_out(name: str) -> Any:
    def call(self: Observers, *args: Any, **kwargs: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in [n for n, v in vars(Observer).items() if callable(v) and not n.startswith("_")]:
    setattr(Observers, _name, _fan_out(_name))

__all__ = ["HOST_SITE", "Block", "Item", "ItemKind", "Observer", "Observers", "Site"]
