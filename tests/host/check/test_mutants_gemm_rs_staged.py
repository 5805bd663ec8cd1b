"""Every step of GEMM+RS by copy engine is needed; see test_mutants_ag_gemm.py."""

import pytest

from tests.host.check.mutant_table import verify_clean, verify_equivalents, verify_part

OPERATOR, PARTS = "gemm_rs_staged", 4


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants(part):
    verify_part(OPERATOR, part, PARTS)


def test_equivalents_name_mutants():
    verify_equivalents(OPERATOR)


def test_without_a_mutant_nothing_is_found():
    verify_clean(OPERATOR, 9)
