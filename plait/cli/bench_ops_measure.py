"""One operator call measured: checked against fp64 and ATen, then timed against ATen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import plait
from plait.cli.bench_ops_points import Point
from plait.ops.aten import dispatch, gate, registration, spec, wins
from plait.ops.engine.precompile import KernelJob, kernel_jobs
from plait.ops.engine.signature import Schema
from plait.runtime.lab import Lab
from plait.runtime.timing import Timing
from plait.testing.compare import assert_close_to_fp64

Contender = Callable[[Callable[[], Any]], Any]  # from the plain call
_SEED = 1
# Of plain PyTorch's error, as a share of the result: a single element may come out exact by luck.
_PLAIN_ERROR = 32 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Measured:
    """One point's result; `times` has plait, aten, and flaggems or default where they were timed.

    `keys` are plait's overloads that the call may reach; `asked` is the one question whose answer
    the times are, if one kernel of plait serves the call. `chosen` is the way of default mode:
    plait, aten, or mixed. `reason` says why there is no time of plait's.
    """

    point: Point
    keys: tuple[str, ...]
    asked: wins.Asked | None = None
    chosen: str = "aten"
    times: Mapping[str, Timing] = field(default_factory=dict)
    reason: str = ""
    wrong: str = ""
    flaggems: str = ""

    def us(self, name: str) -> float | None:
        """Median microseconds of one contestant."""
        timing = self.times.get(name)
        return None if timing is None else timing.median_us

    @property
    def ratio(self) -> float | None:
        """ATen's time over plait's: above 1 plait is faster."""
        return self.over("plait")

    @property
    def default_ratio(self) -> float | None:
        """The same for default mode; 1 where that is ATen's own call."""
        if "aten" not in self.times:
            return None
        if self.chosen == "aten":
            return 1.0
        return self.over("default") if self.chosen == "mixed" else self.ratio

    def over(self, name: str) -> float | None:
        """ATen's time over that of `name`."""
        ours, theirs = self.us(name), self.us("aten")
        return None if ours is None or theirs is None else theirs / ours


@contextmanager
def asking(device: torch.device) -> Iterator[list[wins.Asked]]:
    """A block in which calls are ATen's, and the list tells what plait would be asked to serve."""
    dispatch_key = registration.dispatch_key_of(device)
    served = spec.served()
    keys = served.difference(registration.install(served, dispatch_key))
    # Plainly named keys are plait's at once: they are off here.
    with gate.Block(gate.if_faster(keys), keys), wins.recording() as asked:
        yield asked


def operands_of(point: Point, device: torch.device) -> tuple[Any, ...]:
    """The operands, the same at each call."""
    torch.manual_seed(_SEED)
    return point.case.make(point.at, getattr(torch, point.dtype), device)


def ask(point: Point, device: torch.device) -> list[wins.Asked]:
    """What the point's call would ask plait to serve."""
    with torch.no_grad(), plait.use((), "*"):
        operands = operands_of(point, device)
    with torch.no_grad(), asking(device) as asked:
        point.case.call(point.at.dim, *operands)
    return asked


def jobs_of(asked: Sequence[wins.Asked]) -> list[KernelJob]:
    """The kernels that serve these calls."""
    jobs: list[KernelJob] = []
    for each in asked:
        call, _ = _recorded(each)
        if call is not None:
            jobs += kernel_jobs(call)
    return jobs


def _recorded(asked: wins.Asked) -> tuple[Any, str]:
    packet, _, name = asked.key.partition(".")
    overload = getattr(getattr(torch.ops.aten, packet), name or "default")
    found = spec.find(asked.key)
    assert found is not None
    if found.compute is None:
        return None, ""
    return dispatch.compute(found, Schema(overload), dict(asked.named))


def measure(
    point: Point,
    lab: Lab,
    rounds: int,
    flaggems: Callable[[Point, Sequence[Any]], Contender] | None = None,
) -> Measured:
    """Check one point, then time it.

    `flaggems(point, operands)` gives what makes a contestant of the plain call, or a text that
    says why there is none. A call that raises is wrong; a device that is lost raises here.
    """
    try:
        asked = ask(point, lab.device)
        keys = tuple(dict.fromkeys(each.key for each in asked))
        if not asked:
            return Measured(point, keys, reason=dispatch.NO_KERNEL)
        with torch.no_grad():
            return _measure(point, lab, rounds, asked, keys, flaggems)
    except Exception as error:  # of whatever kind: the others are to be measured all the same
        if lab.device.type != "cpu":
            torch.cuda.synchronize(lab.device)
        return Measured(point, (), wrong=raised(error))


def raised(error: Exception) -> str:
    """An exception on one line."""
    lines = str(error).splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0][:160]}"


def _measure(
    point: Point,
    lab: Lab,
    rounds: int,
    asked: Sequence[wins.Asked],
    keys: tuple[str, ...],
    flaggems: Callable[[Point, Sequence[Any]], Contender] | None,
) -> Measured:
    with plait.use((), "*"):
        operands = operands_of(point, lab.device)

    def call() -> Any:
        return point.case.call(point.at.dim, *operands)

    def ours() -> Any:
        with plait.use(keys, device=lab.device):
            return call()

    def default() -> Any:
        with plait.use(device=lab.device):
            return call()

    # Before plait: it takes plait's overrides out, outside of any block.
    theirs = flaggems(point, operands)(call) if flaggems is not None else ""
    with plait.use((), "*"):
        plain = call()
        with plait.report() as counted:
            result = ours()
        if counted.fallbacks or not counted.served:
            return Measured(point, keys, reason="; ".join(counted.fallbacks) or dispatch.NO_KERNEL)
        wrong = check(point, operands, result, plain)
        if wrong:
            return Measured(point, keys, wrong=wrong)
        # What PyTorch composes of others asks for those, too, but only while it is ATen's.
        alone = counted.served == 1 and counted.rows[0].key == asked[0].key
        chosen = _chosen(asked, lab, alone)
        del result, plain
        contestants: dict[str, Any] = {"plait": ours, "aten": call}
        if not isinstance(theirs, str):
            contestants["flaggems"] = theirs
        if chosen == "mixed":
            contestants["default"] = default
        times = lab.times(contestants, rounds)
    only = replace(asked[0], named={}) if alone else None  # lets the operands go
    note = theirs if isinstance(theirs, str) else ""
    return Measured(point, keys, only, chosen, times, flaggems=note)


def _chosen(asked: Sequence[wins.Asked], lab: Lab, alone: bool) -> str:
    table = wins.win_table(lab.info.name)
    win = [not table.why_not(each.operator, each.call) for each in asked]
    if all(win) or (alone and win[0]):
        return "plait"
    return "mixed" if any(win) else "aten"


def check(
    point: Point,
    operands: Sequence[Any],
    actual: Any,
    plain: Any,
    *,
    same_strides: bool = True,
) -> str:
    """What is wrong with a result, or "": at most twice ATen's own error against fp64, and ATen's
    own integers, truth values and strides."""
    wide = [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in operands
    ]
    exact = tree_leaves(point.case.call(point.at.dim, *wide))
    actual, plain = tree_leaves(actual), tree_leaves(plain)
    for index, (one, theirs, fp64) in enumerate(zip(actual, plain, exact, strict=True)):
        what = f"result {index}"
        if one is None or theirs is None:
            if one is not theirs:
                return f"{what}: only one of the two is None"
        elif not one.is_floating_point():
            if one.shape != theirs.shape or one.dtype != theirs.dtype:
                return f"{what}: {one.dtype} {tuple(one.shape)}, ATen {theirs.dtype}"
            if not torch.equal(one, theirs):
                return f"{what}: {int((one != theirs).sum())} elements are not ATen's"
        elif same_strides and one.stride() != theirs.stride():
            return f"{what}: strides {one.stride()}, ATen {theirs.stride()}"
        else:
            try:
                assert_close_to_fp64(
                    one, fp64.double(), theirs, what, plain_error_share=_PLAIN_ERROR
                )
            except AssertionError as error:
                return str(error)
    return ""


__all__ = ["Measured", "ask", "asking", "check", "jobs_of", "measure", "operands_of", "raised"]
