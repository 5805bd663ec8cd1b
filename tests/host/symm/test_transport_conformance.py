"""One list of checks for all transports; tests/gpu runs it for those that need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import plait
from plait import Group
from tests.host.symm.transport_checks import CHECKS
from tests.processes import check_outcome, run_processes


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_virtual(name: str, world_size: int):
    plait.run_virtual(lambda group: CHECKS[name](group.transport), world_size, device="cpu")


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("link", ["pcie", "paced:360"])
def test_emulated(name: str, link: str):
    group = Group.emulated(3, link=link, device="cpu")
    CHECKS[name](group.transport)
    group.close()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    script = Path(__file__).with_name("transport_checks.py")
    return run_processes(script, 3, tmp_path_factory.mktemp("ranks"), timeout_s=60)


@pytest.mark.parametrize("name", CHECKS)
def test_processes(name: str, outcomes: dict[str, list[str]]):
    check_outcome(outcomes, name)
