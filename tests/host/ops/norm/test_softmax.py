"""Softmax and its backward against fp64: every way through a row, every layout, odd values."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import plait
from plait.ops.norm import rows, softmax, softmax_backward
from plait.testing.compare import assert_close_to_fp64
from tests.host.ops.norm.softmax_cases import CASES, FLOATS, LAYOUTS, operands

aten = torch.ops.aten
INF, NAN = math.inf, math.nan

# Rows a block and elements a step; how many steps make a chunk of its own.
FORCED = {
    "chosen": None,
    "two rows, whole": (2, 64, 0),
    "step by step": (2, 4, 0),
    "many rows": (16, 2, 0),
    "in chunks": (2, 4, 2),
    "one row": (1, 8, 0),
    "one row in chunks": (1, 8, 1),
}


@pytest.fixture
def forced(request, monkeypatch):
    found = FORCED[request.param]
    if found is not None:
        num_rows, block, steps = found

        def tile(layout, *args, **kwargs):
            return rows.tile_of(layout, num_rows, block, 1)

        def chunks(layout, tile, **kwargs):
            length = steps * tile.block or layout.size
            return -(-layout.size // length), length

        monkeypatch.setattr(softmax, "row_tile", tile)
        monkeypatch.setattr(softmax_backward, "row_tile", tile)
        monkeypatch.setattr(softmax, "row_chunks", chunks)
    return request.param


def served(call, *args):
    device = next(each.device for each in args if isinstance(each, torch.Tensor))
    with plait.use("softmax", device=device), plait.report() as report:
        result = call(*args)
    assert "aten:" not in str(report), report
    return result


def agrees(case, x, dim, what):
    given = operands(case, x, dim)
    ours, plain = served(case.call, *given, dim), case.call(*given, dim)
    assert ours.stride() == plain.stride(), what
    share = torch.finfo(x.dtype).eps * 8  # of few elements, on which plain torch may be lucky
    assert_close_to_fp64(ours, case.meaning(*given, dim), plain, what, plain_error_share=share)


@pytest.mark.parametrize("forced", FORCED, indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_means_the_reference(case, forced, seed):
    torch.manual_seed(seed)
    for number, (name, make) in enumerate(LAYOUTS.items()):
        x = make().to(FLOATS[number % 4])
        for dim in range(max(x.dim(), 1)) if x.numel() else ():
            agrees(case, x, dim, f"{case.name} {name} {x.dtype} {dim}")


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_every_dtype_of_long_rows(case, seed):
    torch.manual_seed(seed)
    for dtype in FLOATS:
        agrees(case, torch.randn(2, 140_001).to(dtype), 1, f"{case.name} {dtype}")


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["no rows", "empty rows"])
def test_empty(case, name):
    x = LAYOUTS[name]()
    for dim in (0, 1):
        given = operands(case, x, dim)
        ours, plain = served(case.call, *given, dim), case.call(*given, dim)
        assert ours.shape == plain.shape
        assert ours.stride() == plain.stride()


@pytest.mark.parametrize("forced", FORCED, indirect=True)
@pytest.mark.parametrize("case", CASES[:3], ids=lambda each: each.name)
def test_infinities_and_nan(case, forced):
    """Those of ATen, at the same places; what pads a tile adds none and hides none."""
    x = torch.zeros(8, 13)
    x[1] = -INF
    x[2, 3], x[3, 4], x[4, 12] = NAN, INF, -INF
    x[5], x[6, 2], x[7] = INF, -INF, -INF
    x[6, 3], x[7, 11] = INF, 5.0
    for each, dim in ((x, 1), (x.t(), 0), (x.t().contiguous(), 0)):
        ours, plain = served(case.call, each, dim), case.call(each, dim)
        torch.testing.assert_close(ours, plain, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_far_below_the_maximum():
    """exp far from 0 keeps its digits, down to numbers below 2^-126."""
    x = -torch.linspace(0, 103, 500)
    ours = served(aten._softmax, x, 0, False).double()
    exact = x.double().softmax(0)
    unit = torch.clamp(exact * 2.0**-23, min=2.0**-149)
    assert ((ours - exact).abs() / unit).max() <= 4


def test_O08_transposed_operands_and_an_expanded_gradient():
    """flagos-ai/Torch-FL#171: kernels that take every operand for contiguous."""
    for dim in (0, 1):
        x = torch.randn(32, 32).t().requires_grad_()
        y = served(torch.softmax, x, dim)
        torch.testing.assert_close(y.double(), x.detach().double().softmax(dim))
        with plait.use("softmax", device=x.device):
            (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.abs().max() < 1e-6


def test_O55_rows_of_minus_infinity():
    """pytorch/pytorch#131060: 0 where the operator says so, NaN in plain softmax."""
    x = torch.zeros(3, 5)
    x[1] = -INF
    assert torch.equal(served(aten._safe_softmax, x, 1)[1], torch.zeros(5))
    assert served(torch.softmax, x, 1)[1].isnan().all()
    q = torch.randn(1, 1, 3, 8)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    with sdpa_kernel(SDPBackend.MATH):
        attended = served(lambda q: F.scaled_dot_product_attention(q, q, q, mask), q)
    assert torch.equal(attended[0, 0, 1], torch.zeros(8))
    assert attended.isfinite().all()


def test_wrong_calls_are_atens(device):
    x = torch.randn(3, 4, device=device)
    with plait.use("softmax", device=device):
        with pytest.raises(IndexError, match="Dimension out of range"):
            x.softmax(2)
        with pytest.raises((RuntimeError, NotImplementedError)):
            aten._softmax(torch.ones(3, dtype=torch.int64, device=device), 0, False)
        assert F.softmax(torch.ones(4, dtype=torch.int64, device=device), 0, dtype=torch.float32)[
            0
        ].item() == pytest.approx(0.25)


def test_out_has_strides_of_its_own():
    x, out = torch.randn(5, 6), torch.full((6, 10), NAN).t()[::2]
    assert served(lambda x: torch.softmax(x, 1, out=out), x) is out
    torch.testing.assert_close(out, x.softmax(1))
