"""A process on each GPU, for every kind of process group. rank_worker.py says what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rank_worker
from tests.processes import Outcomes, check_outcome, run_processes, run_ranks

WORKER = Path(rank_worker.__file__)
ENV = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def outcomes(world_size: int, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("ranks")
    timeout_s = rank_worker.TIMEOUT_S + 30
    return run_processes(
        WORKER, world_size, folder, timeout_s=timeout_s, TEST_BACKEND=backend, **ENV
    )


@pytest.mark.parametrize("scenario", rank_worker.SCENARIOS)
def test_ranks(outcomes: Outcomes, scenario: str):
    check_outcome(outcomes, scenario)


def test_a_killed_rank(world_size: int, backend: str, tmp_path: Path):
    """The others raise PeerTimeoutError within the deadline, go on without it, and exit."""
    victim = world_size - 1
    results = run_ranks(
        WORKER, world_size, tmp_path, timeout_s=150, victims=[victim], TEST_VICTIM="1",
        TEST_BACKEND=backend, **ENV,
    )  # fmt: skip
    assert sorted(results) == list(range(victim))
    for rank, outcome in results.items():
        assert outcome == {"peer_that_dies": "ok"}, f"rank {rank}:\n{outcome}"
