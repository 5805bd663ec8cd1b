"""The scan engine under the samples of PyTorch's operator database."""

import pytest
import torch

from plait.ops.scan import scan
from tests.opinfo_harness import check, check_gradients

NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "cumulative_trapezoid")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
REASONS = {scan.UNUSUAL_DTYPE, scan.NARROWING, scan.WRONG_DIM, scan.MANY_DIMS, scan.TWO_STRIDES}


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    exact = name in ("cummax", "cummin")
    check(
        (name,), "scan", dtypes=DTYPES, count=8, device=device,
        exact=exact, share=0.8, reasons=REASONS,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, device):
    check_gradients((name,), "scan", device=device, count=2)
