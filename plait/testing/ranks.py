"""`run_virtual`: N ranks in one process, on the CPU or on one GPU, checked while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from plait.check.detector import RaceDetector
from plait.errors import ArgumentError, RankCountError
from plait.symm.group import Group, close_groups
from plait.symm.signals import MAX_RANKS
from plait.symm.virtual import ranks as virtual
from plait.symm.virtual.observe import Observer, Observers
from plait.symm.virtual.schedule import Schedule
from plait.symm.virtual.transport import VirtualTransport

_one_at_a_time = threading.Lock()


def run_virtual(
    fn: Callable[[Group], Any],
    world_size: int,
    seed: int = 0,
    *,
    device: torch.device | str | None = None,
    schedule: str = "random",
    sm_slots: int | None = None,
    check: bool = True,
    observers: Iterable[Observer] = (),
    name: str = "virtual",
    rewrite_kernel: Any = None,
    rewrite_program: virtual.ProgramRewrite | None = None,
    deadline_ns_on_deadlock: float | None = None,
) -> list[Any]:
    """Run `fn(group)` on `world_size` virtual ranks and return their results in rank order.

    `device` defaults to the current GPU, or the CPU without one. On the CPU the kernels run under
    an interpreter, the same `seed` and `schedule` (see `plait.symm.virtual.schedule`) give the same
    interleaving, at most `sm_slots` blocks of a rank are resident at once, and with `check` every
    access to symmetric memory is checked: RaceError at the end lists accesses that nothing orders.
    Nobody able to run raises DeadlockError at once. A rank that raises ends the others' waits and
    its exception is re-raised.

    `observers` hear every event; `rewrite_kernel` and `rewrite_program` make mutants of kernels and
    programs; `deadline_ns_on_deadlock` lets waits expire instead of reporting a deadlock. These
    are for the protocol checker and need the CPU.
    """
    if not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
        raise RankCountError(
            argument="world_size",
            expected=f"an int from 1 to {MAX_RANKS}",
            got=repr(world_size),
            remedy="Choose the number of virtual ranks.",
        )
    if virtual.current_world() is not None and threading.current_thread().name.startswith(
        "plait-rank"
    ):
        raise ArgumentError(
            argument="run_virtual",
            expected="a call from outside virtual ranks",
            got="a call from a virtual rank",
            remedy="Use group.new_group(ranks) for a smaller group.",
        )
    chosen = _device(device)
    heard = list(observers)
    detector = RaceDetector() if check and chosen.type == "cpu" else None
    if detector is not None:
        heard.append(detector)
    observer = Observers(heard)
    with _one_at_a_time:
        world = virtual.World(
            world_size,
            chosen,
            Schedule(schedule, seed),
            observer,
            rewrite_program=rewrite_program,
            deadline_ns_on_deadlock=deadline_ns_on_deadlock,
        )
        # Also the groups that ranks made of `group`, which resolve ranks through this world.
        world.on_stop.append(
            lambda: close_groups(lambda group: getattr(group.transport, "world", None) is world)
        )
        world.virtual_device, world.executors = _executors(
            world, chosen, observer, rewrite_kernel, sm_slots
        )
        bodies = [lambda rank=rank: _rank_body(world, rank, name, fn) for rank in range(world_size)]
        results = virtual.run_world(world, bodies)
    if detector is not None:
        detector.raise_if_races()
    return results


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _executors(
    world: virtual.World,
    device: torch.device,
    observer: Observer,
    rewrite_kernel: Any,
    sm_slots: int | None,
) -> tuple[Any, list[Any]]:
    if device.type == "cuda":
        from plait.backends.nvidia.executor import CudaExecutor

        # Every rank has its own streams: on a shared one a waiting kernel would block its peers.
        return None, [
            virtual.TwoPhaseExecutor(world, rank, CudaExecutor(device, own_main=True))
            for rank in range(world.world_size)
        ]
    from plait.symm.virtual.device import VirtualDevice

    virtual_device = VirtualDevice(world.world_size, observer, rewrite_kernel, sm_slots)
    return virtual_device, [
        virtual.VirtualExecutor(world, rank) for rank in range(world.world_size)
    ]


def _rank_body(world: virtual.World, rank: int, name: str, fn: Callable[[Group], Any]) -> Any:
    executor = world.executors[rank]
    members = tuple(range(world.world_size))
    group = Group(name, VirtualTransport(world, executor, members, rank, name), world.current_rank)
    with executor.scope():
        return fn(group)


__all__ = ["run_virtual"]
