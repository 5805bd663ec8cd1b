"""Compiling for sm90 without a GPU: what comes out of the GEMM kernel, and how PTX is searched."""

import pytest
import torch
import triton
import triton.language as tl

from plait.ops.matmul.configs import Config, default_config
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.operands import descriptors_allowed
from plait.testing.compile_sm90 import Ptx, assert_before, compile_for

pytestmark = pytest.mark.newest_triton

REGISTERS_PER_SM = 65_536


def compile_matmul(dtype, activation, *, desc, bias=True, pre=True, kn=False, precision="ieee"):
    m, n, k = 4096, 8192, 1024
    num_weights = 2 if activation in ("swiglu", "geglu") else 1
    x = torch.empty(m, k, dtype=dtype)
    weight = torch.empty(k, n, dtype=dtype).t() if kn else torch.empty(n, k, dtype=dtype)
    weights = [weight] * num_weights
    assert descriptors_allowed(x, weights, "sm90")
    out = torch.empty(m, n, dtype=dtype)
    config = default_config(
        m, n, k, dtype, "sm90", desc, num_weights=num_weights, precision=precision
    )
    program = plan_matmul(
        x,
        weights,
        [out[0]] * num_weights if bias else [],
        out,
        [out] * num_weights if pre else [],
        activation=activation,
        config=config,
        num_sms=132,
        precision=precision,
    )
    (launch,) = program.launches()
    assert launch.grid == 132 * config.blocks_per_sm
    return compile_for(
        launch.kernel, launch.args, num_warps=launch.num_warps, num_stages=launch.num_stages
    )


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("desc", [True, False])
def test_plain_bf16_uses_tensor_cores_and_does_not_spill(desc, kn):
    compiled = compile_matmul(torch.bfloat16, "none", desc=desc, bias=False, pre=False, kn=kn)
    assert "wgmma.mma_async" in compiled.ptx
    assert ("cp.async.bulk.tensor" in compiled.ptx) == desc
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert compiled.registers_per_block <= REGISTERS_PER_SM
    assert compiled.shared_bytes <= 232_448


@pytest.mark.parametrize(("activation", "desc"), [("gelu", True), ("geglu", False)])
def test_largest_epilogues_do_not_spill(activation, desc):
    compiled = compile_matmul(torch.bfloat16, activation, desc=desc)
    assert "wgmma.mma_async" in compiled.ptx
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_fp32_keeps_its_precision_and_does_not_spill(precision):
    compiled = compile_matmul(torch.float32, "gelu", desc=False, precision=precision)
    assert ("wgmma.mma_async" in compiled.ptx) == (precision == "tf32")
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_relu_keeps_nan():
    compiled = compile_matmul(torch.bfloat16, "relu", desc=True, bias=False, pre=False)
    assert "max.NaN.f32" in compiled.ptx  # the plain maximum would turn NaN into 0


# --- the tool itself


@triton.jit
def _specialised_kernel(x_ptr, num_values, one, scale, BLOCK: tl.constexpr = 1024):
    offs = tl.arange(0, BLOCK) * one
    values = tl.load(x_ptr + offs, mask=offs < num_values)
    tl.store(x_ptr + offs, values * scale, mask=offs < num_values)


@triton.jit
def _too_many_registers_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offs)
    tl.debug_barrier()  # everything is loaded before anything is stored
    tl.store(x_ptr + BLOCK + offs, values)


@triton.jit
def _signal_kernel(x_ptr, word_ptr):
    tl.store(x_ptr + tl.arange(0, 128), 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(word_ptr, 1, sem="release", scope="sys")


def test_values_are_specialised_as_in_a_launch():
    x = torch.empty(4096)
    values = {"num_values": 1024, "one": 1, "scale": 0.5}
    aligned = compile_for(_specialised_kernel, {"x_ptr": x, **values})
    assert aligned.ptx.count(r"ld\.global.*v4") > 0
    shifted = compile_for(_specialised_kernel, {"x_ptr": x[1:], **values})
    odd = compile_for(_specialised_kernel, {"x_ptr": x, **values, "num_values": 1023})
    assert shifted.ptx.count(r"ld\.global.*v4") == 0
    assert odd.ptx.count(r"ld\.global.*v4") == 0


def test_spills_are_counted():
    compiled = compile_for(
        _too_many_registers_kernel, {"x_ptr": torch.empty(65536), "BLOCK": 65536}, num_warps=4
    )
    assert compiled.stack_bytes > 0
    assert compiled.spill_bytes > 0


def test_wrong_argument_names_are_named():
    with pytest.raises(TypeError, match=r"unknown arguments \['y_ptr'\], missing.*'x_ptr'"):
        compile_for(_specialised_kernel, {"y_ptr": torch.empty(4)})


def test_assert_before_sees_the_order():
    words = torch.zeros(1, dtype=torch.int32)
    ptx = compile_for(_signal_kernel, {"x_ptr": torch.empty(128), "word_ptr": words}).ptx
    assert_before(ptx, r"st\.global", r"bar\.sync", r"atom.*release")
    with pytest.raises(AssertionError, match=r"st.*global"):
        assert_before(ptx, r"atom.*release", r"st\.global", r"bar\.sync")


def test_ptx_search():
    ptx = Ptx("first\nsecond\nfirst again")
    assert (ptx.find("first"), ptx.find("first", 1), ptx.find("third")) == (0, 2, -1)
    assert ptx.find_all("first") == [0, 2]
    assert ptx.count("second") == 1
    assert "again" in ptx
    assert_before(ptx, "first", "second", "first")
    with pytest.raises(AssertionError, match="'second' after line 1"):
        assert_before(ptx, "second", "second")


def test_config_of_the_kernel_is_the_one_measured_for_large_problems():
    config = default_config(8448, 8192, 8192, torch.bfloat16, "sm90", True)
    assert config == Config(128, 256, 64, 8, 4, 8, True, desc_store=True, flatten=True)
