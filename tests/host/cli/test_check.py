"""`plait check`: tables and exit codes, on the barrier, which is small."""

import pytest

from plait.check.mutants import Equivalent
from plait.cli import check_cases
from plait.cli.main import main

pytest.importorskip("rich")


def test_a_clean_operator(capsys):
    assert main(["check", "barrier", "--ranks", "2", "--schedules", "3"]) == 0
    out = capsys.readouterr().out
    assert "copies_last seed 0" in out
    assert out.count("nothing") == 3


def test_with_mutants(capsys):
    assert main(["check", "barrier", "--ranks", "2", "--schedules", "3", "--mutants"]) == 0
    out = capsys.readouterr().out
    assert "barrier: signal_all 0 removed" in out
    assert "mutants are as they should be" in out


def test_a_wrong_table_fails(capsys, monkeypatch):
    wrong = check_cases.Case(
        check_cases.CASES["barrier"].run,
        equivalents=(Equivalent("barrier: signal_all 0 removed", "it is not"),),
    )
    monkeypatch.setitem(check_cases.CASES, "barrier", wrong)
    assert main(["check", "barrier", "--ranks", "2", "--schedules", "3", "--mutants"]) == 1
    out = capsys.readouterr().out
    assert "found, but listed as equivalent" in out
    assert "survived" in out  # the two that were listed before
    assert "FAILED: 3 of" in out


def test_a_broken_operator_fails(capsys, monkeypatch):
    def run(group, rounds):
        if group.rank == 0:
            group.barrier()

    monkeypatch.setitem(check_cases.CASES, "barrier", check_cases.Case(run))
    assert main(["check", "barrier", "--ranks", "2", "--schedules", "4"]) == 1
    assert "FAILED: deadlock" in capsys.readouterr().out


def test_an_unknown_operator(capsys):
    assert main(["check", "nothing"]) == 1
    assert "ag_gemm" in capsys.readouterr().err
