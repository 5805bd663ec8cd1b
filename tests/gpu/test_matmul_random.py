"""`plait.matmul(impl="fused")` against fp64 on 2,000 random products of every kind.

What a kernel is compiled for (dtype, layouts, alignment, epilogue, tile) is a `Family`; a test
has a few, so that compiling stays short, and draws sizes, which only the kernel's arguments hold.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plait
from plait.device import device_info
from plait.ops.matmul.configs import Config, is_valid
from plait.ops.matmul.operands import descriptors_allowed
from plait.ops.matmul.reference import (
    GATES,
    activation_reference,
    dequantize,
    integer_product,
)
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLOATS = (BF16, FP16, FP32)

NUM_TESTS, FAMILIES_PER_TEST, EXAMPLES = 20, 5, 100

# Results of few elements say little about how much torch errs: other draws are looked at as well.
_FEW, _DRAWS = 512, 16

# By what alignment lets a kernel do: Triton knows sizes as 1, divisible by 16, or neither, and a
# descriptor wants rows of whole 16 bytes.
SIZES = {
    "sixteens": (16, 32, 48, 64, 80, 96, 128, 144, 192, 240, 256, 320, 384, 512, 528, 640, 704),
    "eights": (8, 24, 40, 56, 72, 120, 136, 200, 248, 264, 328, 392, 456, 520, 584, 648, 696),
    "odd": (2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 90, 127, 129, 130, 255, 257, 333, 511, 513, 650),
    "one": (1,),
}


@dataclass(frozen=True)
class Family:
    """All of a product but its sizes; `sizes` are the classes of M, N and K."""

    dtype: torch.dtype
    precision: str
    sizes: tuple[str, str, str]
    x_form: str
    weight_form: str
    batched: bool
    scales: str
    bias: str
    activation: str
    out: str
    special: str
    config: Config


def _families(count: int, seed: int) -> list[Family]:
    """Every value of every axis about equally often, otherwise at random."""
    rng = random.Random(seed)

    def axis(*values):
        repeated = [values[i % len(values)] for i in range(count)]
        rng.shuffle(repeated)
        return repeated

    forms = ("plain", "plain", "plain", "padded", "offset", "steps", "turned")
    kinds = ("sixteens", "sixteens", "sixteens", "eights", "odd", "odd", "one")
    axes = zip(
        axis(
            (BF16, "ieee"), (BF16, "ieee"), (BF16, "ieee"), (FP16, "ieee"), (FP16, "ieee"),
            (FP32, "ieee"), (FP32, "tf32"), (E4M3, "ieee"), (E4M3, "ieee"), (E5M2, "ieee"),
            (INT8, "ieee"), (INT8, "ieee"),
        ),
        zip(axis(*kinds), axis(*kinds), axis(*kinds), strict=True),
        axis(*forms),
        axis(*forms, "turned", "turned"),
        axis(False, False, True),
        axis("none", "tensor", "rows", "blocks"),
        axis("none", "none", "vector", "matrix"),
        axis("none", "none", "gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu"),
        axis("none", "none", "poisoned", "steps", "turned", "accumulate"),
        axis("none", "none", "nan", "inf"),
        axis(*((64, 64, 64, 4, 3), (32, 128, 32, 4, 2), (128, 64, 64, 8, 3), (16, 64, 128, 4, 3))),
        axis((1, False), (1, False), (1, False), (2, False), (3, False), (2, True)),
        axis(False, True),
        axis(False, True),
        strict=True,
    )  # fmt: skip
    return [_consistent(*each) for each in axes]


def _consistent(
    dtype, sizes, x_form, weight_form, batched, scales, bias, activation, out, special, tile, split,
    desc_store, flatten,
) -> Family:  # fmt: skip
    """A family that `plait.matmul` takes, near the values drawn."""
    (dtype, precision), (splits, split_tail) = dtype, split
    quantized = dtype not in FLOATS
    if not quantized:
        scales = "none"
    elif scales == "none" and dtype is not INT8:
        scales = "rows"
    if dtype is INT8 and scales == "none":
        bias = activation = "none"
    if activation in GATES and (quantized or batched):
        activation = "silu"
    if activation in GATES and bias == "matrix":
        bias = "vector"
    if out == "accumulate":
        activation = "none"
    if activation not in ("none", "relu") or dtype is INT8:
        special = "none"
    if special == "inf" and dtype is E4M3:
        special = "nan"  # it has no infinity
    block_m, block_n, block_k, warps, stages = tile
    if scales == "blocks":
        block_k = 128
    elif dtype is FP32:
        block_m, block_n, block_k = min(block_m, 64), 64, 32
        warps = 8 if precision == "ieee" else warps
    if scales == "blocks" or activation in GATES:
        splits, flatten = 1, False
    config = Config(
        block_m, block_n, block_k, warps, stages, 4, False, splits,
        split_tail=split_tail and splits > 1, desc_store=desc_store, flatten=flatten,
    )  # fmt: skip
    return Family(
        dtype, precision, sizes, x_form, weight_form, batched, scales, bias, activation, out,
        special, config,
    )  # fmt: skip


# --- operands


def _values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is INT8:
        return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=device)
    return torch.randn(tuple(shape), device=device).to(dtype)


def _poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that shows when it is read, or written where it should not be."""
    fill = 99 if not dtype.is_floating_point else math.nan
    return torch.full(tuple(shape), fill, device=device, dtype=FP32).to(dtype)


def _place(shape: tuple[int, ...], dtype: torch.dtype, form: str, device: torch.device):
    """A poisoned tensor [..., rows, columns] that lies in memory as `form` says, and its memory."""
    *batch, rows, columns = shape
    if form == "turned":
        memory = _poison((*batch, columns, rows), dtype, device)
        return memory.mT, memory
    if form == "padded":
        memory = _poison((*batch, rows, (columns // 16 + 2) * 16), dtype, device)
        return memory[..., :columns], memory
    if form == "steps":
        memory = _poison((*batch, rows, 2 * columns), dtype, device)
        return memory[..., ::2], memory
    if form == "offset":
        memory = _poison((math.prod(shape) + 2,), dtype, device)
        return memory[1:-1].view(shape), memory
    memory = _poison(shape, dtype, device)
    return memory, memory


def _operand(shape: tuple[int, ...], dtype: torch.dtype, form: str, device: torch.device):
    view, _ = _place(shape, dtype, form, device)
    return view.copy_(_values(shape, dtype, device))


def _scales(family: Family, batch: tuple[int, ...], m: int, n: int, k: int, device: torch.device):
    """x_scale and weight_scale, positive, or None twice."""
    if family.scales == "none":
        return None, None
    blocks = -(-k // 128)
    x_shape, w_shape = {
        "tensor": ((1,), (1,)),
        "rows": ((*batch, m), (*batch, n)),
        "blocks": ((*batch, m, blocks), (*batch, -(-n // 128), blocks)),
    }[family.scales]
    return (torch.rand(shape, device=device) * 0.05 + 0.01 for shape in (x_shape, w_shape))


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name if name == "tf32" else before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _config(family: Family, x: torch.Tensor, weights: list[torch.Tensor]) -> Config:
    """The family's tile, by descriptors wherever they may read."""
    arch, config = device_info(x.device).arch, family.config
    if x.dim() == 2:
        x = x.reshape(x.shape)  # as the call does: a single row forgets its stride
    desc = descriptors_allowed(x, weights, arch, config.block_k)
    desc = desc and not (family.dtype is FP32 and family.precision == "ieee")
    config = replace(config, desc=desc, desc_store=desc and config.desc_store)
    options = {"num_weights": len(weights), "precision": family.precision}
    while not is_valid(config, family.dtype, arch, **options) and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


# --- one product


def check(family: Family, m: int, n: int, k: int, b: int, device: torch.device) -> None:
    """The fused result against fp64 and torch; memory around `out` stays what it was."""
    dtype = family.dtype
    batch = (b,) if family.batched else ()
    quantized = dtype not in FLOATS
    unscaled = quantized and family.scales == "none"
    out_dtype = torch.int32 if unscaled else BF16 if quantized else dtype
    x = _operand((*batch, m, k), dtype, family.x_form, device)
    count = 2 if family.activation in GATES else 1
    weights = [_operand((*batch, n, k), dtype, family.weight_form, device) for _ in range(count)]
    if family.special != "none" and x.numel():
        x[..., m // 2, k // 2] = math.nan if family.special == "nan" else math.inf
    x_scale, weight_scale = _scales(family, batch, m, n, k, device)
    bias_dtype = FP32 if quantized else dtype
    shape = (*batch, m, n)
    biases = []
    if family.bias == "matrix" and shape != (n,):
        biases = [_values(shape, bias_dtype, device)]
    elif family.bias != "none":
        biases = [_values((n,), bias_dtype, device) for _ in range(count)]
    out = memory = before = None
    if family.out != "none":
        form = {"poisoned": "offset", "accumulate": "plain"}.get(family.out, family.out)
        out, memory = _place(shape, out_dtype, form, device)
        if family.out == "accumulate":
            before = out.copy_(_values(shape, BF16, device)).clone()
    else:
        before_it = _poison(shape, out_dtype, device)  # whose memory the result probably gets
        del before_it
    options = {} if family.activation == "none" else {"activation": family.activation}
    if x_scale is not None:
        options |= {"x_scale": x_scale, "weight_scale": weight_scale}
    with _precision(family.precision):
        result = plait.matmul(
            x,
            weights if count == 2 else weights[0],
            None if not biases else biases if count == 2 else biases[0],
            out=out,
            accumulate=before is not None,
            impl="fused",
            config=_config(family, x, weights),
            **options,
        )
    record = plait.last_run()
    assert record is not None
    assert record.impl == "fused"
    assert (result.dtype, tuple(result.shape)) == (out_dtype, shape)
    if unscaled:
        expected = integer_product(x, weights[0])
        assert_bitwise(result, expected if before is None else expected + before)
    else:
        scaling = None if x_scale is None else (x_scale, weight_scale)
        operands = (x, weights, biases, before, scaling)
        _compare(family, result, operands)
    if out is not None:
        assert result is out
        _assert_only_out_was_written(out, memory, out_dtype)


def _compare(family: Family, result: torch.Tensor, operands: tuple) -> None:
    _, _, biases, before, _ = operands
    exact = _product(family, operands, torch.float64)
    if family.precision == "tf32":
        _assert_within_tf32(family, result, exact, operands)
        return
    if family.dtype in FLOATS:
        plain = _product(family, operands, family.dtype)
    else:  # torch has no such product: one of fp32, rounded once
        plain = _product(family, operands, FP32).to(result.dtype)
    share = 0.0
    if family.dtype in FLOATS and result.numel() < _FEW:
        share = _error_share(
            lambda others, wide: _product(family, (*others, biases, before, None), wide),
            operands[0],
            operands[1],
        )
    assert_close_to_fp64(result, exact, plain, plain_error_share=share)


def _error_share(
    product: Callable[[tuple, torch.dtype], torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> float:
    """Largest error of plain torch on other x and weights, as a share of the largest value."""
    shares = [0.0]
    for _ in range(_DRAWS):
        others = (torch.randn_like(x), [torch.randn_like(each) for each in weights])
        exact = product(others, torch.float64)
        error = (product(others, x.dtype).double() - exact).abs()
        if error.numel():
            shares.append(float(error.max() / exact.abs().max().clamp_min(1e-30)))
    return max(shares)


def _product(family: Family, operands: tuple, wide: torch.dtype) -> torch.Tensor:
    """The product by torch in the dtype `wide`."""
    x, weights, biases, before, scaling = operands
    if scaling is not None:
        kind = "blocks" if family.scales == "blocks" else "rows"
        left, right = dequantize(x, weights[0], kind, *(each.to(wide) for each in scaling))
        pairs = [(left, right)]
    else:
        pairs = [(x.to(wide), weight.to(wide)) for weight in weights]
    pre = [torch.matmul(left, right.mT) for left, right in pairs]
    if biases:
        pre = [value + bias.to(wide) for value, bias in zip(pre, biases, strict=True)]
    if before is not None:
        pre = [value + before.to(wide) for value in pre]
    return activation_reference(pre, family.activation)


def _assert_within_tf32(
    family: Family, result: torch.Tensor, exact: torch.Tensor, operands: tuple
) -> None:
    """Torch rounds operands to tf32, the tensor cores cut them off: the bound of what that loses.

    Each factor loses less than 2^-10 of itself. No activation here is steeper than 1.13, and a gate
    multiplies two products.
    """
    finite = exact.isfinite()
    assert torch.equal(result.isfinite(), finite)
    x, weights, biases, *_ = operands
    sums = [x.double().abs() @ weight.double().abs().mT for weight in weights]
    loss = sums[0]
    if len(sums) == 2:
        left, right = (each + (biases[i].abs() if biases else 0) for i, each in enumerate(sums))
        loss = sums[0] * right + left * sums[1]
    few = 2**-20 * (1 + exact.abs())
    wrong = finite & ((result.double() - exact).abs() > 2.1 * 2**-10 * 1.13 * loss + few)
    assert not bool(wrong.any()), f"{int(wrong.sum())} elements lose more than tf32 does"


def _assert_only_out_was_written(out: torch.Tensor, memory: torch.Tensor, dtype: torch.dtype):
    """All of `memory` outside of `out` is still poison."""
    expected = _poison(memory.shape, dtype, memory.device)
    expected.as_strided(out.size(), out.stride(), out.storage_offset()).copy_(out)
    assert_bitwise(memory, expected, "memory around out")


# --- the tests

_ALL = _families(NUM_TESTS * FAMILIES_PER_TEST, seed=3)


@pytest.mark.parametrize("index", range(NUM_TESTS))
def test_random_products(index: int, device: torch.device) -> None:
    mine = _ALL[index::NUM_TESTS]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        family = data.draw(st.sampled_from(mine), "family")
        m, n, k = (data.draw(st.sampled_from(SIZES[kind]), kind) for kind in family.sizes)
        empty = data.draw(st.integers(0, 39), "0 to 2: that size is 0")
        m, n, k = (0 if i == empty else size for i, size in enumerate((m, n, k)))
        b = data.draw(st.sampled_from((1, 2, 3, 5)), "batch")
        torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
        check(family, m, n, k, b, device)

    run()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_products_with_chosen_configs(dtype: torch.dtype, device: torch.device) -> None:
    """Nothing is prescribed: tiles by the table or computed, planned calls from the second on."""
    sizes = st.sampled_from((1, 16, 64, 100, 257, 704))

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sizes, sizes, st.sampled_from((16, 129, 512)), st.booleans())
    def run(m: int, n: int, k: int, turned: bool) -> None:
        x = _values((m, k), dtype, device)
        weight = _operand((n, k), dtype, "turned" if turned else "plain", device)
        bias = _values((n,), dtype, device)
        exact = x.double() @ weight.double().mT + bias.double()
        plain = F.linear(x, weight, bias)
        share = 0.0
        if plain.numel() < _FEW:
            share = _error_share(
                lambda others, wide: F.linear(
                    others[0].to(wide), others[1][0].to(wide), bias.to(wide)
                ),
                x,
                [weight],
            )
        for _ in range(2):
            result = plait.matmul(x, weight, bias, impl="fused")
            assert_close_to_fp64(result, exact, plain, plain_error_share=share)

    run()
