"""Several processes, on one GPU if there are too few; process_worker.py has the scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.process_worker import SCENARIOS
from tests.processes import Outcomes, check_outcome, run_processes


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_processes(
        Path(__file__).with_name("process_worker.py"),
        request.param,
        tmp_path_factory.mktemp("ranks"),
        timeout_s=290,
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
        TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes(outcomes: Outcomes, scenario: str):
    check_outcome(outcomes, scenario)
