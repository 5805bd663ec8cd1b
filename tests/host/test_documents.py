"""The programs in README.md run, and print what it says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny.tree import ROOT

README = (ROOT / "README.md").read_text()
PROGRAM = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
LINE = re.compile(r"(lang/patterns\.py):\d+")  # moves with the sources
PROGRAMS = {
    "four virtual ranks": "layer.py",
    "two processes": "layer.py",
    "race": "broken/sum.py",
    "deadlock": "layer.py",
}


def run(folder: Path, name: str, code: str, *launcher: str) -> tuple[int, str]:
    path = folder / PROGRAMS[name]
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, *launcher, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def plain(text: str) -> str:
    return LINE.sub(r"\1:N", text.replace(str(ROOT), "..."))


def programs() -> dict[str, tuple[str, str]]:
    found = PROGRAM.findall(README)
    assert len(found) == len(PROGRAMS), "README.md has other programs: name them in PROGRAMS"
    return dict(zip(PROGRAMS, found, strict=True))


@pytest.mark.parametrize("name", ["four virtual ranks", "race", "deadlock"])
def test_program_prints_what_the_page_says(name: str, tmp_path: Path):
    code, expected = programs()[name]
    status, output = run(tmp_path, name, code)
    assert status == (0 if name == "four virtual ranks" else 1), output
    assert expected
    assert plain(output).endswith(plain(expected))


def test_the_deadlock_ends_by_deadline(tmp_path: Path):
    code, _ = programs()["deadlock"]
    expected = next(line for line in README.splitlines() if "PeerTimeoutError:" in line)
    expiring = code.replace('device="cpu")', 'device="cpu", deadline_ns_on_deadlock=1e12)')
    status, output = run(tmp_path, "deadlock", expiring)
    assert status == 1
    assert output.splitlines()[-1] == expected


def test_processes(tmp_path: Path):
    code, _ = programs()["two processes"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    on_cpu = code.replace("torch.cuda.is_available()", "False")  # there may not be two GPUs
    assert on_cpu != code
    status, output = run(tmp_path, "two processes", on_cpu, *launcher)
    assert status == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2: [32, 32], ran unfused" in output
