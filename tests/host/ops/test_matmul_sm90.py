"""The kernels of fp8, int8, batches and splits, compiled for sm90 with the configs used there."""

from dataclasses import replace

import pytest
import torch

from plait.device import device_info
from plait.ops.matmul.fused import config_for
from plait.ops.matmul.launch import Scaling, plan_matmul
from plait.ops.matmul.product import Product
from plait.testing.compile_sm90 import compile_for

pytestmark = pytest.mark.newest_triton

E4M3, E5M2, INT8, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16
INFO = replace(device_info("cpu"), arch="sm90", num_sms=132)  # no tuned table is looked up
M, N, K = 4096, 8192, 4096


def empty(dtype, *shape):
    return torch.empty(shape, dtype=dtype)


def make(x, weight, kind="none", out_dtype=BF16, **options):
    """Uninitialised operands: only sizes, strides and dtypes matter to the compiler."""
    m, n, k = x.shape[-2], weight.shape[-2], x.shape[-1]
    blocks = -(-k // 128)
    scales = {
        "tensor": ("rows", (1,), (1,)),
        "rows": ("rows", (m,), (n,)),
        "blocks": ("blocks", (m, blocks), (-(-n // 128), blocks)),
    }
    scalings = ()
    if kind != "none":
        name, x_shape, w_shape = scales[kind]
        scalings = (Scaling(name, torch.empty(x_shape), torch.empty(w_shape)),)
    activation = options.pop("activation", "none")
    return Product(x, (weight,), (), activation, out_dtype, scalings=scalings, **options)


def compile_product(product, **changes):
    config = replace(config_for(product, INFO), **changes)
    program = plan_matmul(
        product.x,
        product.weights,
        [],
        torch.empty(product.flat_shape, dtype=product.out_dtype),
        activation=product.activation,
        config=config,
        num_sms=INFO.num_sms,
        scaling=product.scalings[0] if product.scalings else None,
        addend=product.addend,
        fast_accum=product.fast_accum,
    )
    compiled = [
        compile_for(each.kernel, each.args, num_warps=each.num_warps, num_stages=each.num_stages)
        for each in program.launches()
    ]
    for each in compiled:
        assert (each.spill_bytes, each.stack_bytes) == (0, 0)
        assert each.registers_per_block <= 65_536
        assert each.shared_bytes <= INFO.shared_memory_bytes
    return compiled


CASES = {
    "fp8 rows": (
        lambda: make(empty(E4M3, M, K), empty(E4M3, N, K), "rows", activation="gelu"),
        "e4m3.e4m3",
    ),
    "fp8 fast": (
        lambda: make(empty(E4M3, M, K), empty(E4M3, N, K), "tensor", fast_accum=True),
        "e4m3.e4m3",
    ),
    "fp8 mixture": (lambda: make(empty(E4M3, M, K), empty(E5M2, N, K), "rows"), "e4m3.e5m2"),
    "fp8 blocks": (lambda: make(empty(E4M3, M, K), empty(E4M3, N, K), "blocks"), "e4m3.e4m3"),
    "fp8 stored [K, N]": (
        lambda: make(empty(E4M3, M, K), empty(E4M3, K, N).t(), "rows"),
        "e4m3.e4m3",
    ),
    "int8 rows": (lambda: make(empty(INT8, M, K), empty(INT8, N, K), "rows"), "s32.s8.s8"),
    "int8 exact": (
        lambda: make(empty(INT8, M, K), empty(INT8, N, K), "none", torch.int32),
        "s32.s8.s8",
    ),
    "int8 blocks": (lambda: make(empty(INT8, M, K), empty(INT8, N, K), "blocks"), "s32.s8.s8"),
    "batches": (lambda: make(empty(BF16, 8, M, K), empty(BF16, 8, N, K)), "bf16.bf16"),
    "batches of [K, N]": (lambda: make(empty(BF16, 8, M, K), empty(BF16, 8, K, N).mT), "bf16.bf16"),
}


@pytest.mark.parametrize("case", CASES)
def test_tensor_cores_by_descriptors_without_spills(case):
    factory, types = CASES[case]
    compiled = compile_product(factory())[0]
    assert rf"wgmma\.mma_async.*{types.replace('.', '[.]')}" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_fp8_by_pointers_without_spills(kind):
    x = empty(E4M3, M, K + 1)[:, 1:]
    (compiled,) = compile_product(make(x, empty(E4M3, N, K), kind))
    assert "wgmma.mma_async" in compiled.ptx
    assert "cp.async.bulk.tensor" not in compiled.ptx


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_few_rows_and_a_short_k_compile(kind):
    compile_product(make(empty(E4M3, 16, K), empty(E4M3, N, K), kind))
    compile_product(make(empty(E4M3, 16, 16), empty(E4M3, N, 16), kind))


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_splits_are_summed_without_spills(dtype):
    product = make(empty(dtype, M, K), empty(dtype, N, K), "none" if dtype is BF16 else "rows")
    gemm, total = compile_product(product, splits=4)
    assert "wgmma.mma_async" in gemm.ptx
    assert "wgmma" not in total.ptx
    assert total.ptx.count(r"ld\.global.*v4") > 0


def test_an_addend_does_not_spill():
    addend = empty(BF16, M, N)
    (compiled,) = compile_product(make(empty(BF16, M, K), empty(BF16, N, K), addend=addend))
    assert "wgmma.mma_async" in compiled.ptx


def test_fp8_leaves_the_short_accumulator_unless_asked():
    """Without fast_accum each step of K is added to the sum by fp32 instructions."""
    adds = {}
    for fast in (False, True):
        product = make(empty(E4M3, M, 2 * K), empty(E4M3, N, 2 * K), "tensor", fast_accum=fast)
        (compiled,) = compile_product(product, block_n=128, block_m=128, splits=1)
        adds[fast] = compiled.ptx.count(r"add.*f32")
    assert adds[False] >= adds[True] + 64
