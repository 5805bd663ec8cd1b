"""What the tests of the collectives share: an exact comparison, and rounds under hard schedules."""

from __future__ import annotations

import pytest
import torch

from plait.settings import override
from plait.testing.ranks import run_virtual

SCHEDULES = ("random", "late:0", "copies_last")


def assert_bitwise(got, want):
    """The same dtype, shape and bits, and contiguous."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.is_contiguous()
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, want)]
    wrong = (bits[0] != bits[1]).nonzero()
    assert not len(wrong), f"byte {wrong[0].item()} of {len(bits[0])} is the first of {len(wrong)}"


@pytest.fixture
def bitwise():
    return assert_bitwise


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.param


@pytest.fixture
def small_workspace():
    """Two regions of 2 KiB: calls of a few hundred elements run in slices."""
    with override(workspace_bytes=4096):
        yield


@pytest.fixture
def ranks_on():
    """`run_virtual` on the CPU, where kernels are interpreted and every access is checked."""

    def run(fn, world_size, seed=0, **options):
        return run_virtual(fn, world_size, seed, device="cpu", **options)

    return run
