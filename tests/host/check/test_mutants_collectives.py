"""The same for the plain collectives and the barrier."""

import pytest

from tests.host.check.mutant_table import verify_clean, verify_equivalents, verify_part

OPERATORS = ("barrier", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("operator", OPERATORS)
def test_mutants(operator, part):
    verify_part(operator, part, PARTS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_equivalents_name_mutants(operator):
    verify_equivalents(operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_a_mutant_nothing_is_found(operator):
    verify_clean(operator, 8)
