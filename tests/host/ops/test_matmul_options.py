"""`plait.matmul`: batches, matrix biases, accumulation, `out`, splits of K and given configs."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.errors import ArgumentError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.reference import activation_reference
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

BF16, FP32 = torch.bfloat16, torch.float32
IMPLS = ("fused", "unfused", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_one_rank(fn):
    return plait.run_virtual(lambda group: fn(), 1)[0]


def operands(dtype, m, n, k, *lead):
    return torch.randn(*lead, m, k).to(dtype), (torch.randn(*lead, n, k) / 4).to(dtype)


def check(result, x, weight, addend=0.0, activation="none"):
    """Against fp64, at most twice as wrong as torch in the dtype of x."""
    exact = x.double() @ weight.double().mT
    exact = exact + (addend.double() if isinstance(addend, torch.Tensor) else addend)
    plain = activation_reference([x @ weight.mT + addend], activation).to(result.dtype)
    assert_close_to_fp64(result, activation_reference([exact], activation), plain)


# --- batches


BATCH_LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "padded rows": lambda t: F.pad(t, (0, 8))[..., : t.shape[-1]],
    "batches inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every other batch": lambda t: torch.stack([t, t], 1)[:, 0],
    "every other column": lambda t: torch.stack([t, t], -1).flatten(2)[..., ::2],
    "odd address": lambda t: F.pad(t, (1, 0))[..., 1:],
    "odd batch stride": lambda t: F.pad(t.flatten(1), (0, 3)).as_strided(
        t.shape, (t[0].numel() + 3, t.shape[2], 1)
    ),
}


@pytest.mark.newest_triton
@pytest.mark.parametrize("side", ["x", "weight"])
@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
def test_batches_of_any_strides(layout, side):
    def fn():
        x, weight = operands(BF16, 35, 48, 40, 3)
        expected = plait.matmul(x, weight, impl="fused")
        check(expected, x, weight)
        laid = BATCH_LAYOUTS[layout](x if side == "x" else weight)
        assert torch.equal(laid, x if side == "x" else weight)
        pair = (laid, weight) if side == "x" else (x, laid)
        assert_bitwise(plait.matmul(*pair, impl="fused"), expected)

    on_one_rank(fn)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_odd_sizes(dtype, impl):
    def fn():
        for lead, m, n, k in ((2, 33, 17, 37), (1, 1, 5, 3), (5, 3, 130, 150)):
            x, weight = operands(dtype, m, n, k, lead)
            for laid in (weight, weight.mT.contiguous().mT):  # torch too sums them differently
                check(plait.matmul(x, laid, impl=impl), x, laid)

    on_one_rank(fn)


def test_one_weight_for_all_batches_by_expand():
    def fn():
        x, weight = operands(FP32, 20, 24, 32, 3)
        shared = weight[:1].expand(3, -1, -1)
        assert_bitwise(
            plait.matmul(x, shared, impl="fused"), plait.matmul(x, weight[0], impl="fused")
        )

    on_one_rank(fn)


def test_infinity_stays_in_its_batch():
    """K that no block divides: a tile of a [K, N] weight reaches into the next batch."""

    def fn():
        x, weight = operands(BF16, 8, 16, 24, 3)
        stored = weight.mT.contiguous()
        expected = plait.matmul(x, stored.mT, impl="fused")
        stored[1] = float("inf")
        x[2, 5] = float("nan")
        result = plait.matmul(x, stored.mT, impl="fused")
        assert not result[1].isfinite().any()
        assert_bitwise(result[0], expected[0])
        assert result[2, 5].isnan().all()
        keep = torch.arange(8) != 5
        assert_bitwise(result[2][keep], expected[2][keep])

    on_one_rank(fn)


@pytest.mark.parametrize("impl", IMPLS)
def test_batches_of_nothing(impl):
    def fn():
        for lead, m, n, k in ((0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)):
            x, weight = operands(FP32, m, n, k, lead)
            bias = torch.randn(n)
            result = plait.matmul(x, weight, bias, activation="relu", impl=impl)
            assert_bitwise(result, torch.relu(bias).expand(lead, m, n))

    on_one_rank(fn)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("shape", [(24,), (20, 24), (3, 20, 24)])
def test_gradients_of_batches(shape, activation):
    def grads(call, tensors, grad):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(call(*leaves), leaves, grad.to(leaves[0].dtype))

    def ours(x, weight, bias):
        return plait.matmul(x, weight, bias, activation=activation, impl="fused")

    def torchs(x, weight, bias):
        return activation_reference([x @ weight.mT + bias], activation)

    def fn():
        tensors = [*operands(BF16, 20, 24, 32, 3), torch.randn(shape).to(BF16)]
        grad = torch.randn(3, 20, 24).to(BF16)
        exact = grads(torchs, [t.double() for t in tensors], grad)
        plain = grads(torchs, tensors, grad)
        for mine, right, low in zip(grads(ours, tensors, grad), exact, plain, strict=True):
            assert_close_to_fp64(mine, right, low)

    on_one_rank(fn)


# --- what is added


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_matrix_bias(activation, dtype, impl):
    def fn():
        for lead in ((), (2,)):
            x, weight = operands(dtype, 33, 20, 40, *lead)
            biases = [torch.randn(*lead, 33, 20), torch.randn(*lead, 20, 33).mT]
            biases += [torch.randn(33, 20)] if lead else []
            for bias in biases:
                bias = bias.to(dtype)
                result = plait.matmul(x, weight, bias, activation=activation, impl=impl)
                check(result, x, weight, bias, activation)
        cube = x.reshape(2, 3, 11, 40)
        bias = torch.randn(2, 3, 11, 20).to(dtype)
        check(plait.matmul(cube, weight[0], bias, impl=impl), cube, weight[0], bias)

    on_one_rank(fn)


def test_bias_in_the_dtype_of_the_result():
    def fn():
        x, weight = operands(BF16, 20, 24, 32)
        for bias, impl in product((torch.randn(24), torch.randn(20, 24)), IMPLS):
            result = plait.matmul(x, weight, bias, out_dtype=FP32, impl=impl)
            exact = x.double() @ weight.double().t() + bias.double()
            plain = (x @ weight.t()).float() + bias
            assert_close_to_fp64(result, exact, plain)

    on_one_rank(fn)


def test_gradients_of_a_matrix_bias():
    def fn():
        x, weight = operands(FP32, 9, 12, 16)
        bias = torch.randn(9, 12, requires_grad=True)
        grad = torch.randn(9, 12)
        plait.matmul(x, weight, bias, impl="fused").backward(grad)
        assert_bitwise(bias.grad, grad)

    on_one_rank(fn)


OUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other row": lambda t: torch.stack([t, t], -2).flatten(-3, -2)[..., ::2, :],
    "padded, odd address": lambda t: F.pad(t, (1, 2))[..., 1:-2],
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "batched"])
def test_accumulate_adds_into_out(lead, layout, impl):
    def fn():
        for dtype, out_dtype in ((BF16, BF16), (BF16, FP32)):
            x, weight = operands(dtype, 33, 20, 40, *lead)
            held = torch.randn(*lead, 33, 20).to(out_dtype)
            out = OUTS[layout](held)
            assert plait.matmul(x, weight, out=out, accumulate=True, impl=impl) is out
            check(out, x, weight, held)
            bias = torch.randn(20).to(dtype)
            out = OUTS[layout](held)
            plait.matmul(x, weight, bias, out=out, accumulate=True, impl=impl)
            check(out, x, weight, held + bias)

    on_one_rank(fn)


def test_accumulate_with_a_matrix_bias_rounds_once():
    def fn():
        x, weight = operands(BF16, 20, 24, 32)
        held, bias = torch.randn(20, 24).to(BF16), torch.randn(20, 24).to(BF16)
        out = held.clone()
        plait.matmul(x, weight, bias, out=out, accumulate=True, impl="fused")
        exact = x.double() @ weight.double().t() + held.double() + bias.double()
        assert_close_to_fp64(out, exact, exact.to(BF16))

    on_one_rank(fn)


def test_accumulate_into_an_operand():
    def fn():
        x, weight = operands(FP32, 16, 16, 16)
        expected = (x + x @ weight.t()).clone()
        plait.matmul(x, weight, out=x, accumulate=True, impl="fused")
        torch.testing.assert_close(x, expected)

    on_one_rank(fn)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", OUTS)
def test_out_of_any_strides(layout, impl):
    def fn():
        for shape in ((33, 20), (2, 33, 20)):
            x, weight = operands(BF16, 33, 20, 40, *shape[:-2])
            expected = plait.matmul(x, weight, impl=impl)
            out = OUTS[layout](torch.full(shape, float("nan")).to(BF16))
            around = out._base.clone() if out._base is not None else out.clone()
            assert plait.matmul(x, weight, out=out, impl=impl) is out
            assert_bitwise(out, expected)
            if layout == "padded, odd address":  # nothing beside it was written
                assert_bitwise(out._base[..., -2:], around[..., -2:])

    on_one_rank(fn)


# --- configs


@pytest.mark.newest_triton
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("desc", [True, False])
def test_split_k_is_right_and_deterministic(desc, splits):
    def fn():
        config = Config(16, 32, 16, 4, 1, 8, desc, splits=splits)
        for dtype, lead in ((FP32, ()), (BF16, (2,))):
            x, weight = operands(dtype, 20, 30, 88, *lead)
            bias = torch.randn(30).to(dtype)
            call = {"activation": "gelu", "config": config}
            first = plait.matmul(x, weight, bias, **call)
            check(first, x, weight, bias, "gelu")
            assert_bitwise(plait.matmul(x, weight, bias, **call), first)
            assert plait.last_run().impl == "fused"

    on_one_rank(fn)


@pytest.mark.parametrize("splits", [2, 4])
def test_split_k_with_everything_else(splits):
    """More splits than blocks of K, gradients, accumulation and outputs with strides."""

    def fn():
        config = Config(16, 16, 32, 4, 1, 8, False, splits=splits)
        for k in (0, 1, 33):
            x, weight = operands(FP32, 5, 7, k)
            check(plait.matmul(x, weight, config=config), x, weight)
        x, weight = operands(FP32, 9, 20, 100, 2)
        held = torch.randn(2, 9, 20)
        out = held.mT.contiguous().mT
        plait.matmul(x, weight, out=out, accumulate=True, config=config)
        check(out, x, weight, held)
        leaf = x.clone().requires_grad_()
        plait.matmul(leaf, weight, activation="silu", config=config).sum().backward()
        other = x.clone().requires_grad_()
        F.silu(other @ weight.mT).sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad)

    on_one_rank(fn)


def test_the_given_config_runs():
    def fn():
        x, weight = operands(FP32, 33, 40, 48)
        out = {}
        for block_k in (16, 64):
            config = Config(16, 16, block_k, 4, 1, 2, False)
            out[block_k] = plait.matmul(x, weight, config=config)
            assert plait.last_run().reason == "a config was asked for"
            check(out[block_k], x, weight)
        assert not torch.equal(out[16], out[64])  # another order of sums

    on_one_rank(fn)


_GOOD = Config(16, 16, 32, 4, 1, 8, True)
BAD_CONFIGS = [
    (Config(16, 96, 32, 4, 1, 8, True), "a config that is valid for torch.bfloat16 on cpu", {}),
    (_GOOD, "desc=False for these strides", {"x": lambda x: F.pad(x, (1, 0))[:, 1:]}),
    (Config(16, 16, 32, 4, 1, 8, True, splits=2), "splits=1 with two", {"gate": True}),
    ("128x256x64", "a Config or None", {}),
]


@pytest.mark.parametrize(
    ("config", "message", "change"),
    BAD_CONFIGS,
    ids=["invalid", "descriptors", "splits of a gate", "not a config"],
)
def test_a_config_that_cannot_run_is_refused(config, message, change):
    def fn():
        x, weight = operands(BF16, 16, 16, 32)
        x = change.get("x", lambda each: each)(x)
        call = {"weight": weight}
        if "gate" in change:
            call = {"weight": [weight, weight], "activation": "swiglu"}
        with pytest.raises(ArgumentError, match=f"config: expected {message}"):
            plait.matmul(x, config=config, **call)

    on_one_rank(fn)


def test_configs_of_8_bit_operands():
    def fn():
        x = torch.ones(16, 256).to(torch.float8_e4m3fn)
        blocks = {"x_scale": torch.ones(16, 2), "weight_scale": torch.ones(1, 2)}
        one = {"x_scale": torch.ones(()), "weight_scale": torch.ones(())}
        for scales, config, message in (
            (one, Config(16, 16, 16, 4, 1, 8, True), "a config that is valid for torch.float8"),
            (blocks, Config(16, 16, 64, 4, 1, 8, True), "block_k=128 and splits=1"),
            (blocks, Config(16, 16, 128, 4, 1, 8, True, splits=2), "block_k=128 and splits=1"),
        ):
            with pytest.raises(ArgumentError, match=f"config: expected {message}"):
                plait.matmul(x, x, config=config, **scales)
        config = Config(16, 16, 128, 4, 1, 8, True)
        assert plait.matmul(x, x, config=config, **blocks).unique().tolist() == [256]

    on_one_rank(fn)
