"""Exploring, with the barrier as the operator: small, and its protocol is known."""

import ast

import pytest

from plait.check.explore import (
    Attempt,
    MutantResult,
    Outcome,
    Plan,
    WrongValueError,
    check_mutants,
    explore,
    plans,
    record,
)
from plait.check.mutants import (
    Equivalent,
    Mutant,
    keep_epoch,
    mutants_of,
    offset_argument,
    remove_call,
    weaken,
)
from plait.cli.check_cases import CASES

RUN = CASES["barrier"].run


def found(mutant, schedules=3):
    outcome = explore(RUN, schedules, 3, 2, mutant=mutant)
    return outcome.finding


def rewritten(rewrite, source):
    definition = ast.parse(source).body[0]
    return ast.unparse(ast.fix_missing_locations(rewrite(definition)))


def test_plans_are_distinct_and_hold_every_policy():
    chosen = list(plans(50, 3))
    assert len(set(chosen)) == 50
    first = {plan.schedule for plan in chosen[:8]}
    assert first == {
        "random", "copies_last", "consumer_first", "waiter_first", "late:0", "late:1", "late:2",
    }  # fmt: skip
    assert any(plan.sm_slots == 1 for plan in chosen[:8])
    assert not any(plan.sm_slots == 1 for plan in plans(50, 3, min_slots=2))


def test_a_correct_operator_survives_all_schedules():
    outcome = explore(RUN, 8, 3, 2)
    assert outcome.finding is None
    assert [attempt.index for attempt in outcome.attempts] == list(range(8))


def test_a_race_is_reported_with_its_schedule():
    mutant = Mutant("m", "", remove_call("barrier", "wait_all"))
    finding = found(mutant)
    assert finding.found == "race"
    assert finding.plan == Plan("random", 0)
    assert "race" in finding.report
    assert "copy engine" in finding.report


def test_a_deadlock_is_reported():
    finding = found(Mutant("m", "", remove_call("barrier", "signal_all")))
    assert finding.found == "deadlock"
    assert "waits" in finding.report


def test_a_wrong_value_is_reported():
    def run(group, rounds):
        if group.rank == 1:
            raise WrongValueError("all of it")

    assert explore(run, 3, 1, 2).finding.report == "all of it"
    assert explore(run, 3, 1, 2).finding.found == "wrong value"


def test_a_rewrite_that_breaks_the_code_counts_as_an_error():
    mutant = Mutant("m", "", offset_argument("barrier", "wait_all", 0, "x"))
    assert found(mutant).found == "error"
    (result,) = check_mutants(RUN, [mutant], (), 1, 1, 2)
    assert not result.as_expected


def test_exploring_stops_at_the_first_finding():
    seen = []
    mutant = Mutant("m", "", weaken("signal_all", "atomic_xchg", "sem", "relaxed"))
    outcome = explore(RUN, 9, 3, 2, mutant=mutant, on_attempt=seen.append)
    assert len(outcome.attempts) == 1 == len(seen)


def test_mutants_are_discovered_from_what_ran():
    names = [mutant.name for mutant in mutants_of(record(RUN, 1, 2))]
    assert len(set(names)) == len(names)
    for name in (
        "barrier: signal_all 0 removed",
        "barrier: wait_all 0 epoch - 1",
        "wait_all: loop 0 without the last rank",
        "barrier: epoch 0 not advanced",
        "wait: atomic_add 1 relaxed",
        "program barrier: launch 0 removed",
    ):
        assert name in names
    # The failure path did not run, and addresses are no protocol.
    assert not any(name.startswith(("_give_up", "word_ptr", "program (case)")) for name in names)


@pytest.mark.parametrize(
    ("finds", "reason", "verdict", "as_expected"),
    [
        ("race", "", "found", True),
        (None, "", "survived", False),
        (None, "why", "equivalent", True),
        ("race", "why", "found, but listed as equivalent", False),
        ("error", "", "found", False),
    ],
)
def test_verdicts(finds, reason, verdict, as_expected):
    outcome = Outcome((Attempt(0, Plan("random", 0), 1, finds),))
    result = MutantResult(Mutant("m", ""), outcome, reason)
    assert (result.verdict, result.as_expected) == (verdict, as_expected)


def test_equivalents_cover_names():
    assert Equivalent("finish: atomic 0 *", "").covers("finish: atomic 0 cta")
    assert not Equivalent("finish: atomic 0", "").covers("finish: atomic 0 cta")


def test_rewrites():
    source = (
        "def f(ctx):\n    ok = wait(ctx, 1, e, sem='acquire') & wait(ctx, 2, get_epoch(ctx) + 1)"
    )
    assert "True & wait(ctx, 2" in rewritten(remove_call("f", "wait"), source)
    assert "wait(ctx, 1, e + -1" in rewritten(offset_argument("f", "wait", 2, -1), source)
    assert "sem='relaxed'" in rewritten(weaken("f", "wait", "sem", "relaxed"), source)
    assert "get_epoch(ctx) + 0" in rewritten(keep_epoch("f"), source)
    assert rewritten(remove_call("g", "wait"), source) == ast.unparse(ast.parse(source))
