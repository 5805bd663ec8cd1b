"""Every step of AG+GEMM's protocol is needed: without it, some schedule of few shows a mistake."""

import pytest

from tests.host.check.mutant_table import table, verify, verify_clean, verify_equivalents

OPERATOR = "ag_gemm"


@pytest.mark.parametrize("name", table(OPERATOR))
def test_mutant(name):
    verify(OPERATOR, name)


def test_equivalents_name_mutants():
    verify_equivalents(OPERATOR)


def test_the_table_covers_the_protocol():
    names = " ".join(table(OPERATOR))
    for step in (
        "_ag_gemm_kernel: wait 0 removed",
        "_ag_gemm_kernel: fence_proxy_async 0 removed",
        "begin: wait_all 0 epoch - 1",
        "begin: wait_all 0 first - 1",
        "begin: epoch 0 not advanced",
        "finish: fence_proxy_async 0 removed",
        "finish: debug_barrier 0 removed",
        "finish: atomic_add 0 acquire",
        "signal_all: atomic_xchg 0 relaxed",
        "signal_all: atomic_xchg 0 gpu",
        "signal_all: debug_barrier 0 removed",
        "signal_all: lanes 0 without the last rank",
        "finish: signal_all 0 removed",
        "wait_all: atomic_add 0 relaxed",
        "wait_all: atomic_add 0 gpu",
        "wait_all: debug_barrier 0 removed",
        "wait_all: lanes 0 without the last rank",
        "wait_all: loop 0 without the last rank",
        "wait: atomic_add 1 gpu",
        "program ag_gemm: signal 0 early",
        "program ag_gemm: stream wait 1 removed",
    ):
        assert step in names


def test_without_a_mutant_nothing_is_found():
    verify_clean(OPERATOR, 24)
