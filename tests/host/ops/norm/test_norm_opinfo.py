"""Norms under the samples of PyTorch's operator database."""

import pytest
import torch

from tests.opinfo_harness import check, check_gradients

DTYPES = (torch.float32, torch.bfloat16)
NAMES = (
    "native_layer_norm", "nn.functional.layer_norm", "nn.functional.group_norm",
    "nn.functional.batch_norm", "nn.functional.instance_norm", "native_batch_norm",
    "_native_batch_norm_legit", "_batch_norm_with_update",
)  # fmt: skip
# Into results that it resizes ATen's batch norm on the CPU computes from memory nobody has written.
KINDS = ("forward", "inplace", "backward", "wrong")


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    kinds = KINDS if "batch_norm" in name else (*KINDS, "out")
    check((name,), "norm", dtypes=DTYPES, count=8, device=device, share=0.8, kinds=kinds)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, device):
    check_gradients((name,), "norm", device=device, count=3)
