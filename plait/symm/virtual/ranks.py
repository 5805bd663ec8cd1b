"""N ranks in one process: a thread each for host code, one baton, one scheduler.

The thread that calls `World.run` is the scheduler. It picks one runnable actor at a time: a rank's
thread (which then holds the baton until it waits), a block, or a copy. Nobody runnable while a rank
is unfinished is a deadlock, and is reported at once. On a GPU there are no block actors; the rest
is the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.backends import base
from plait.backends.base import Executor
from plait.backends.commands import Launch, Program
from plait.errors import DeadlockError, GroupError, RanksDisagreeError, WorldStoppedError
from plait.settings import settings
from plait.symm.virtual.observe import Observer
from plait.symm.virtual.schedule import Candidate, Schedule
from plait.symm.virtual.streams import BlockActor, Work

ProgramRewrite = Callable[[Program], Program]


class RankHost:
    """One rank's host code: a thread that runs only while it holds the baton."""

    def __init__(self, world: World, rank: int, fn: Callable[[], Any]) -> None:
        self.world, self.rank = world, rank
        self.baton = threading.Semaphore(0)
        self.condition: Callable[[], bool] | None = None
        self.why = "has not started"
        self.missing: Callable[[], list[int]] = list  # the ranks that it waits for on the host
        self.done = False
        self.result: Any = None
        self.now_ns = 0.0
        self._fn = fn
        self.thread = threading.Thread(target=self._body, name=f"plait-rank-{rank}", daemon=True)

    def _body(self) -> None:
        self.baton.acquire()
        _local.world = self.world
        try:
            if not self.world.stopped:
                with torch.autograd.set_multithreading_enabled(False):
                    self.result = self._fn()
        except WorldStoppedError:
            self.why = "was ended because another rank raised"
        except BaseException as error:
            self.world.fail(error, self.rank)
        finally:
            self.done = True
            self.world.scheduler_baton.release()


class World:
    """One run of N virtual ranks."""

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        schedule: Schedule,
        observer: Observer,
        *,
        virtual_device: Any = None,
        rewrite_program: ProgramRewrite | None = None,
        deadline_ns_on_deadlock: float | None = None,
    ) -> None:
        self.world_size, self.device, self.schedule, self.observer = (
            world_size,
            device,
            schedule,
            observer,
        )
        self.virtual_device = virtual_device
        self.rewrite_program = rewrite_program
        self.deadline_ns_on_deadlock = deadline_ns_on_deadlock
        self.scheduler_baton = threading.Semaphore(0)
        self.stopped = False
        self.error: BaseException | None = None
        self.failed_rank: int | None = None
        self.executors: list[Executor] = []
        self.hosts: list[RankHost] = []
        self.holder: RankHost | None = None
        self.calls: dict[Any, dict[int, str]] = {}
        self.exchanges: dict[Any, dict[int, Any]] = {}
        self._exchange_counts: dict[Any, int] = {}
        self.on_stop: list[Callable[[], None]] = []
        self.max_steps = 50_000_000

    @property
    def now_ns(self) -> int:
        """The virtual clock of whatever runs now (0 on a GPU)."""
        return 0 if self.virtual_device is None else self.virtual_device.now_ns

    def current_rank(self) -> int:
        """The rank that holds the baton; whichever thread asks works for it."""
        if self.holder is None:
            raise GroupError(
                argument="group",
                expected="a call from a rank of plait.run_virtual",
                got="a call after the virtual ranks ended",
                remedy="Use the group only inside the function given to run_virtual.",
            )
        return self.holder.rank

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """The first error stops the world and is the one re-raised."""
        if self.error is None:
            self.error, self.failed_rank = error, rank
        self.stopped = True

    def _stopped_error(self) -> WorldStoppedError | RanksDisagreeError:
        """What a rank that waits gets when another has failed; disagreement is everyone's error."""
        if isinstance(self.error, RanksDisagreeError):
            return RanksDisagreeError(self.error.signatures)
        return WorldStoppedError(
            -1 if self.failed_rank is None else self.failed_rank, repr(self.error)
        )

    # --- rank side
    def block_until(
        self, condition: Callable[[], bool], why: str, missing: Callable[[], list[int]] = list
    ) -> None:
        """Give the baton back until `condition` holds; `missing` names ranks that it waits for."""
        host = self.holder
        assert host is not None
        if self.stopped:
            raise self._stopped_error()
        host.condition, host.why, host.missing = condition, why, missing
        self.holder = None
        self.scheduler_baton.release()
        host.baton.acquire()
        host.condition, host.missing = None, list
        if self.stopped:
            raise self._stopped_error()

    def exchange(self, key: Any, members: Sequence[int], value: Any) -> list[Any]:
        """Every member gives a value and gets all values, in the order of `members`."""
        rank = self.current_rank()
        count = self._exchange_counts.get((key, rank), 0)
        self._exchange_counts[key, rank] = count + 1
        slot = self.exchanges.setdefault((key, count), {})
        slot[rank] = value
        if len(slot) < len(members):
            self.block_until(
                lambda: len(slot) == len(members),
                f"waits for ranks to meet in {key}",
                lambda: [member for member in members if member not in slot],
            )
        values = [slot[member] for member in members]
        taken = self._exchange_counts[key, count, "taken"] = (
            self._exchange_counts.get((key, count, "taken"), 0) + 1
        )
        if taken == 1:
            self.observer.hosts_met(tuple(members))
        if taken == len(members):
            del self.exchanges[key, count], self._exchange_counts[key, count, "taken"]
        return values

    # --- scheduler side
    def run(self, fns: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function a rank to its end; return their results in rank order."""
        self.hosts = [RankHost(self, rank, fn) for rank, fn in enumerate(fns)]
        for host in self.hosts:
            host.thread.start()
        self.observer.world_started(self)
        try:
            self._loop()
        except BaseException as error:
            self.fail(error)
        finally:
            self._end()
        if self.error is not None:
            raise self.error
        return [host.result for host in self.hosts]

    def _loop(self) -> None:
        steps = 0
        while not self.stopped:
            hosts = [h for h in self.hosts if not h.done and (h.condition is None or h.condition())]
            work = self.virtual_device.runnable() if self.virtual_device is not None else []
            if not hosts and not work:
                if all(host.done for host in self.hosts) and not self._device_busy():
                    return
                self._nobody_runnable()
                continue
            candidates = [Candidate(h.rank, "host", 0) for h in hosts]
            candidates += [_candidate(actor) for actor in work]
            index = self.schedule.choose(candidates)
            if index < len(hosts):
                self._resume(hosts[index])
            elif self.virtual_device is not None:
                self.virtual_device.step(work[index - len(hosts)])
            steps += 1
            if steps > self.max_steps:
                raise DeadlockError([*self._who_waits(), f"gave up after {steps} steps"])

    def _device_busy(self) -> bool:
        device = self.virtual_device
        return device is not None and not all(device.idle(rank) for rank in range(self.world_size))

    def _resume(self, host: RankHost) -> None:
        self.holder = host
        host.baton.release()
        self.scheduler_baton.acquire()
        self.holder = None

    def _nobody_runnable(self) -> None:
        device = self.virtual_device
        if device is not None and device.retry_sleepers():
            return
        if device is not None and self.deadline_ns_on_deadlock is not None and device.sleepers():
            device.expire_deadlines(self.deadline_ns_on_deadlock)
            return
        raise DeadlockError(self._who_waits(), self._cycle())

    def _who_waits(self) -> list[str]:
        lines = []
        for host in self.hosts:
            if not host.done:
                missing = ", ".join(f"rank {rank}" for rank in host.missing())
                lines.append(
                    f"rank {host.rank} host: {host.why}"
                    + (f"; missing: {missing}" if missing else "")
                )
        device = self.virtual_device
        for actor in device.sleepers() if device is not None else ():
            peer = "" if actor.waits_for is None else f" that rank {actor.waits_for} sets"
            lines.append(
                f"{actor.block} of {actor.work.item.operator} waits at {actor.where} "
                f"for a word{peer}"
            )
        return lines

    def _cycle(self) -> list[str]:
        """Ranks that wait for each other, on the host or through words that blocks wait for."""
        edges = {host.rank: host.missing() for host in self.hosts if not host.done}
        for actor in self.virtual_device.sleepers() if self.virtual_device is not None else ():
            if actor.waits_for is not None:
                edges.setdefault(actor.rank, []).append(actor.waits_for)
        for start in edges:
            path = _find_cycle(edges, [start])
            if path:
                return [f"rank {rank}" for rank in path]
        return []

    def _end(self) -> None:
        self.stopped = self.stopped or any(not host.done for host in self.hosts)
        for host in self.hosts:
            if not host.done:
                self._resume(host)
            host.thread.join(timeout=60)
        for callback in self.on_stop:
            callback()
        self.observer.world_ended(self)


def _find_cycle(edges: dict[int, list[int]], path: list[int]) -> list[int]:
    for following in edges.get(path[-1], ()):
        if following in path:
            return path[path.index(following) :]
        found = _find_cycle(edges, [*path, following])
        if found:
            return found
    return []


def _candidate(actor: BlockActor | Work) -> Candidate:
    if isinstance(actor, BlockActor):
        return Candidate(actor.rank, "block", actor.work.item.index)
    return Candidate(actor.item.rank, "copy", actor.item.index)


class VirtualExecutor(Executor):
    """Runs a rank's programs on the interpreter's virtual device."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.device = world, rank, world.device

    @property
    def num_sms(self) -> int:
        """PLAIT_CPU_BLOCKS: few, because blocks are interpreted one after the other."""
        return settings().cpu_blocks

    def run(self, program: Program) -> None:
        """Enqueue, then let others run until this rank's streams are empty."""
        world = self.world
        if world.rewrite_program is not None:
            program = world.rewrite_program(program)
        host = world.holder
        assert host is not None
        assert host.rank == self.rank
        world.virtual_device.enqueue(self.rank, program, host.now_ns)
        # What a GPU's host does next is ordered after `main` only: a program that leaves `comm`
        # unjoined would let its inputs be freed under a copy.
        self._drain(f"runs {program.operator}", ("main",))
        host.now_ns = world.virtual_device.rank_time_ns(self.rank)

    def synchronize(self) -> None:
        """Programs have ended when `run` returns; this only lets others run."""
        self._drain("synchronizes", ("main", "comm"))

    def _drain(self, why: str, ordered: tuple[str, ...]) -> None:
        device = self.world.virtual_device
        self.world.block_until(lambda: device.idle(self.rank), why)
        for stream in ordered:
            self.world.observer.host_synchronized(self.rank, stream)


class TwoPhaseExecutor(Executor):
    """Virtual ranks on one GPU: prepare, meet, enqueue, meet.

    Compiling or loading a module while another rank's kernel spins would hang, so every rank has
    everything loaded before the first launch, and no user code runs until all have launched.
    """

    early_launches = False  # their blocks would take the SMs that other ranks' kernels need

    def __init__(self, world: World, rank: int, inner: Any) -> None:
        self.world, self.rank, self.inner, self.device = world, rank, inner, world.device

    @property
    def num_sms(self) -> int:
        """This rank's share of the GPU: all ranks' waiting blocks must be resident together."""
        return max(1, (self.inner.num_sms - settings().free_sms) // self.world.world_size)

    def run(self, program: Program) -> None:
        """Prepare the launches, then enqueue between two meetings of the ranks that take part."""
        if self.world.rewrite_program is not None:
            program = self.world.rewrite_program(program)
        self.inner.prepare(program)
        members = tuple(range(self.world.world_size))
        if not any(
            isinstance(command, Launch) and "ctx_ptr" in command.args
            for command in program.commands
        ):
            self.inner.run(program)
            return
        members = program.members or members
        self.world.exchange(("prepared", members), members, None)
        self.inner.run(program)
        self.world.exchange(("enqueued", members), members, None)

    def synchronize(self) -> None:
        """Wait for this rank's streams."""
        self.inner.synchronize()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The rank's own stream is the current one while its thread runs."""
        return self.inner.scope()


def run_world(world: World, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run a world while it is the one that executors and groups resolve to."""
    _active.append(world)
    try:
        return world.run(bodies)
    finally:
        _active.remove(world)


class _Local(threading.local):
    world: World | None = None


_local = _Local()
_active: list[World] = []


def current_world() -> World | None:
    """The world the calling thread works for: its own, or else the only one running."""
    if _local.world is not None:
        return _local.world
    world = _active[-1] if _active else None
    return world if world is not None and world.holder is not None else None


def _resolve(device: torch.device) -> Executor | None:
    world = current_world()
    if world is None or world.holder is None or device.type != world.device.type:
        return None
    return world.executors[world.current_rank()]


base.add_resolver(_resolve)

__all__ = ["RankHost", "TwoPhaseExecutor", "VirtualExecutor", "World", "current_world", "run_world"]
