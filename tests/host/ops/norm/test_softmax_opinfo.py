"""Softmax and the losses under the samples of PyTorch's operator database."""

import pytest
import torch

from tests.opinfo_harness import check, check_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
NAMES = (
    "softmax", "log_softmax", "nn.functional.softmin", "nn.functional.cross_entropy",
    "nn.functional.nll_loss", "nn.functional.mse_loss", "nn.functional.smooth_l1_loss",
    "nn.functional.huber_loss", "nn.functional.soft_margin_loss",
    "nn.functional.binary_cross_entropy", "nn.functional.binary_cross_entropy_with_logits",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    check((name,), "softmax", dtypes=DTYPES, count=8, device=device, share=0.8)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, device):
    check_gradients((name,), "softmax", device=device, count=3)
