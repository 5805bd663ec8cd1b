"""The mutants of a case, for parametrized tests: each test tries one of them."""

from __future__ import annotations

from functools import lru_cache

from plait.check.explore import check_mutants, explore, record
from plait.check.mutants import Mutant, mutants_of
from plait.cli.check_cases import CASES

MAX_SCHEDULES = 50  # an operator's mutants must be found within these
EQUIVALENT_SCHEDULES = 7  # all policies once: what is listed as equivalent must not be found


@lru_cache
def table(operator: str) -> dict[str, Mutant]:
    """Mutants by name, from one clean run of the case."""
    case = CASES[operator]
    found = mutants_of(record(case.run, case.rounds, case.world_size))
    by_name = {mutant.name: mutant for mutant in found}
    assert len(by_name) == len(found), "two mutants have one name"
    return by_name


def verify(operator: str, name: str) -> None:
    """Fail unless the mutant is found, or is listed as equivalent and is not found."""
    case = CASES[operator]
    listed = any(each.covers(name) for each in case.equivalents)
    schedules = EQUIVALENT_SCHEDULES if listed else MAX_SCHEDULES
    (result,) = check_mutants(
        case.run,
        [table(operator)[name]],
        case.equivalents,
        schedules,
        case.rounds,
        case.world_size,
        min_slots=case.min_slots,
    )
    assert result.as_expected, f"{name}: {result.verdict}\n{result.outcome.attempts[-1]}"


def verify_part(operator: str, part: int, num_parts: int) -> None:
    """`verify` for every `num_parts`-th mutant: listing them all would slow down collecting."""
    for name in list(table(operator))[part::num_parts]:
        verify(operator, name)


def verify_equivalents(operator: str) -> None:
    """Fail if something is listed as equivalent that is no mutant."""
    for each in CASES[operator].equivalents:
        assert any(each.covers(name) for name in table(operator)), each.name


def verify_clean(operator: str, schedules: int) -> None:
    """Fail if a schedule finds something without a mutant."""
    case = CASES[operator]
    outcome = explore(case.run, schedules, case.rounds, case.world_size, min_slots=case.min_slots)
    assert outcome.finding is None, outcome.finding.report
    assert len({attempt.plan for attempt in outcome.attempts}) == schedules
    assert all(attempt.steps > 50 for attempt in outcome.attempts)
