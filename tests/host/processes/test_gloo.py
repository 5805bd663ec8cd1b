"""CPU processes over gloo: 2 ranks, and 3 with PLAIT_DEBUG=1. gloo_worker.py has the scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from plait import Group
from plait.errors import GroupError
from tests.host.processes.gloo_worker import SCENARIOS
from tests.processes import Outcomes, check_outcome, run_processes


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    script = Path(__file__).with_name("gloo_worker.py")
    folder = tmp_path_factory.mktemp("ranks")
    debug = str(int(request.param == 3))
    return run_processes(
        script, request.param, folder, timeout_s=60, PLAIT_DEBUG=debug, PLAIT_DEADLINE_S="15"
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes(outcomes: Outcomes, scenario: str):
    check_outcome(outcomes, scenario)


def test_without_torch_distributed():
    assert not dist.is_initialized()
    with pytest.raises(GroupError, match="init_process_group"):
        Group.from_process_group()
