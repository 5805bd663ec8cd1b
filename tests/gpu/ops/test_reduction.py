"""The reduction engine on a GPU: the host's tests with every dtype, and more than 2^31 elements."""

import pytest
import torch

import plait
from tests.host.ops.reduction.reduction_cases import CASES, LAYOUTS, dims, layout
from tests.host.ops.reduction.test_opinfo import NAMES, REASONS
from tests.host.ops.reduction.test_rules import *  # noqa: F403
from tests.host.ops.reduction.test_tiles import agrees
from tests.opinfo_harness import check, check_gradients

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
FAR = 2**31 + 5


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    check((name,), "reduction", dtypes=DTYPES, count=40, device=device, share=0.7, reasons=REASONS)


@pytest.mark.parametrize("name", [each for each in NAMES if each not in ("any", "all")])
def test_gradients(name, device):
    if name not in ("argmax", "argmin", "count_nonzero"):
        check_gradients((name,), "reduction", device=device)


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_every_layout(case, device):
    for name in LAYOUTS:
        for dtype in case.dtypes[:3]:
            x = layout(name, dtype, device)
            for dim in dims(case, x.dim()):
                agrees(case, x, dim, f"{case.name} {name} {dtype} {dim}")


@pytest.mark.parametrize("shape", [(70001,), (3, 70001), (70001, 3), (5, 1 << 18), (1 << 18, 5)])
def test_shares_of_a_result(shape, device):
    """Whole numbers, whose sums are exact whatever the order."""
    x = torch.randint(-2, 3, shape, device=device).float()
    for dim in range(len(shape)):
        with plait.use("reduction", device=device):
            found = (x.sum(dim), x.argmax(dim), x.amin(dim), x.count_nonzero(dim), x.var(dim))
        assert torch.equal(found[0], x.double().sum(dim).float())
        assert torch.equal(found[1], x.argmax(dim))
        assert torch.equal(found[2], x.amin(dim))
        assert torch.equal(found[3], x.count_nonzero(dim))
        torch.testing.assert_close(found[4], x.double().var(dim).float(), rtol=1e-5, atol=1e-6)


def test_o03_more_than_2_31_elements(device):
    x = torch.zeros(65536, 32769, dtype=torch.int8, device=device)
    x[-1, 7] = 3
    with plait.use("reduction", device=device):
        assert x.amax(1)[-1].item() == 3
        assert x.amax().item() == 3
        assert x.sum().item() == 3
        assert x.argmax().item() == 65535 * 32769 + 7
        assert x.amax(0)[7].item() == 3
        assert x.count_nonzero().item() == 1
        assert x.max(1).indices[-1].item() == 7


def test_o04_offsets_beyond_2_31_in_a_small_view(device):
    x = torch.zeros(FAR, dtype=torch.int8, device=device)
    far = x.as_strided((2, 3), (FAR - 3, 1))
    far[1, 2] = 5
    with plait.use("reduction", device=device):
        assert far.sum(1).tolist() == [0, 5]
        assert far.amax(0).tolist() == [0, 0, 5]
        assert far.argmax().item() == 5
