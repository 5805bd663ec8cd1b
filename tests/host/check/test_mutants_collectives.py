"""The same for the plain collectives and the barrier."""

import pytest

from plait.check.explore import explore
from plait.cli.check_cases import CASES
from tests.host.check.mutant_table import table, verify

OPERATORS = ("barrier", "all_gather")


@pytest.mark.parametrize(
    ("operator", "name"), [(operator, name) for operator in OPERATORS for name in table(operator)]
)
def test_mutant(operator, name):
    verify(operator, name)


@pytest.mark.parametrize("operator", OPERATORS)
def test_equivalents_name_mutants(operator):
    for each in CASES[operator].equivalents:
        assert any(each.covers(name) for name in table(operator)), each.name


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_a_mutant_nothing_is_found(operator):
    case = CASES[operator]
    outcome = explore(case.run, 7, case.rounds, case.world_size)
    assert outcome.finding is None, outcome.finding.report
