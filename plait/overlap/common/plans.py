"""Plans: an overlapped call that was made before is enqueued without being planned again.

The first call of a signature runs as always, but prepares each of its programs and keeps them with
the layout of its results. A later call of that signature allocates results and enqueues: what its
signature says was validated then. Plans live as long as their group's workspace, bounded.

Every rank enqueues the same commands with or without a plan, so ranks need not agree about them.
Docs: docs/design/host_time.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._dynamo import guards

from plait.backends.commands import Program
from plait.overlap.common.trace import is_tracing, note_program
from plait.runtime.launcher import launches_are_watched
from plait.runtime.prepared import PreparedProgram
from plait.runtime.record import last_run, repeat_run
from plait.runtime.relocation import CannotPrepareError
from plait.settings import Settings, settings
from plait.symm.group import Group, check_belongs
from plait.symm.workspace import NUM_REGIONS, Workspace

Key: TypeAlias = tuple[Any, ...]
_MAX_PLANS = 512  # signatures of one group

# A microsecond cheaper than torch.empty_strided; it allocates on the current device.
_empty_strided: Any = getattr(guards, "_empty_strided_cuda", None)


def available(group: Group) -> bool:
    """Whether calls of this group are planned: its executor prepares programs, nobody traces."""
    return getattr(group.executor, "driver", None) is not None and not is_tracing()


def layout(tensor: torch.Tensor | None) -> Key | None:
    """What a plan depends on in one argument: kernels are compiled for an address modulo 16."""
    if tensor is None:
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() & 15,
    )


def layouts(tensors: Sequence[torch.Tensor]) -> Key:
    """The layouts of several arguments."""
    return tuple([layout(tensor) for tensor in tensors])


def precision_of(dtype: torch.dtype) -> Any:
    """The process's choice that kernels of this dtype are compiled for."""
    return torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else ""


class CallPlan:
    """All programs of one call and the layout of its results, in the order of their names."""

    def __init__(self, key: Key, call: str, results: Mapping[str, torch.Tensor]) -> None:
        self.key, self.call = key, call
        self.names = list(results)
        self.specs = [(tuple(each.shape), each.stride(), each.dtype) for each in results.values()]
        self.programs: list[PreparedProgram] = []
        self.num_regions = 0
        chosen = last_run()  # what the chooser said
        assert chosen is not None, call
        self.record = dataclasses.replace(chosen, detail="planned")

    def run(self, group: Group, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Allocate the results and enqueue the call."""
        for name, tensor in inputs.items():
            check_belongs(name, tensor, group)
        repeat_run(self.record)
        results = self._allocate(group)
        roles = {**inputs, **dict(zip(self.names, results, strict=True))}
        workspace = group._workspace
        assert workspace is not None, self.call
        # As `take_region` and `agree` count; a cache that is enabled has nobody to agree with.
        workspace._calls += self.num_regions
        group._sequence += len(self.programs)
        for program in self.programs:
            program.run(roles)
        return results

    def _allocate(self, group: Group) -> list[torch.Tensor]:
        executor: Any = group.executor
        if _empty_strided is not None and group.device.type == "cuda" and executor.is_current():
            return [_empty_strided(*spec) for spec in self.specs]
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=group.device)
            for shape, stride, dtype in self.specs
        ]


class PlanCache:
    """The plans of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._plans: OrderedDict[Key, CallPlan | None] = OrderedDict()
        self._status = workspace._status.numpy()  # set when a wait passed its deadline
        self._settings: Settings | None = None
        self._regions = workspace.regions[:NUM_REGIONS]
        self._contexts: list[torch.Tensor | None] = [None] * NUM_REGIONS
        self.enabled = True
        self.recorder: _Recorder | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def refresh(self) -> None:
        """Forget all plans if settings changed or a region has grown since."""
        current = settings()
        if current is self._settings:
            for region, context in zip(self._regions, self._contexts, strict=True):
                if region.ctx is not context:
                    break
            else:
                return
        self._plans.clear()
        self._settings = current
        self._contexts = [region.ctx for region in self._regions]
        # Delays are drawn anew for every call, and in debug mode ranks compare what they call.
        self.enabled = not current.debug and current.prologue_delay_us == 0

    def find(self, workspace: Workspace, key: Key) -> CallPlan | None:
        """The plan of a call that would take the workspace's next region, if there is one."""
        self.refresh()
        if not self.enabled or self._status[0]:
            return None
        plan = self._plans.get((workspace._calls % NUM_REGIONS, key))
        return None if plan is None or launches_are_watched() else plan

    def wants(self, workspace: Workspace, key: Key) -> bool:
        """Whether the call about to be made should be recorded."""
        self.refresh()
        known = (workspace._calls % NUM_REGIONS, key) in self._plans
        return self.enabled and self.recorder is None and not known

    def keep(self, key: Key, plan: CallPlan | None) -> None:
        """Remember a plan, or (None) that there can be none; the oldest go first."""
        self._plans[key] = plan
        if len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)


_caches: weakref.WeakKeyDictionary[Workspace, PlanCache] = weakref.WeakKeyDictionary()


def find(group: Group, key: Key) -> CallPlan | None:
    """The plan of a call of this group. None: go the ordinary way, which also raises what is due.

    The key holds all that the call depends on but the group and the state of its workspace.
    """
    workspace = group._workspace
    cache = None if workspace is None else _caches.get(workspace)
    return None if cache is None or workspace is None else cache.find(workspace, key)


class _Recorder:
    """Prepares the programs of a running call and runs them prepared."""

    def __init__(self, roles: Mapping[str, torch.Tensor], plan: CallPlan) -> None:
        self.roles, self.plan = roles, plan
        self.possible = True

    def run(self, group: Group, program: Program) -> None:
        try:
            prepared = PreparedProgram(program, self.roles, group.executor)
        except CannotPrepareError:
            self.possible = False
            group.executor.run(program)
            return
        self.plan.programs.append(prepared)
        prepared.run(self.roles)


@contextlib.contextmanager
def recording(
    group: Group,
    key: Key | None,
    call: str,
    inputs: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
) -> Iterator[None]:
    """While the block runs the call, keep what it runs as the plan of `key`.

    `inputs` and `results` name every tensor that another call of this signature would bring or
    allocate. Without a key nothing is kept.
    """
    if key is None:
        yield
        return
    workspace = group.workspace
    cache = _caches.get(workspace)
    if cache is None:
        cache = _caches[workspace] = PlanCache(workspace)
    if not cache.wants(workspace, key):
        yield
        return
    first, contexts = workspace._calls, [region.ctx for region in workspace.regions]
    recorder = _Recorder({**inputs, **results}, CallPlan(key, call, results))
    cache.recorder = recorder
    try:
        yield
    finally:
        cache.recorder = None
    if any(region.ctx is not c for region, c in zip(workspace.regions, contexts, strict=True)):
        return  # a region grew meanwhile: the next call finds it as it will stay
    recorder.plan.num_regions = workspace._calls - first
    whole = recorder.possible and bool(recorder.plan.programs)
    cache.keep((first % NUM_REGIONS, key), recorder.plan if whole else None)


def run_program(group: Group, program: Program, call: str) -> None:
    """`group.run`, noted by the `recording` that is under way, if any."""
    workspace = group._workspace
    cache = None if workspace is None else _caches.get(workspace)
    if cache is None or cache.recorder is None:
        group.run(program, call)
        note_program(group, program)
        return
    group.check()
    group.agree(call)
    cache.recorder.run(group, program)


__all__ = [
    "CallPlan",
    "available",
    "find",
    "layout",
    "layouts",
    "precision_of",
    "recording",
    "run_program",
]
