"""One rank on a GPU: `rank_worker.py FOLDER` runs the cases of rank_cases.py in each process.

TEST_BACKEND is that of the process group, gloo unless set. With TEST_VICTIM=1 the last rank dies;
else SCENARIOS run, in order. With fewer GPUs than processes all use the first: right answers, not
speed. The GPU takes turns between processes then, so that each wait for a peer takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from plait import Group
from plait.settings import override
from tests import rank_cases as cases
from tests.host.symm.transport_checks import CHECKS
from tests.processes import process_group, worker_main

DEADLINE_S = 20.0  # of waits that are to end well; kernels are compiled meanwhile
VICTIMS_DEADLINE_S = 5.0
TIMEOUT_S = 240.0  # of a whole worker


def conformance(name: str, group: Group) -> None:
    CHECKS[name](group.transport)


def delayed_rounds(group: Group) -> None:
    """Every prologue is late, by up to half a millisecond, and no call is planned."""
    with override(prologue_delay_us=500.0):
        cases.many_rounds(group, 50)


def process_subgroups(group: Group) -> None:
    """Groups over process groups of some of the processes; every process is in one."""
    half = (group.world_size + 1) // 2
    made = None
    for part in (range(half), range(half, group.world_size)):
        theirs = dist.new_group(list(part))
        if group.rank in part:
            made = Group.from_process_group(theirs, device=group.device)
            assert (made.rank, made.world_size) == (group.rank - part[0], len(part))
    assert made is not None
    cases.reserve(made)
    rounds = cases.Rounds(made)
    for turn in range(5):
        rounds.eager(turn, list(cases.CALLS))
    rounds.done()
    made.close()


def d07_graphs_of_many_sizes(group: Group) -> None:
    """In a new group, whose workspace is small and grows under the graphs."""
    made = group.new_group()
    assert made is not None
    cases.d07_graphs_of_many_sizes(made, 60)
    made.close()


# Each ends with a meeting of all ranks.
SCENARIOS: dict[str, Callable[[Group], None]] = {
    **{f"transport_{name}": partial(conformance, name) for name in CHECKS},
    "barriers": partial(cases.barriers, num_rounds=20),
    "every_dtype": partial(cases.every_dtype, num_rounds=5),
    "many_rounds": partial(cases.many_rounds, num_rounds=200),
    "delayed_rounds": delayed_rounds,
    "late_ranks": partial(cases.late_ranks, seconds=0.3),
    "full_grids": partial(cases.full_grids, num_rounds=5),
    "gradients": partial(cases.gradients, num_rounds=10),
    "d04_replays_between_eager_calls": partial(
        cases.d04_replays_between_eager_calls, num_replays=60
    ),
    "d06_replays_of_dispatch_and_combine": partial(
        cases.d06_replays_of_dispatch_and_combine, num_replays=20
    ),
    "subgroups": partial(cases.subgroups, num_rounds=5),
    "process_subgroups": process_subgroups,
    "d07_graphs_of_many_sizes": d07_graphs_of_many_sizes,
}


def in_step(run: Callable[[Group], None], group: Group) -> None:
    """Run one scenario; where a rank fails, the others do not go on without it."""
    try:
        run(group)
    finally:
        group.transport.exchange(None)


def die() -> None:
    time.sleep(0.5)  # what it told the others last has left
    os.kill(os.getpid(), signal.SIGKILL)


def peer_that_dies(device: torch.device) -> None:
    """Rank 0 keeps the store of torch.distributed, so it is the last rank that dies."""
    warm = Group.from_process_group(device=device)  # compiles everything, with a longer deadline
    cases.reserve(warm)
    rounds = cases.Rounds(warm)
    rounds.eager(0, list(cases.CALLS))
    rounds.done()
    warm.transport.exchange(None)
    warm.close()
    with override(deadline_s=VICTIMS_DEADLINE_S):
        group, others = Group.from_process_group(device=device), None
        cases.reserve(group)
        if group.world_size > 2:
            others = group.new_group(range(group.world_size - 1))
        cases.peer_that_dies(group, die, VICTIMS_DEADLINE_S, others)


def local_device() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "no GPU"
    shared = torch.accelerator.device_count() < dist.get_world_size()
    return torch.device(kind.type, 0 if shared else dist.get_rank())


def main() -> None:
    with process_group(os.environ.get("TEST_BACKEND", "gloo")), override(deadline_s=DEADLINE_S):
        device = local_device()
        torch.accelerator.set_device_index(device.index)
        if os.environ.get("TEST_VICTIM"):
            worker_main({"peer_that_dies": partial(peer_that_dies, device)}, TIMEOUT_S)
            return
        group = Group.from_process_group(device=device)
        worker_main(
            {name: partial(in_step, run, group) for name, run in SCENARIOS.items()}, TIMEOUT_S
        )
        group.close()


if __name__ == "__main__":
    main()
