"""The cases of ranks with real peers, on virtual ranks: they must not break first on a GPU."""

import pytest

import plait
from tests import rank_cases

CASES = {
    "barriers": lambda group: rank_cases.barriers(group, 3),
    "dtypes": lambda group: rank_cases.every_dtype(group, 1),
    "rounds": lambda group: rank_cases.many_rounds(group, 4),
    "gradients": lambda group: rank_cases.gradients(group, 1),
    "subgroups": lambda group: rank_cases.subgroups(group, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_case_on_virtual_ranks(case):
    plait.run_virtual(CASES[case], 2, device="cpu")
