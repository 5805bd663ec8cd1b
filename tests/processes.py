"""Runs a worker script in N processes that can meet through torch.distributed."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def run_ranks(
    script: Path,
    num_processes: int,
    folder: Path,
    *,
    timeout_s: float,
    victims: Sequence[int] = (),
    **env: str,
) -> dict[int, dict[str, str]]:
    """As `run_processes`, without a launcher, which would end all ranks when one dies.

    The `victims` must die of SIGKILL, and not be rank 0; per other rank what it wrote is returned.
    """
    everything = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_processes), **env,
    }  # fmt: skip
    logs = [folder / f"{rank}.log" for rank in range(num_processes)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            own = {**everything, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as output:
                command = [sys.executable, str(script), str(folder)]
                options = {"stdout": output, "stderr": subprocess.STDOUT}
                processes.append(
                    subprocess.Popen(command, env=own, start_new_session=True, **options)
                )
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(each.poll() is None for each in processes):
            time.sleep(0.05)
        codes = [each.poll() for each in processes]
    finally:
        for each in processes:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    wanted = [-signal.SIGKILL if rank in victims else 0 for rank in range(num_processes)]
    if codes != wanted:
        texts = [
            f"rank {r}:\n{log.read_text(errors='replace')[-3000:]}" for r, log in enumerate(logs)
        ]
        pytest.fail(
            f"{script.name} ended with {codes}, not {wanted}, within {timeout_s} s (None: not at "
            "all)\n" + "\n".join(texts)
        )
    survivors = [rank for rank in range(num_processes) if rank not in victims]
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in survivors}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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
def process_group(backend: str = "gloo", **options: object) -> Iterator[None]:
    """torch.distributed over a backend, shut down at the end."""
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()
