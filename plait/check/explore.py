"""Explore: an operator under many schedules until one shows a mistake; mutants the same way.

`run(group, rounds)` is the operator's case: every rank calls it; it runs the operator `rounds`
times on fresh data and raises `WrongValueError` for a wrong result. This module knows no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plait
from plait.check.detector import RaceDetector
from plait.check.mutants import Equivalent, Mutant, Record
from plait.errors import DeadlockError, PlaitError
from plait.symm.group import Group
from plait.symm.virtual.observe import Item, Observer

Run = Callable[[Group, int], Any]
Found = Literal["race", "deadlock", "wrong value", "error"]


class WrongValueError(PlaitError, RuntimeError):
    """A case's result is not what the reference says."""


@dataclass(frozen=True)
class Plan:
    """One schedule to be tried."""

    schedule: str
    seed: int
    sm_slots: int | None = None

    def __str__(self) -> str:
        slots = "" if self.sm_slots is None else f", {self.sm_slots} block(s) at a time"
        return f"{self.schedule} seed {self.seed}{slots}"


@dataclass(frozen=True)
class Attempt:
    """One schedule that was tried; `found` is None if all went well."""

    index: int
    plan: Plan
    steps: int
    found: Found | None = None
    report: str = ""
    num_races: int = 0


@dataclass(frozen=True)
class Outcome:
    """All schedules that were tried; the last one is the one that found something, if any did."""

    attempts: tuple[Attempt, ...]

    @property
    def finding(self) -> Attempt | None:
        """The attempt that found something, or None."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.found is not None else None


@dataclass(frozen=True)
class MutantResult:
    """What became of a mutant. It is as it should be if either a schedule shows it or `reason`
    says why none can."""

    mutant: Mutant
    outcome: Outcome
    reason: str = ""

    @property
    def verdict(self) -> str:
        """ "found", "equivalent", "survived", or "found, but listed as equivalent"."""
        if self.outcome.finding is None:
            return "equivalent" if self.reason else "survived"
        return "found, but listed as equivalent" if self.reason else "found"

    @property
    def as_expected(self) -> bool:
        """Whether the table is right about it; a run that ends in an error shows nothing."""
        finding = self.outcome.finding
        clean = finding is None or finding.found != "error"
        return clean and self.verdict in ("found", "equivalent")


def plans(count: int, world_size: int, min_slots: int = 1) -> Iterator[Plan]:
    """The first `count` schedules: those that find most come first, then all again, other seeds."""
    names = ["random", "copies_last", "consumer_first", "late:0", "waiter_first"]
    names += [f"late:{rank}" for rank in range(1, world_size)]
    for index in range(count):
        seed, which = divmod(index, len(names) + 1)
        if which == len(names):
            yield Plan("random", seed, min_slots)
        else:
            yield Plan(names[which], seed)


def explore(
    run: Run,
    schedules: int = 50,
    rounds: int = 3,
    world_size: int = 3,
    *,
    min_slots: int = 1,
    mutant: Mutant | None = None,
    on_attempt: Callable[[Attempt], Any] = lambda attempt: None,
) -> Outcome:
    """Try `schedules` schedules of `rounds` rounds and stop at the first that finds something.

    `min_slots` is how many blocks of a rank the operator needs resident to get on at all.
    """
    attempts: list[Attempt] = []
    for index, plan in enumerate(plans(schedules, world_size, min_slots)):
        attempts.append(_attempt(index, plan, run, rounds, world_size, mutant))
        on_attempt(attempts[-1])
        if attempts[-1].found is not None:
            break
    return Outcome(tuple(attempts))


def record(run: Run, rounds: int = 3, world_size: int = 3) -> Record:
    """What device functions and programs the case consists of."""
    kept = Record()
    plait.run_virtual(
        lambda group: run(group, rounds),
        world_size,
        device="cpu",
        check=False,
        rewrite_kernel=kept.rewrite_kernel,
        rewrite_program=kept.rewrite_program,
    )
    return kept


def check_mutants(
    run: Run,
    mutants: Sequence[Mutant],
    equivalents: Sequence[Equivalent] = (),
    schedules: int = 50,
    rounds: int = 3,
    world_size: int = 3,
    *,
    min_slots: int = 1,
    on_result: Callable[[MutantResult], Any] = lambda result: None,
) -> list[MutantResult]:
    """Explore every mutant. Equivalent ones are tried as well: finding one is a mistake, too."""
    results = []
    for mutant in mutants:
        outcome = explore(run, schedules, rounds, world_size, min_slots=min_slots, mutant=mutant)
        reason = next((each.reason for each in equivalents if each.covers(mutant.name)), "")
        results.append(MutantResult(mutant, outcome, reason))
        on_result(results[-1])
    return results


class _Stop(Exception):
    """Ends a run whose race has been found."""


class _StopAtRace(Observer):
    """Counts steps, and does not wait for the rounds to end once there is a race."""

    def __init__(self, detector: RaceDetector) -> None:
        self.detector, self.world = detector, None

    def world_started(self, world: Any) -> None:
        self.world = world

    def item_finished(self, item: Item) -> None:
        if self.detector.races:
            raise _Stop

    @property
    def steps(self) -> int:
        return 0 if self.world is None else self.world.virtual_device.steps


def _attempt(
    index: int, plan: Plan, run: Run, rounds: int, world_size: int, mutant: Mutant | None
) -> Attempt:
    detector = RaceDetector()
    watch = _StopAtRace(detector)
    found: Found | None = None
    report = ""
    try:
        plait.run_virtual(
            lambda group: run(group, rounds),
            world_size,
            plan.seed,
            device="cpu",
            schedule=plan.schedule,
            sm_slots=plan.sm_slots,
            check=False,  # a detector of our own listens, whose races outlive other errors
            observers=(detector, watch),
            rewrite_kernel=None if mutant is None else mutant.rewrite_kernel,
            rewrite_program=None if mutant is None else mutant.rewrite_program,
        )
    except _Stop:
        pass
    except DeadlockError as error:
        found, report = "deadlock", str(error)
    except WrongValueError as error:
        found, report = "wrong value", str(error)
    except (
        Exception
    ) as error:  # a rewrite that breaks the code itself shows nothing of the protocol
        found, report = "error", f"{type(error).__name__}: {error}"
    if detector.races and found != "error":
        found, report = "race", "\n".join(str(race) for race in detector.races)
    return Attempt(index, plan, watch.steps, found, report, len(detector.races))


__all__ = [
    "Attempt",
    "MutantResult",
    "Outcome",
    "Plan",
    "Run",
    "WrongValueError",
    "check_mutants",
    "explore",
    "plans",
    "record",
]
