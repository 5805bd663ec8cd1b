"""Norms against ATen: dtypes, strides, sizes of every path, and mistakes reported in public."""

import pytest
import torch
from torch.nn import functional as F

import plait
from plait.ops.aten import dispatch, spec
from plait.ops.engine.signature import Schema
from plait.testing.compile_sm90 import compile_for
from tests import norm_cases
from tests.norm_cases import random
from tests.recorded_launches import recorded

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
TRAINING = pytest.mark.parametrize("training", [True, False])


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_layer_norm(dtype, size, device):
    x, weight, bias = (
        random(*s, dtype=dtype, device=device) for s in ((5, size), (size,), (size,))
    )
    norm_cases.layer_norm(x, weight, bias)


@pytest.mark.parametrize("rows", [1, 3])
def test_layer_norm_of_long_rows(rows, device):
    """A row in parts, and of all rows a row a block."""
    x = random(rows, 40000, dtype=FP32, device=device)
    norm_cases.layer_norm(x, x[0].clone(), x[0].flip(0))


@DTYPES
def test_layer_norm_over_several_dims_and_strides(dtype, device):
    x = random(4, 3, 7, 5, dtype=dtype, device=device)
    weight = random(10, dtype=dtype, device=device)
    norm_cases.layer_norm(x, x[0], None, 3)
    norm_cases.layer_norm(x.transpose(0, 1), weight[::2], weight[5:])
    norm_cases.layer_norm(x.permute(0, 2, 3, 1), weight[:3], weight[:3])
    norm_cases.layer_norm(x.permute(0, 2, 3, 1), x[0, :, 0].T.contiguous(), None, 2)
    dy = torch.ones((), dtype=dtype, device=device).expand(x.shape)
    norm_cases.layer_norm(x, weight[:5], None, dy=dy)
    norm_cases.layer_norm(x[:0], weight[:5], weight[:5])


def test_layer_norm_of_bf16_with_fp32_parameters():
    x, weight = random(9, 33, dtype=BF16, device="cpu"), random(33, dtype=FP32, device="cpu")
    norm_cases.layer_norm(x, weight, weight)


@DTYPES
def test_group_norm(dtype, device):
    weight = random(16, dtype=dtype, device=device)
    norm_cases.group_norm(
        random(3, 8, 5, 7, dtype=dtype, device=device), 2, weight[::2], weight[8:]
    )
    norm_cases.group_norm(random(3, 6, dtype=dtype, device=device), 6, weight[:6], None)
    norm_cases.group_norm(random(2, 6, 35, dtype=dtype, device=device), 3, None, None)
    norm_cases.group_norm(random(2, 4, 90, 100, dtype=dtype, device=device), 2, weight[:4], None)
    norm_cases.group_norm(random(1, 16, 3000, dtype=dtype, device=device), 2, weight, weight)


def test_kernels_of_a_single_sample_compile_for_sm90():
    """Triton turns arguments that are 1 into constants, which have no methods of tensors."""
    x, stats = random(1, 8, 3, 3, dtype=BF16, device="cpu"), random(1, 2, dtype=BF16, device="cpu")
    weight = x[0, :, 0, 0].clone()
    key, args = "native_group_norm_backward", (x, x, stats, stats, weight, 1, 8, 9, 2, [True] * 3)
    schema = Schema(torch.ops.aten.native_group_norm_backward.default)
    spec.load_catalog()
    with recorded(by_aten=False) as launches:
        dispatch.compute(spec.find(key), schema, schema.bind(args, {}))
    assert len(launches["group_norm_backward"]) == 2
    for launch in launches["group_norm_backward"]:
        compiled = compile_for(launch.kernel, launch.args, num_warps=launch.num_warps)
        assert compiled.spill_bytes == 0


def test_group_norm_of_channels_last_on_the_cpu():
    x = random(3, 6, 4, 5, dtype=FP32, device="cpu").to(memory_format=torch.channels_last)
    weight = random(6, dtype=FP32, device="cpu")
    norm_cases.group_norm(x, 2, weight, weight)


@DTYPES
@TRAINING
def test_batch_norm(dtype, training, device):
    parameters = FP32 if dtype in (BF16, FP16) else dtype
    for shape in ((8, 6), (3, 5, 7), (4, 3, 8, 8), (2, 3, 2, 5, 3), (1, 2, 20000), (70000, 3)):
        x = random(*shape, dtype=dtype, device=device) * 3 + 5
        norm_cases.batch_norm(x, parameters, training=training)


@TRAINING
def test_batch_norm_strides(training, device):
    x = random(4, 6, 8, 10, dtype=FP32, device=device) * 3 + 5
    norm_cases.batch_norm(
        x.to(memory_format=torch.channels_last), FP32, training=training
    )  # fmt: skip
    if not x.is_cuda:  # what ATen's kernels of CUDA return differs among themselves
        norm_cases.batch_norm(x[:, :, :, ::2], FP32, training=training)
        norm_cases.batch_norm(x[:, :, :7, :9], FP32, training=training)


def test_batch_norm_of_16_bit_parameters(device):
    norm_cases.batch_norm(random(4, 6, 8, dtype=BF16, device=device), BF16, training=True)


@DTYPES
def test_weight_norm(dtype, device):
    v = random(5, dtype=dtype, device=device)  # its gradient is 0, which is no measure
    norm_cases.compare("_weight_norm_interface", v, v.flip(0), 0)
    shapes = ((5, 7), (5, 3, 4), (300, 70), (3, 20000))
    for shape in shapes:
        for dim in {0, len(shape) - 1}:
            norm_cases.weight_norm(random(*shape, dtype=dtype, device=device), dim)


def test_out_overloads(device):
    """Results where the caller wants them, with strides of their own."""
    x, weight = random(4, 6, 8, dtype=FP32, device=device), torch.ones(6, device=device)
    wanted = torch.native_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)
    y = torch.empty(4, 6, 16, device=device)[..., ::2]
    mean, rstd = torch.empty(6, device=device), torch.empty(6, device=device)
    with plait.use("norm", device=device), plait.report() as report:
        torch.native_batch_norm(
            x, weight, None, None, None, True, 0.1, 1e-5, out=(y, mean, rstd)
        )  # fmt: skip
    assert report.served == 1, str(report)
    for got, each in zip((y, mean, rstd), wanted, strict=True):
        torch.testing.assert_close(got, each)


# --- reported in public
def test_o11_a_gradient_that_is_not_contiguous(device):
    x, weight = random(4, 8, 64, dtype=FP32, device=device), torch.ones(64, device=device)
    norm_cases.layer_norm(
        x, weight, None, dy=random(8, 4, 64, dtype=FP32, device=device).transpose(0, 1)
    )  # fmt: skip
    norm_cases.layer_norm(x, weight, None, dy=torch.ones((), device=device).expand(x.shape))


def test_o28_groups_whose_channels_are_no_power_of_two(device):
    weight = random(48, dtype=FP32, device=device)
    x = random(1, 48, 32, 32, dtype=FP32, device=device)
    norm_cases.group_norm(x, 16, weight, weight)
    norm_cases.group_norm(random(2, 6, 5, 7, dtype=FP32, device=device), 2, weight[:6], weight[:6])
    first, again = (norm_cases.ours("native_group_norm", x, weight, weight, 1, 48, 1024, 16, 1e-5)
                    for _ in range(2))  # fmt: skip
    for a, b in zip(first, again, strict=True):
        assert a.equal(b)


def test_o40_a_gradient_that_another_consumer_still_needs(device):
    x = random(6, 32, dtype=FP32, device=device).requires_grad_()
    residual = torch.zeros_like(x).requires_grad_()
    dy = random(6, 32, dtype=FP32, device=device)
    kept = dy.clone()
    y, h = plait.rms_norm(x, residual=residual)
    torch.autograd.backward((y, h), (dy, dy))
    wide = x.detach().double().requires_grad_()
    (F.rms_norm(wide, (32,), eps=1e-6) + wide).backward(dy.double())
    assert dy.equal(kept)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_o45_more_than_two_dims(device):
    x, weight = random(52, 7, 64, dtype=FP32, device=device), torch.ones(64, device=device)
    _, mean, rstd = norm_cases.plain("native_layer_norm", x, [64], weight, weight, 1e-5)
    args = (torch.ones_like(x), x, [64], mean, rstd, weight, weight, [True] * 3)
    dx, _, dbias = norm_cases.ours("native_layer_norm_backward", *args)
    assert dbias.equal(torch.full_like(weight, 364))
    assert dx.sum(-1).abs().max() < 1e-3
    norm_cases.layer_norm(x, weight, weight, dy=args[0])


def test_o46_parameters_that_are_not_there(device):
    x, weight = random(3, 8, 10, dtype=FP32, device=device), random(10, dtype=FP32, device=device)
    for given in ((None, None), (weight, None), (None, weight)):
        norm_cases.layer_norm(x, *given)
        channels = [None if each is None else each[:8] for each in given]
        norm_cases.group_norm(x, 4, *channels)


def test_o47_the_saved_statistic_is_an_inverse_deviation(device):
    x = random(8, 4, 8, 8, dtype=FP32, device=device) * 3 + 5
    norm_cases.batch_norm(x, FP32, training=True)
    if not x.is_cuda:
        return
    weight = torch.ones(4, device=device)
    _, mean, rstd, reserve = torch.ops.aten.cudnn_batch_norm(
        x, weight, weight, None, None, True, 0.1, 1e-5
    )
    args = (x, torch.randn_like(x), weight, None, None, mean, rstd, 1e-5, reserve)
    wanted = norm_cases.plain("cudnn_batch_norm_backward", *args)
    got = norm_cases.ours("cudnn_batch_norm_backward", *args)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
