"""Softmax and the losses on a GPU: every dtype, rows of all kinds, over 2^31 elements."""

import math

import pytest
import torch
from torch.nn import functional as F

import plait
from plait.testing.compare import assert_close_to_fp64
from tests.host.ops.norm.softmax_cases import CASES, FLOATS, operands
from tests.host.ops.norm.test_softmax_opinfo import NAMES
from tests.opinfo_harness import check, check_gradients

aten = torch.ops.aten
DTYPES = (*FLOATS, torch.int64, torch.bool)
# One block a row, several rows a block, rows that do not fit, chunks of rows; odd sizes; columns.
SHAPES = [
    ((300, 513), 1), ((4000, 30), 1), ((500, 50_257), 1), ((3, 400_001), 1), ((70_000, 3), 1),
    ((513, 700), 0), ((60_000, 40), 0), ((6, 300, 20, 33), 1), ((32,), 0), ((), 0),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    # ATen's soft_margin_loss overflows in fp16 where the loss is a small number.
    soft = name.endswith("soft_margin_loss")
    dtypes = [each for each in DTYPES if not (soft and each == torch.float16)]
    check((name,), "softmax", dtypes=dtypes, count=10, device=device, share=0.8)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, device):
    check_gradients((name,), "softmax", device=device, count=3)


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_means_the_reference(case, dtype, device, seed):
    torch.manual_seed(seed)
    for shape, dim in SHAPES:
        x = (torch.randn(shape, device=device) * 3).to(dtype)
        given = operands(case, x, dim)
        with plait.use("softmax", device=device), plait.report() as report:
            ours = case.call(*given, dim)
        assert "aten:" not in str(report), report
        plain, exact = case.call(*given, dim), case.meaning(*given, dim)
        share = torch.finfo(dtype).eps * 8
        what = f"{case.name} {shape} {dim} {dtype}"
        assert_close_to_fp64(ours, exact, plain, what, plain_error_share=share)


def test_half_to_float(device):
    x = torch.randn(65, 1001, device=device, dtype=torch.float16)
    g = torch.randn(65, 1001, device=device)
    with plait.use("softmax", device=device), plait.report() as report:
        y = aten._softmax(x, 1, True)
        gradient = aten._softmax_backward_data(g, y, 1, torch.float16)
    assert "aten:" not in str(report), report
    torch.testing.assert_close(y, aten._softmax(x, 1, True))
    torch.testing.assert_close(gradient, aten._softmax_backward_data(g, y, 1, torch.float16))


def test_infinities_and_nan(device):
    x = torch.zeros(8, 100_003, device=device)
    x[1], x[2, 3], x[3, 4], x[4, -1] = -math.inf, math.nan, math.inf, -math.inf
    x[5], x[6, 2], x[7] = math.inf, -math.inf, -math.inf
    x[6, 3], x[7, 11] = math.inf, 5.0
    for each in (x, x[:, :1000], x[:, :1000].t().contiguous().t()):
        for case in CASES[:3]:
            with plait.use("softmax", device=device):
                ours = case.call(each, 1)
            torch.testing.assert_close(ours, case.call(each, 1), equal_nan=True)


@pytest.mark.parametrize("shape", [(66_001, 32_768), (3, 2**30)])
def test_over_2_31_elements(shape, device):
    """The last row and a row beyond 2^31 are right, forward and backward."""
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    x[-1, -1], x[-1, 5] = 3.0, 2.0
    t = torch.full(shape[:1], shape[1] - 1, device=device)
    with plait.use("softmax", device=device), plait.report() as report:
        y = aten._log_softmax(x, 1, False)
        loss, _ = aten.nll_loss_forward(y, t, None, 0, -100)
        total = torch.ones((), dtype=y.dtype, device=device)
        g = aten.nll_loss_backward(total, y, t, None, 2, -100, total)
        gradient = aten._log_softmax_backward_data(g, y, 1, torch.bfloat16)
    assert "aten:" not in str(report), report
    for row in (0, shape[0] - 1):
        exact = x[row].double().log_softmax(0)
        torch.testing.assert_close(y[row].double(), exact, rtol=1e-2, atol=1e-3)
        assert loss[row].item() == -y[row, -1].item()
        assert g[row, -1].item() == -1.0
        assert g[row].count_nonzero().item() == 1
        meant = exact.exp()
        meant[-1] -= 1
        torch.testing.assert_close(gradient[row].double(), meant, rtol=1e-2, atol=1e-6)


def test_small_views_with_far_offsets(device):
    memory = torch.empty(2**32 + 64, dtype=torch.bfloat16, device=device)
    for shape, strides in (((2, 33), (2**32, 1)), ((33, 2), (1, 2**32)), ((2, 2), (1, 2**31))):
        x = memory.as_strided(shape, strides)
        x.copy_(torch.randn(shape))
        with plait.use("softmax", device=device), plait.report() as report:
            ours = x.softmax(1), x.softmax(0), F.mse_loss(x, x.flip(0), reduction="none")
        assert "aten:" not in str(report), report
        near = x.contiguous()
        plain = near.softmax(1), near.softmax(0), F.mse_loss(near, near.flip(0), reduction="none")
        for mine, meant in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, meant)
