"""The virtual device: runs the blocks, copies and signals of all ranks, one step at a time.

It lives in the scheduler's thread. A block runs until its next atomic, where others may run first;
a block that polls an unchanged word sleeps until that word (or an abort word) is written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import greenlet
import numpy as np
import torch

from plait.backends.commands import Call, Copy, Launch, Program, Signal, StreamWait
from plait.backends.cpu.builder import make_binder
from plait.backends.cpu.lang_proxy import Rewrite, constexpr_names
from plait.symm.virtual.observe import Block, Item, Observer, Site
from plait.symm.virtual.streams import BlockActor, Event, Record, Stream, Wait, Work

# Virtual costs: they only shape the timeline, and are those of one H200 with 360 GB/s links.
_STEP_NS = 100.0
_LINK_BYTES_PER_NS = 360.0
_LOCAL_BYTES_PER_NS = 2000.0
_COPY_NS = 1000.0  # of any copy, a 4-byte signal included
_LAUNCH_NS = 3000.0


class VirtualDevice:
    """Streams, blocks and memory regions of every rank of one world."""

    def __init__(
        self,
        world_size: int,
        observer: Observer,
        rewrite: Rewrite | None = None,
        sm_slots: int | None = None,
    ) -> None:
        self.observer = observer
        self.sm_slots = sm_slots
        self.streams = {
            (rank, name): Stream(rank, name)
            for rank in range(world_size)
            for name in ("main", "comm")
        }
        self.binder = make_binder(self, rewrite)
        self.actor: BlockActor | None = None
        self.steps = 0
        self.progress = 0  # counts what could satisfy a wait
        self._retried_at = -1
        self.wake_words: set[int] = set()
        self._resident = [0] * world_size
        self._hub = greenlet.getcurrent()
        self._events = 0
        self._word_times: dict[int, float] = {}  # when each word was last set
        self._sleepers: dict[int, list[BlockActor]] = {}
        self._regions: list[
            tuple[int, int, int]
        ] = []  # (address, nbytes, rank), for peers and bytes
        self._members: dict[int, tuple[int, ...]] = {}  # signal words' address -> world ranks

    # --- what executors call (from a rank's thread, which then holds the baton)
    def enqueue(self, rank: int, program: Program, host_now_ns: float) -> None:
        """Put every command of a program into this rank's streams."""
        for command in program.commands:
            if isinstance(command, StreamWait):
                self._events += 1
                event = Event(self._events)
                self.streams[rank, command.on].queue.append(Record(event))
                self.streams[rank, command.stream].queue.append(Wait(event))
                continue
            stream = self.streams[rank, getattr(command, "stream", "main")]
            stream.queue.append(self._work(rank, stream, program.operator, command, host_now_ns))
        for name in ("main", "comm"):
            self._advance(self.streams[rank, name])

    def _work(
        self, rank: int, stream: Stream, operator: str, command: Any, host_now_ns: float
    ) -> Work:
        kind = {Launch: "launch", Copy: "copy", Signal: "signal", Call: "call"}[type(command)]
        name, blocks, nbytes, peer = kind, 0, 0, None
        if isinstance(command, Launch):
            name, blocks = command.kernel.fn.__name__, command.grid
        elif isinstance(command, Copy):
            nbytes, peer = (
                command.dst.numel() * command.dst.element_size(),
                self.owner(command.dst.data_ptr()),
            )
        elif isinstance(command, Signal):
            nbytes, peer = 4, self.owner(command.word.data_ptr())
        elif isinstance(command, Call):
            name = command.label
        item = Item(rank, stream.name, kind, operator, name, stream.count, blocks, nbytes, peer)  # type: ignore[arg-type]
        stream.count += 1
        self.observer.enqueued(item)
        return Work(item, command, host_now_ns)

    def idle(self, rank: int) -> bool:
        """Nothing is left in this rank's streams."""
        return not any(self.streams[rank, name].queue for name in ("main", "comm"))

    def rank_time_ns(self, rank: int) -> float:
        """When this rank's streams will have done all they hold."""
        return max(self.streams[rank, name].now_ns for name in ("main", "comm"))

    # --- memory
    def add_region(self, name: str, rank: int, tensor: torch.Tensor) -> None:
        """Symmetric data: accesses are checked, copies into it count as sent to its rank."""
        nbytes = tensor.numel() * tensor.element_size()
        self._regions.append((tensor.data_ptr(), nbytes, rank))
        self.observer.region_added(name, rank, tensor.data_ptr(), nbytes)

    def add_signal_words(self, rank: int, words: torch.Tensor, members: tuple[int, ...]) -> None:
        """Signal words of a rank in the group of `members` (world ranks); the first is ABORT."""
        nbytes = words.numel() * words.element_size()
        self.wake_words.add(words.data_ptr())
        self._members[words.data_ptr()] = members
        self._regions.append((words.data_ptr(), nbytes, rank))
        self.observer.signal_words_added(rank, words.data_ptr(), nbytes)

    def remove(self, tensor: torch.Tensor) -> None:
        """Forget a region or the signal words that start at this tensor."""
        address = tensor.data_ptr()
        self.wake_words.discard(address)
        self._members.pop(address, None)
        self._regions = [region for region in self._regions if region[0] != address]
        self.observer.region_removed(address)
        self.observer.signal_words_removed(address)

    def owner(self, address: int) -> int | None:
        """The rank whose symmetric memory holds this address, or None."""
        for start, nbytes, rank in self._regions:
            if start <= address < start + nbytes:
                return rank
        return None

    def is_signal_word(self, address: int) -> bool:
        """Whether the address lies in signal words of any rank."""
        return any(
            start <= address < start + nbytes and start in self._members
            for start, nbytes, _rank in self._regions
        )

    # --- scheduling
    def runnable(self) -> list[BlockActor | Work]:
        """Blocks that are awake and copies whose turn it is."""
        found: list[BlockActor | Work] = []
        for stream in self.streams.values():
            head = stream.head()
            if not isinstance(head, Work):
                continue
            if not isinstance(head.command, Launch):
                found.append(head)
                continue
            self._start(stream, head)
            room = None if self.sm_slots is None else self.sm_slots - self._resident[stream.rank]
            for actor in head.actors:
                if actor.done:
                    continue
                if actor.greenlet is None:
                    if room is not None and room <= 0:
                        break  # blocks start in order
                    room = None if room is None else room - 1
                    found.append(actor)
                elif actor.asleep_on is None:
                    found.append(actor)
        return found

    def sleepers(self) -> list[BlockActor]:
        """Blocks that wait for a word."""
        return [actor for actors in self._sleepers.values() for actor in actors]

    def step(self, actor: BlockActor | Work) -> None:
        """Run one block to its next switch, or one copy, signal or call to its end."""
        self.steps += 1
        if isinstance(actor, Work):
            self._run_work(actor)
            return
        if actor.greenlet is None:
            self._resident[actor.rank] += 1
            actor.greenlet = greenlet.greenlet(self._body, self._hub)
            actor.now_ns = actor.work.ends_at_ns
            self.actor = actor
            self.observer.block_started(actor.block)
            self._switch(actor, actor)
        else:
            self._switch(actor)

    def _switch(self, actor: BlockActor, *args: Any) -> None:
        builder = self.binder.semantic.builder
        builder.set_grid_dim(actor.work.item.num_blocks, 1, 1)
        builder.set_grid_idx(actor.block.index, 0, 0)
        self.actor = actor
        try:
            actor.greenlet.switch(*args)
        finally:
            if actor.greenlet.dead:
                self._block_ended(actor)
            self.actor = None

    def _body(self, actor: BlockActor) -> None:
        command = actor.work.command
        assert isinstance(command, Launch)
        function = self.binder.function(command.kernel)
        plain = constexpr_names(command.kernel.fn)
        bound = inspect.signature(function).bind(**command.args)
        bound.apply_defaults()
        values = {
            name: value if name in plain else self.binder.argument(value)
            for name, value in bound.arguments.items()
        }
        function(**values)

    def _start(self, stream: Stream, work: Work) -> None:
        if work.started:
            return
        work.started = True
        begin = max(stream.now_ns, work.enqueued_at_ns) + (
            _LAUNCH_NS if work.item.kind == "launch" else 0.0
        )
        work.ends_at_ns = begin
        if isinstance(work.command, Launch):
            work.actors = [
                BlockActor(work, Block(work.item, index)) for index in range(work.command.grid)
            ]
        self._clock = begin
        self.observer.item_started(work.item)

    def _block_ended(self, actor: BlockActor) -> None:
        actor.done = True
        self._resident[actor.rank] -= 1
        self.observer.block_finished(actor.block)
        work = actor.work
        work.ends_at_ns = max(work.ends_at_ns, actor.now_ns)
        if all(other.done for other in work.actors):
            self._finish(work, max(other.now_ns for other in work.actors))

    def _finish(self, work: Work, end_ns: float) -> None:
        self.progress += 1
        stream = self.streams[work.item.rank, work.item.stream]
        assert stream.queue[0] is work
        stream.now_ns = end_ns
        self._clock = end_ns
        self.observer.item_finished(work.item)
        stream.queue.popleft()
        self._advance(stream)

    def _advance(self, stream: Stream) -> None:
        """Pass records and satisfied waits at the head of a stream."""
        while isinstance(head := stream.head(), (Record, Wait)):
            if isinstance(head, Record):
                head.event.done_at_ns = stream.now_ns
                self.observer.event_recorded(stream.rank, stream.name, head.event.index)
                stream.queue.popleft()
                for other in self.streams.values():
                    if other.rank == stream.rank and other is not stream:
                        self._advance(other)
            elif head.event.done_at_ns is None:
                return
            else:
                stream.now_ns = max(stream.now_ns, head.event.done_at_ns)
                self.observer.event_waited(stream.rank, stream.name, head.event.index)
                stream.queue.popleft()

    def _run_work(self, work: Work) -> None:
        stream = self.streams[work.item.rank, work.item.stream]
        self._start(stream, work)
        command, item, end_ns = work.command, work.item, work.ends_at_ns
        if isinstance(command, Copy):
            command.dst.detach().copy_(command.src.detach())
            rate = _LINK_BYTES_PER_NS if item.peer not in (None, item.rank) else _LOCAL_BYTES_PER_NS
            end_ns += _COPY_NS + item.nbytes / rate
            self.observer.copied(
                item, _addresses(command.dst), _addresses(command.src), command.dst.element_size()
            )
        elif isinstance(command, Signal):
            command.word.copy_(command.mirror)
            end_ns += _COPY_NS
            self.observer.signalled(item, command.word.data_ptr())
            self._word_set(command.word.data_ptr(), end_ns)
        elif isinstance(command, Call):
            with torch.no_grad():
                command.fn()
        self._finish(work, end_ns)

    # --- what the builder calls (inside a block's greenlet)
    @property
    def now_ns(self) -> int:
        """The virtual clock of what is running."""
        return int(self.actor.now_ns if self.actor is not None else self._clock)

    _clock = 0.0

    def spend_ns(self, cost_ns: float) -> None:
        """The running block spends virtual time."""
        if self.actor is not None:
            self.actor.now_ns += cost_ns

    def accessed(
        self, addresses: np.ndarray, itemsize: int, *, write: bool, async_proxy: bool, site: Site
    ) -> None:
        """A load or store of the running block."""
        actor = self.actor
        assert actor is not None
        self.observer.access(
            actor.block, addresses, itemsize, write=write, async_proxy=async_proxy, site=site
        )

    def stored(self, addresses: np.ndarray) -> None:
        """Wake whoever waits for a word that a plain store wrote."""
        assert self.actor is not None
        for word in list(self._sleepers):
            if np.any(addresses == word):
                self._word_set(word, self.actor.now_ns)

    def atomic(
        self,
        address: int,
        run: Callable[[], Any],
        sem: str,
        scope: str,
        poll: bool,
        site: Site,
        vector: bool = False,
    ) -> Any:
        """An atomic of the running block, or one lane of a vector's: other actors may run first."""
        actor = self.actor
        assert actor is not None
        self._hub.switch()
        actor.now_ns += _STEP_NS
        result = run()
        if poll:
            seen = (address, int(np.asarray(result.data).reshape(-1)[0]), self._wait_frame())
            if actor.last_poll == seen:
                actor.asleep_on, actor.where = address, str(site)
                actor.waits_for = self._who_sets(address)
                self._sleepers.setdefault(address, []).append(actor)
                self.observer.block_asleep(actor.block, address)
            actor.last_poll = seen
        else:
            actor.last_poll = None
            self.progress += 1
        self.observer.atomic(
            actor.block,
            address,
            acquire=sem in ("acquire", "acquire_release"),
            release=sem in ("release", "acquire_release"),
            poll=poll,
            scope=scope,
            site=site,
            vector=vector,
        )
        if not poll:
            self._word_set(address, actor.now_ns)
        elif actor.asleep_on is None:
            self._catch_up(actor, self._word_times.get(address, 0.0))
        if actor.asleep_on is not None:
            self._hub.switch()
        return result

    def _wait_frame(self) -> Any:
        """The running call of the innermost device function: a loop polls twice from one."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.binder.files:
            frame = frame.f_back
        return frame

    def _who_sets(self, address: int) -> int | None:
        """The world rank that the waiting device function names as the word's writer."""
        frame = self._wait_frame()
        peer = None if frame is None else frame.f_locals.get("peer")
        for start, nbytes, _rank in self._regions:
            if start <= address < start + nbytes and start in self._members and peer is not None:
                return self._members[start][int(peer)]
        return None

    def _word_set(self, address: int, at_ns: float) -> None:
        self._word_times[address] = at_ns
        self._wake(address, at_ns)

    def _wake(self, address: int, at_ns: float) -> None:
        words = list(self._sleepers) if address in self.wake_words else [address]
        for word in words:
            for sleeper in self._sleepers.pop(word, ()):
                sleeper.asleep_on, sleeper.last_poll = None, None
                sleeper.now_ns = max(sleeper.now_ns, at_ns + _STEP_NS)
                running, self.actor = self.actor, sleeper
                self.observer.block_woken(sleeper.block)
                self.actor = running

    def _catch_up(self, actor: BlockActor, set_at_ns: float) -> None:
        """A block that finds a word set has waited until it was, by its own virtual clock."""
        if set_at_ns + _STEP_NS > actor.now_ns:
            self.observer.block_asleep(actor.block, 0)
            actor.now_ns = set_at_ns + _STEP_NS
            self.observer.block_woken(actor.block)

    def retry_sleepers(self) -> bool:
        """Let every sleeping block poll once more; False if nothing happened since the last retry.

        A block that polls one word in two waits looks like one that polls in vain.
        """
        if self._retried_at == self.progress:
            return False
        self._retried_at = self.progress
        for word, actors in list(self._sleepers.items()):
            self._wake(word, max(actor.now_ns for actor in actors))
        return True

    def expire_deadlines(self, ns: float) -> None:
        """Wake every sleeping block `ns` later: for tests of the deadline."""
        for word, actors in list(self._sleepers.items()):
            latest = max(actor.now_ns for actor in actors)
            self._wake(word, latest + ns)

    def cta_barrier(self) -> None:
        """`tl.debug_barrier()` of the running block."""
        assert self.actor is not None
        self.observer.cta_barrier(self.actor.block)

    def proxy_fence(self) -> None:
        """`fence.proxy.async` of the running block."""
        assert self.actor is not None
        self.observer.proxy_fence(self.actor.block)


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Start address of every element, in row-major order of the tensor's shape."""
    offsets = np.zeros((1,), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return (offsets * tensor.element_size() + tensor.data_ptr()).astype(np.uint64)


__all__ = ["VirtualDevice"]
