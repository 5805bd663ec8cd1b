"""Norms on a GPU: sizes of every path, cuDNN's names, more than 2^31 elements, offsets beyond."""

import pytest
import torch
from torch.nn import functional as F

import plait
from tests import norm_cases
from tests.norm_cases import random

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)


@DTYPES
@pytest.mark.parametrize(
    "shape", [(512, 4096), (300, 1000), (1000, 64), (70, 10000), (37, 20000), (3, 262144)]
)
def test_layer_norm(dtype, shape, device):
    x = random(*shape, dtype=dtype, device=device)
    norm_cases.layer_norm(x, x[0].clone(), x[1].clone())


@DTYPES
@pytest.mark.parametrize("shape", [(4, 64, 32, 32), (2, 48, 100, 100), (16, 64, 128, 128)])
def test_group_norm(dtype, shape, device):
    weight = random(shape[1], dtype=dtype, device=device)
    norm_cases.group_norm(random(*shape, dtype=dtype, device=device), 16, weight, weight)


@DTYPES
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(dtype, training, device):
    parameters = FP32 if dtype in (BF16, FP16) else dtype
    for shape in ((16, 64, 56, 56), (1000, 200), (16, 33, 1000), (64, 256, 7, 7)):
        x = random(*shape, dtype=dtype, device=device) * 3 + 5
        norm_cases.batch_norm(x, parameters, training=training)
        if x.dim() == 4:
            last = x.to(memory_format=torch.channels_last)
            norm_cases.batch_norm(last, parameters, training=training)


@DTYPES
def test_weight_norm(dtype, device):
    for shape, dim in (((4096, 1024), 0), ((4096, 1024), 1), ((512, 256, 3, 3), 0)):
        norm_cases.weight_norm(random(*shape, dtype=dtype, device=device), dim)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_functions_under_any_mix_of_forward_and_backward(dtype, training, device):
    """Whoever serves the forward, its saved tensors do for the other's backward."""
    x = random(16, 32, 14, 14, dtype=dtype, device=device).requires_grad_()
    weight, bias = (torch.rand(32, device=device).requires_grad_() for _ in range(2))

    def call():
        y = F.batch_norm(x, torch.zeros_like(bias), torch.ones_like(bias), weight, bias, training)
        return y + F.group_norm(x.float(), 8, weight, bias).to(dtype)

    def gradients(y):
        incoming = random(*y.shape, dtype=y.dtype, device=device)
        return torch.autograd.grad(y, (x, weight, bias), incoming)

    wanted = gradients(call())
    with plait.use("norm", device=device):
        ours = call()
        both = gradients(call())
    forward_only = gradients(ours)
    theirs = call()
    with plait.use("norm", device=device):
        backward_only = gradients(theirs)
    for found in (both, forward_only, backward_only):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_more_than_2_to_31_elements(device):
    x = torch.randn(2**19 + 3, 4096, dtype=BF16, device=device)
    assert x.numel() > 2**31
    weight = torch.rand(4096, dtype=BF16, device=device)
    y, mean, rstd = norm_cases.ours("native_layer_norm", x, [4096], weight, weight, 1e-5)
    last = norm_cases.plain("native_layer_norm", x[-64:].clone(), [4096], weight, weight, 1e-5)
    for got, wanted in zip((y, mean, rstd), last, strict=True):
        torch.testing.assert_close(got[-64:], wanted)
    args = (y, x, [4096], mean, rstd, weight, weight, [True] * 3)
    dx, _, dbias = norm_cases.ours("native_layer_norm_backward", *args)
    tail = (y[-64:], x[-64:], [4096], mean[-64:], rstd[-64:], weight, weight, [True] * 3)
    wanted = norm_cases.plain("native_layer_norm_backward", *tail)
    torch.testing.assert_close(dx[-64:], wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dbias.float(), y.sum(0, dtype=FP32), rtol=2e-2, atol=50.0)


def test_small_views_with_offsets_beyond_2_to_31(device):
    base = torch.empty(8, 2**29, dtype=torch.int8, device=device).view(BF16)
    x = base[:, :: 2**20][:, :256]
    x.copy_(random(8, 256, dtype=BF16, device=device))
    weight = torch.rand(256, dtype=BF16, device=device)
    norm_cases.layer_norm(x, weight, weight)


def test_repeats_bitwise(device):
    x = random(3000, 1024, dtype=BF16, device=device)
    weight = torch.rand(1024, dtype=BF16, device=device)
    stats = norm_cases.plain("native_layer_norm", x, [1024], weight, weight, 1e-5)[1:]
    args = (x, x, [1024], *stats, weight, weight, [True] * 3)
    first = norm_cases.ours("native_layer_norm_backward", *args)
    for _ in range(5):
        again = norm_cases.ours("native_layer_norm_backward", *args)
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("norm", [plait.rms_norm, plait.layer_norm])
def test_residual_forms_are_planned_and_captured(norm, device):
    x, residual = (random(64, 4096, dtype=BF16, device=device) for _ in range(2))
    weight = torch.rand(4096, dtype=BF16, device=device)
    wanted = norm(x, weight, residual=residual, impl="reference")
    for _ in range(3):
        got = norm(x, weight, residual=residual)
        torch.testing.assert_close(got[0], wanted[0], rtol=2e-2, atol=2e-2)
        assert got[1].equal(wanted[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = norm(x, weight, residual=residual)
    graph.replay()
    assert y.equal(got[0])
    assert total.equal(got[1])
