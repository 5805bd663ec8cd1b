"""`plait.matmul` of fp8 and int8: every kind of scale against fp64 of the dequantized values."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import plait
from plait.errors import ArgumentError, UnsupportedError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.reference import (
    activation_reference,
    dequantize_blocks,
    dequantize_rows,
    integer_product,
    matmul_reference,
)
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, FP32 = torch.bfloat16, torch.float32
FP8_PAIRS = tuple(product((E4M3, E5M2), repeat=2))
PAIRS = (*FP8_PAIRS, (INT8, INT8))
KINDS = ("tensor", "rows", "blocks")
IMPLS = ("fused", "unfused", "reference")


def random(dtype, *shape):
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=INT8)
    return torch.randn(shape).to(dtype)


def make_scales(kind, m, n, k, *lead):
    """No two alike: a scale taken from the wrong place shows."""
    if kind == "tensor":
        return torch.tensor(0.37), torch.tensor([1.9])
    blocks = -(-k // 128)
    x_shape, w_shape = ((m,), (n,)) if kind == "rows" else ((m, blocks), (-(-n // 128), blocks))
    return torch.rand(*lead, *x_shape) + 0.1, torch.rand(*lead, *w_shape) + 0.1


def wide(values, scale, kind, block_rows, dtype):
    """Dequantized by one element at a time, unlike the operator's own helper."""
    values, scale = values.to(dtype), scale.to(dtype)
    if kind == "tensor":
        return values * scale
    result = torch.empty_like(values)
    for row, column in product(range(values.shape[-2]), range(0, values.shape[-1], 128)):
        part = (..., row, slice(column, column + 128))
        which = (..., row) if kind == "rows" else (..., row // block_rows, column // 128)
        result[part] = values[part] * scale[which][..., None]
    return result


def expectation(x, weight, x_scale, weight_scale, kind, dtype, bias=None, activation="none"):
    left = wide(x, x_scale, kind, 1, dtype)
    right = wide(weight, weight_scale, kind, 128, dtype)
    pre = left @ right.mT
    pre = pre if bias is None else pre + bias.to(dtype)
    return activation_reference([pre], activation)


def on_one_rank(fn):
    return plait.run_virtual(lambda group: fn(), 1)[0]


def check(x, weight, x_scale, weight_scale, kind, out_dtype=BF16, **options):
    result = plait.matmul(
        x, weight, x_scale=x_scale, weight_scale=weight_scale, out_dtype=out_dtype, **options
    )
    assert result.dtype is out_dtype
    case = (x, weight, x_scale, weight_scale, kind)
    activation = options.get("activation") or "none"
    plain = expectation(*case, FP32, options.get("bias"), activation).to(out_dtype)
    exact = expectation(*case, torch.float64, options.get("bias"), activation)
    assert_close_to_fp64(result, exact, plain)
    return result


@pytest.mark.newest_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS, ids=str)
def test_every_dtype_and_scale_against_fp64(x_dtype, w_dtype, kind):
    def fn():
        m, n, k = 18, 150, 272
        x, weight = random(x_dtype, m, k), random(w_dtype, n, k)
        scales = make_scales(kind, m, n, k)
        for impl, out_dtype in product(IMPLS, (BF16, FP32)):
            check(x, weight, *scales, kind, out_dtype, impl=impl)
            assert plait.last_run().impl == impl

    on_one_rank(fn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 129), (17, 131, 37)])
def test_odd_sizes(m, n, k, dtype, kind):
    def fn():
        x, weight = random(dtype, m, k), random(dtype, n, k)
        check(x, weight, *make_scales(kind, m, n, k), kind, FP32, impl="fused")

    on_one_rank(fn)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every other column": lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2],
    "odd address": lambda t: torch.cat([t[:, :1], t], 1)[:, 1:],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_any_strides(dtype, layout, kind):
    def fn():
        m, n, k = 16, 144, 128
        x, weight = random(dtype, m, k), random(dtype, n, k)
        x_scale, w_scale = make_scales(kind, m, n, k)
        expected = plait.matmul(x, weight, x_scale=x_scale, weight_scale=w_scale, impl="fused")
        scales = [torch.stack([each] * 2, -1)[..., 0] for each in (x_scale, w_scale)]
        for laid_x, laid_w in ((LAYOUTS[layout](x), weight), (x, LAYOUTS[layout](weight))):
            result = plait.matmul(
                laid_x, laid_w, x_scale=scales[0], weight_scale=scales[1], impl="fused"
            )
            assert_bitwise(result, expected)  # one block of K: one order of sums

    on_one_rank(fn)


def test_scales_of_one_operand_may_be_single():
    def fn():
        x, weight = random(E4M3, 20, 64), random(E4M3, 30, 64)
        (x_rows, w_rows), (one, other) = (
            make_scales("rows", 20, 30, 64),
            make_scales("tensor", 0, 0, 0),
        )
        result = check(x, weight, x_rows, other.expand(30), "rows", impl="fused")
        call = {"x_scale": x_rows[:, None], "weight_scale": other, "impl": "fused"}
        assert_bitwise(plait.matmul(x, weight, **call), result)
        check(x, weight, one.expand(20), w_rows, "rows", impl="fused")
        lead = plait.matmul(
            x.reshape(4, 5, 64), weight, x_scale=x_rows.reshape(4, 5), weight_scale=other
        )
        assert_bitwise(lead.reshape(20, 30), result)

    on_one_rank(fn)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_batches_have_their_own_scales(dtype, kind, impl):
    def fn():
        m, n, k = 9, 140, 144
        x, weight = random(dtype, 3, m, k), random(dtype, 3, n, k)
        lead = () if kind == "tensor" else (3,)
        scales = make_scales(kind, m, n, k, *lead)
        stored = weight.mT.contiguous()
        for each in (weight, stored.mT):
            check(x, each, *scales, kind, impl=impl)

    on_one_rank(fn)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_activation_come_after_the_scales(kind, impl):
    def fn():
        x, weight = random(E4M3, 20, 64), random(E5M2, 36, 64)
        scales = make_scales(kind, 20, 36, 64)
        for bias in (torch.randn(36), torch.randn(20, 36)):
            check(x, weight, *scales, kind, FP32, bias=bias, activation="gelu", impl=impl)

    on_one_rank(fn)


@pytest.mark.parametrize("impl", ["auto", "unfused", "reference"])
def test_gates_take_two_products(impl):
    def fn():
        x, gate, up = random(E4M3, 8, 32), random(E4M3, 12, 32), random(E4M3, 12, 32)
        scales = [make_scales("rows", 8, 12, 32) for _ in range(2)]
        call = {"x_scale": scales[0][0], "weight_scale": [s[1] for s in scales]}
        result = plait.matmul(x, [gate, up], activation="swiglu", impl=impl, **call)
        exact, plain = [], []
        for dtype, into in ((torch.float64, exact), (FP32, plain)):
            pre = [
                expectation(x, w, scales[0][0], s[1], "rows", dtype)
                for w, s in zip((gate, up), scales, strict=True)
            ]
            into.append(activation_reference(pre, "swiglu"))
        assert_close_to_fp64(result, exact[0], plain[0].to(BF16))
        with pytest.raises(UnsupportedError, match=r"a gate of torch\.float8_e4m3fn"):
            plait.matmul(x, [gate, up], activation="swiglu", impl="fused", **call)

    on_one_rank(fn)


def test_a_list_of_weights_has_a_list_of_scales():
    def fn():
        x, weights = random(E4M3, 8, 32), [random(E4M3, n, 32) for n in (12, 5)]
        scales = [torch.rand(n) for n in (12, 5)]
        one = torch.tensor(0.5)
        results = plait.matmul(x, weights, x_scale=one, weight_scale=scales)
        for result, weight, scale in zip(results, weights, scales, strict=True):
            assert_bitwise(result, plait.matmul(x, weight, x_scale=one, weight_scale=scale))

    on_one_rank(fn)


# --- int8 without scales


@pytest.mark.newest_triton
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (33, 20, 37), (17, 130, 300), (3, 4, 0)])
def test_int8_without_scales_is_exact(m, n, k, impl):
    def fn():
        x, weight = random(INT8, m, k), random(INT8, n, k)
        expected = (x.long() @ weight.long().t()).int()
        assert_bitwise(plait.matmul(x, weight, impl=impl), expected)
        out = torch.full((n, m), 7, dtype=torch.int32).t()
        assert plait.matmul(x, weight, out=out, accumulate=True, impl=impl) is out
        assert_bitwise(out, expected + 7)

    on_one_rank(fn)


def test_int8_sums_beyond_the_integers_of_fp32_are_exact():
    def fn():
        x = torch.full((2, 2049), 127, dtype=INT8)
        x[:, -1] = 1
        weight = x[:1].clone()
        exact = 2048 * 127 * 127 + 1
        assert exact > 2**24
        for impl in IMPLS:
            assert plait.matmul(x, weight, impl=impl).tolist() == [[exact], [exact]]
        batched = plait.matmul(x.expand(3, 2, -1), weight.expand(3, 1, -1), impl="fused")
        assert batched.unique().tolist() == [exact]
        # The addend does not pass through fp32 either, in one step or in four parts of K.
        for splits in (1, 4):
            out = torch.full((2, 1), 2**24 + 1, dtype=torch.int32)
            config = Config(16, 16, 256, 4, 1, 8, False, splits=splits)
            plait.matmul(x, weight, out=out, accumulate=True, config=config)
            assert out.tolist() == [[exact + 2**24 + 1]] * 2

    on_one_rank(fn)


# --- the helpers, and what a call may contain


def test_dequantize_helpers_by_hand():
    values = torch.ones(130, 129, dtype=torch.int8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    blocks = dequantize_blocks(values, scale, 128)
    assert [blocks[0, 0], blocks[127, 128], blocks[128, 127], blocks[129, 128]] == [1, 2, 3, 4]
    assert dequantize_blocks(values[:2], scale, 1)[1].unique().tolist() == [3, 4]
    rows = dequantize_rows(values, torch.arange(130.0))
    assert torch.equal(rows[:, 5], torch.arange(130.0))
    assert dequantize_rows(values, torch.tensor([5.0])).unique().tolist() == [5]
    assert integer_product(values[:1], values[:2]).tolist() == [[129, 129]]


def test_reference_in_fp64_is_exact():
    x, weight = random(E4M3, 5, 200), random(E5M2, 7, 200)
    x_scale, w_scale = (each.double() for each in make_scales("blocks", 5, 7, 200))
    result = matmul_reference(
        x, [weight], out_dtype=torch.float64, scaling=("blocks", x_scale, [w_scale])
    )
    expected = expectation(x, weight, x_scale, w_scale, "blocks", torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_zero_sizes(impl, kind):
    def fn():
        for m, n, k in ((0, 4, 8), (5, 0, 8), (5, 4, 0)):
            x, weight = random(E4M3, m, k), random(E4M3, n, k)
            x_scale, w_scale = make_scales(kind, m, n, k)
            bias = torch.randn(n)
            call = {"x_scale": x_scale, "weight_scale": w_scale, "impl": impl}
            result = plait.matmul(x, weight, bias, activation="relu", **call)
            assert_bitwise(result, torch.relu(bias).to(BF16).expand(m, n))

    on_one_rank(fn)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_nan_stays_in_its_row(kind):
    def fn():
        m, n, k = 20, 40, 130
        x, weight = random(E5M2, m, k), random(E5M2, n, k)
        x_scale, w_scale = make_scales(kind, m, n, k)
        call = {"x_scale": x_scale, "weight_scale": w_scale, "impl": "fused"}
        expected = plait.matmul(x, weight, **call)
        x[3], weight[7] = float("nan"), float("inf")
        result = plait.matmul(x, weight, **call)
        assert result[3].isnan().all()
        assert not result[:, 7].isfinite().any()
        rows, columns = torch.arange(m) != 3, torch.arange(n) != 7
        assert_bitwise(result[rows][:, columns], expected[rows][:, columns])

    on_one_rank(fn)


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_split_k_scales_the_sum(dtype, splits):
    def fn():
        x, weight = random(dtype, 18, 200), random(dtype, 24, 200)
        config = Config(16, 32, 64, 4, 1, 8, False, splits=splits)
        for kind in ("tensor", "rows"):
            scales = make_scales(kind, 18, 24, 200)
            first = check(x, weight, *scales, kind, FP32, config=config)
            again = check(x, weight, *scales, kind, FP32, config=replace(config, group_m=1))
            assert_bitwise(first, again)
        scales = make_scales("rows", 18, 24, 200, 2)
        case = torch.stack([x, x.flip(0)]), torch.stack([weight.flip(0), weight])
        check(*case, *scales, "rows", bias=torch.randn(24), activation="silu", config=config)

    on_one_rank(fn)


def test_fast_accum_is_taken():
    def fn():
        x, weight = random(E4M3, 18, 64), random(E4M3, 24, 64)
        check(x, weight, *make_scales("rows", 18, 24, 64), "rows", impl="fused", fast_accum=True)

    on_one_rank(fn)


def test_quantized_operands_have_no_gradients():
    x, weight = random(E4M3, 4, 16), random(E4M3, 4, 16)
    one = torch.ones(())
    for tensors in (
        {"x": x.clone().requires_grad_()},
        {"weight": weight.clone().requires_grad_()},
        {"x_scale": one.clone().requires_grad_()},
        {"bias": torch.ones(4, requires_grad=True)},
    ):
        call = {"x": x, "weight": weight, "x_scale": one, "weight_scale": one, **tensors}
        (name,) = tensors
        with pytest.raises(ArgumentError, match=f"{name}.*: expected no gradient for"):
            plait.matmul(**call)
        with torch.no_grad():
            plait.matmul(**call)
