"""Worker processes: their answers, crashes, and that a program need not wait for them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from plait.runtime.compile_pool import CRASHED
from plait.runtime.compile_workers import CompileWorkers
from tests.host.runtime.worker_jobs import Crash, Fine, Target, Wrong
from tests.tiny.tree import ROOT


class Answers:
    def __init__(self) -> None:
        self.found = {}
        self._more = threading.Condition()

    def __call__(self, job, complaint):
        with self._more:
            self.found[job] = complaint
            self._more.notify_all()

    def wait_for(self, count):
        with self._more:
            assert self._more.wait_for(lambda: len(self.found) >= count, timeout=120), self.found
        return self.found


@pytest.mark.newest_triton
def test_answers_complaints_and_crashes():
    answers = Answers()
    workers = CompileWorkers("sm90", 2, answers)
    for number in range(4):
        workers.submit(Fine(number))
    workers.submit(Wrong("no such tile"))
    workers.submit(Crash(0))
    workers.submit(Target())
    for number in range(4, 8):
        workers.submit(Fine(number))
    found = answers.wait_for(11)
    workers.close()
    assert all(found[Fine(number)] == "" for number in range(8))
    assert found[Wrong("no such tile")] == "ValueError: no such tile"
    assert found[Crash(0)] == CRASHED
    assert found[Target()] == "ValueError: 90"
    before = threading.active_count()
    workers.close()
    assert threading.active_count() <= before


def test_a_python_that_cannot_be_started_is_a_complaint(monkeypatch):
    monkeypatch.setattr(sys, "executable", str(ROOT / "no-such-python"))
    answers = Answers()
    workers = CompileWorkers("sm90", 1, answers)
    workers.submit(Fine(1))
    assert "FileNotFoundError" in answers.wait_for(1)[Fine(1)]
    workers.close()


PROGRAM = """
import sys, time
from plait.runtime.compile_workers import CompileWorkers
from tests.host.runtime.worker_jobs import Fine
print("main module runs")
workers = CompileWorkers("sm90", 1, lambda job, complaint: None)
for number in range(100):
    workers.submit(Fine(number))
"""


def test_a_program_without_a_main_guard_runs_once_and_ends_at_once(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "]
    command[-1] += f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))"
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("main module runs") == 1
    assert time.monotonic() - start < 60
