"""Virtual streams: in-order queues of one rank, and the events between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from plait.backends.commands import Call, Copy, Launch, Signal
from plait.symm.virtual.observe import Block, Item


@dataclass(eq=False)
class Event:
    """A point of one stream that another stream waits for."""

    index: int
    done_at_ns: float | None = None


@dataclass(eq=False)
class Record:
    """Queue entry: mark `event` as done."""

    event: Event


@dataclass(eq=False)
class Wait:
    """Queue entry: go on once `event` is done."""

    event: Event


@dataclass(eq=False)
class Work:
    """Queue entry: a command that takes device time."""

    item: Item
    command: Launch | Copy | Signal | Call
    enqueued_at_ns: float
    started: bool = False
    actors: list[BlockActor] = field(default_factory=list)
    ends_at_ns: float = 0.0


@dataclass(eq=False)
class BlockActor:
    """One resident or waiting block: a greenlet with its own virtual clock."""

    work: Work
    block: Block
    greenlet: Any = None
    now_ns: float = 0.0
    asleep_on: int | None = None
    last_poll: tuple[int, int, Any] | None = None  # word, value, the device function that polls
    where: str = ""
    waits_for: int | None = None  # the world rank that sets the word, where the kernel says so
    done: bool = False

    @property
    def rank(self) -> int:
        """The rank whose kernel this is."""
        return self.work.item.rank


@dataclass(eq=False)
class Stream:
    """An in-order queue of one rank."""

    rank: int
    name: str
    queue: deque[Record | Wait | Work] = field(default_factory=deque)
    now_ns: float = 0.0
    count: int = 0

    def head(self) -> Record | Wait | Work | None:
        """The entry whose turn it is, or None."""
        return self.queue[0] if self.queue else None


__all__ = ["BlockActor", "Event", "Record", "Stream", "Wait", "Work"]
