"""What the tests of the overlapped operators share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
