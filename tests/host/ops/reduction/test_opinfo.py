"""The reduction engine under the samples of PyTorch's operator database."""

import pytest
import torch

from plait.ops.reduction import reduction, specs
from tests.opinfo_harness import check, check_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
NAMES = (
    "sum", "nansum", "prod", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "aminmax",
    "any", "all", "count_nonzero", "var", "std", "var_mean", "std_mean", "linalg.vector_norm",
    "logsumexp", "dot", "vdot", "trace", "norm",
)  # fmt: skip
REASONS = {
    reduction.UNUSUAL_DTYPE,
    reduction.REFUSED,
    reduction.EMPTY,
    specs.WARNS,
    specs.NO_DIMS,
    specs.NARROWING,
    specs.FP64_POWER,
}


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    check((name,), "reduction", dtypes=DTYPES, count=4, device=device, share=0.7, reasons=REASONS)


@pytest.mark.parametrize("name", [each for each in NAMES if "any" not in each and each != "all"])
def test_gradients(name, device):
    if name not in ("argmax", "argmin", "count_nonzero"):
        check_gradients((name,), "reduction", device=device, count=1)
