"""Tests here are skipped where there are fewer GPUs than ranks; each says how many it found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        if HERE in item.path.parents:
            call = getattr(item, "callspec", None)
            needed = 2 if call is None else call.params.get("world_size", 2)
            if found < needed:
                reason = f"needs {needed} GPUs, found {found}"
                item.add_marker(pytest.mark.skip(reason=reason))
