"""`plait.matmul` on a GPU: every dtype and layout against fp64, planned calls, host time."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.ops.matmul.configs import Config
from plait.ops.matmul.reference import matmul_reference
from plait.runtime.timing import host_us
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    (1, 64, 64),
    (17, 130, 96),
    (128, 256, 512),
    (300, 520, 1032),
    (64, 4096, 4096),
    (5, 7, 9),
]


def _randn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() @ weight.cpu().double().mT


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    m, n, k = shape
    x, weight = _randn((m, k), dtype, device), _randn((n, k), dtype, device)
    bias = _randn((n,), dtype, device)
    for each in (weight, weight.t().contiguous().t()):
        out = plait.matmul(x, each, bias, impl="fused")
        plain = torch.nn.functional.linear(x, weight, bias)
        exact = _exact(x, weight) + bias.cpu().double()
        assert_close_to_fp64(out.cpu(), exact, plain.cpu())


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_split_sums_are_the_same_every_time(splits: int, device: torch.device) -> None:
    x, weight = (
        _randn((40, 4096), torch.bfloat16, device),
        _randn((264, 4096), torch.bfloat16, device),
    )
    config = Config(64, 64, 128, 4, 3, 8, True, splits)
    first = plait.matmul(x, weight, impl="fused", config=config)
    assert_close_to_fp64(first.cpu(), _exact(x, weight), (x @ weight.t()).cpu())
    for _ in range(5):
        assert_bitwise(plait.matmul(x, weight, impl="fused", config=config), first)


def test_a_large_product_is_bitwise_that_of_torch(device: torch.device) -> None:
    x, weight = (_randn((s, 2048), torch.bfloat16, device) for s in (1024, 1536))
    assert_bitwise(plait.matmul(x, weight, impl="fused"), x @ weight.t())


@pytest.mark.parametrize("transposed", [False, True])
def test_batches(transposed: bool, device: torch.device) -> None:
    x = _randn((5, 130, 256), torch.bfloat16, device)
    weight = _randn((5, 72, 256), torch.bfloat16, device)
    if transposed:
        weight = weight.mT.contiguous().mT
    out = plait.matmul(x, weight, impl="fused")
    assert_close_to_fp64(out.cpu(), _exact(x, weight), torch.bmm(x, weight.mT).cpu())


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
@pytest.mark.parametrize("fast", [False, True])
def test_fp8(kind: str, fast: bool, device: torch.device) -> None:
    m, n, k = 130, 272, 512
    x, weight = (_randn((s, k), torch.float8_e4m3fn, device) for s in (m, n))
    shapes = {
        "tensor": ((1,), (1,)),
        "rows": ((m,), (n,)),
        "blocks": ((m, k // 128), (-(-n // 128), k // 128)),
    }[kind]  # fmt: skip
    x_scale, w_scale = (torch.rand(shape, device=device) + 0.5 for shape in shapes)
    out = plait.matmul(
        x, weight, x_scale=x_scale, weight_scale=w_scale, impl="fused", fast_accum=fast
    )
    kinds = "blocks" if kind == "blocks" else "rows"
    scaling = (kinds, x_scale.cpu(), [w_scale.cpu()])
    exact = matmul_reference(x.cpu(), [weight.cpu()], scaling=scaling, out_dtype=torch.float32)
    error = (out.cpu().double() - exact.double()).norm() / exact.double().norm()
    # bf16 rounds the result to 2^-9 at worst; the short accumulator alone errs as much again.
    assert error < (2**-8 if fast else 2**-9)


def test_int8_is_exact(device: torch.device) -> None:
    x, weight = (
        torch.randint(-128, 128, (s, 512), dtype=torch.int8, device=device) for s in (130, 272)
    )
    out = plait.matmul(x, weight, impl="fused")
    assert out.dtype == torch.int32
    assert_bitwise(out.cpu(), (x.cpu().long() @ weight.cpu().long().t()).int())


@pytest.mark.parametrize("shape", [(16, 64, 64), (64, 1024, 8192), (512, 1024, 1024)], ids=str)
def test_planned_calls_use_the_tensors_of_the_call(
    shape: tuple[int, int, int], device: torch.device
) -> None:
    m, n, k = shape
    for step in range(4):
        x, weight = _randn((m, k), torch.bfloat16, device), _randn((n, k), torch.bfloat16, device)
        bias = _randn((n,), torch.bfloat16, device)
        out = plait.matmul(x, weight, bias, impl="fused", activation="relu")
        record = plait.last_run()
        assert record is not None
        assert (record.detail == "planned") == (step > 0)
        plain = torch.relu(torch.nn.functional.linear(x, weight, bias))
        exact = torch.relu(_exact(x, weight) + bias.cpu().double())
        assert_close_to_fp64(out.cpu(), exact, plain.cpu())


def test_planned_calls_in_a_graph(device: torch.device) -> None:
    x, weight = (_randn((s, 256), torch.bfloat16, device) for s in (32, 64))
    for _ in range(2):
        plait.matmul(x, weight, impl="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plait.matmul(x, weight, impl="fused")
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_close_to_fp64(out.cpu(), _exact(x, weight), (x @ weight.t()).cpu())


def test_a_planned_call_costs_no_more_host_time_than_torch(device: torch.device) -> None:
    x, weight = (_randn((s, 64), torch.bfloat16, device) for s in (16, 64))
    ours = host_us(lambda: plait.matmul(x, weight, impl="fused"))
    theirs = host_us(lambda: torch.nn.functional.linear(x, weight))
    print(f"planned {ours:.1f} us, torch {theirs:.1f} us")
    assert ours < 1.5 * theirs
