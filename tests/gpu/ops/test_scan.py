"""The scan engine on a GPU: every dtype, long rows over several blocks, more than 2^31 elements."""

import pytest
import torch

import plait
from plait.ops.scan import reference
from tests.host.ops.scan.scan_cases import NAMES, assert_alike, dtypes, layouts, results, values


@pytest.mark.parametrize("name", NAMES)
def test_layouts(name, device):
    for dtype in dtypes(name):
        for x in layouts(dtype, device).values():
            for dim in range(max(x.dim(), 1)):
                _compare(name, x, dim)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((70001,), 0), ((3, 50000), 1), ((50000, 3), 0), ((4, 3000, 96), 1), ((3000, 33), 1)],
)
@pytest.mark.parametrize("name", NAMES)
def test_long_rows(name, shape, dim, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = values(shape, dtype, device)
        x = 1 + (x - 1) / 256 if name == "cumprod" else x
        with plait.use("scan", device=device):
            first, second = (results(getattr(torch, name)(x, dim)) for _ in range(2))
        wide = results(getattr(torch, name)(x.double(), dim))
        aten = results(getattr(torch, name)(x, dim))
        for one, two, theirs, exact in zip(first, second, aten, wide, strict=True):
            assert torch.equal(one, two)
            assert_alike(name, one, theirs, exact)


@pytest.mark.parametrize("name", ["cumsum_", "cumprod_"])
def test_in_place(name, device):
    for shape, dim in (((300, 5000), 1), ((5000, 300), 0), ((300000,), 0), ((1000, 3), 1)):
        x = 1 + values(shape, torch.float32, device) / 4096
        want = getattr(x.double(), name)(dim)
        with plait.use("scan", device=device):
            assert getattr(x, name)(dim) is x
        assert torch.allclose(x.double(), want, rtol=1e-4)


def test_more_than_2_to_the_31_elements(device):
    x = torch.ones(2**31 + 5000, dtype=torch.int8, device=device)
    with plait.use("scan", device=device):
        rows = torch.cumsum(x[: 2**31 + 4096].view(-1, 4096), 1, dtype=torch.int8)
        assert torch.equal(rows[-1], rows[0])
        del rows
        values, indices = torch.cummax(x, 0)
    assert indices[-1].item() == x.numel() - 1
    assert values[-1].item() == 1


def test_offsets_beyond_2_to_the_31_in_a_small_view(device):
    whole = torch.empty(2**32, dtype=torch.int8, device=device)
    x = whole.as_strided((3, 50), (2**31 + 7, 1))
    x.copy_(torch.ones_like(x, memory_format=torch.contiguous_format))
    with plait.use("scan", device=device):
        for dim in (0, 1):
            got = torch.cumsum(x, dim)
            assert torch.equal(got, torch.cumsum(x.contiguous(), dim))


def _compare(name, x, dim):
    aten = results(getattr(torch, name)(x, dim))
    with plait.use("scan", device=x.device), plait.report() as report:
        ours = results(getattr(torch, name)(x, dim))
    assert "aten:" not in str(report)
    exact = results(getattr(reference, name)(x, dim))
    for mine, theirs, meant in zip(ours, aten, exact, strict=True):
        assert_alike(name, mine, theirs, meant)
