"""Runs a worker script in N processes that can meet through torch.distributed."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]

Outcomes = dict[str, list[str]]  # per scenario, per rank: "ok", or what it raised


def run_processes(
    script: Path, num_processes: int, folder: Path, *, timeout_s: float, **env: str
) -> Outcomes:
    """Run `script FOLDER`, a worker made of `worker_main`, in each process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_processes), str(script), str(folder)]
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    process = subprocess.Popen(
        command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The whole session: workers of a launcher that is killed would live on.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script.name} took over {timeout_s} s:\n{output[-6000:]}")
    if process.returncode:
        pytest.fail(f"{script.name} ended with {process.returncode}:\n{output[-6000:]}")
    ranks = [json.loads((folder / f"{r}.json").read_text()) for r in range(num_processes)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def check_outcome(outcomes: Outcomes, scenario: str) -> None:
    """Fail with the first traceback of a scenario that some rank did not finish."""
    for rank, outcome in enumerate(outcomes[scenario]):
        if outcome.startswith("skipped"):
            pytest.skip(outcome)
        assert outcome == "ok", f"{scenario} on rank {rank}:\n{outcome}"


def worker_main(scenarios: Mapping[str, Callable[[], None]], timeout_s: float) -> None:
    """In a worker: run the scenarios in order and write each one's outcome to FOLDER/RANK.json."""
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    outcomes = {}
    for name, scenario in scenarios.items():
        try:
            scenario()
            outcomes[name] = "ok"
        except pytest.skip.Exception as skipped:
            outcomes[name] = f"skipped: {skipped}"
        except Exception:
            outcomes[name] = traceback.format_exc()
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def process_group(**options: object) -> Iterator[None]:
    """torch.distributed over gloo, shut down at the end."""
    dist.init_process_group("gloo", **options)
    try:
        yield
    finally:
        dist.destroy_process_group()
