"""Fixtures and rules for all tests; tests/README.md says what the folders mean."""

from __future__ import annotations

import os
import random
import statistics
import sys
import zlib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores already


def pytest_report_header(config: pytest.Config) -> list[str]:
    sizes = [len(path.read_text().splitlines()) for path in (ROOT / "plait").rglob("*.py")]
    versions = [f"torch {torch.__version__}", f"numpy {np.__version__}", f"triton {_triton()}"]
    return [
        ", ".join(versions),
        f"plait: {len(sizes)} files, median {statistics.median(sizes):g} lines, "
        f"longest {max(sizes)}",
    ]


def _triton() -> str:
    # The first distribution on the path is the one that would be imported.
    found = metadata.Distribution.discover(name="triton", path=sys.path)
    return next((each.version for each in found), "missing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if (ROOT / "tests" / "gpu") in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests put their tensors: the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the test's id only."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
