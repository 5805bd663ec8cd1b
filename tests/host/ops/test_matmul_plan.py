"""`plait.matmul` before it runs: tile choices, what descriptors need, and the program."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from plait.ops.matmul.candidates import tuning_candidates
from plait.ops.matmul.configs import Config, candidates, default_config, is_valid, least_block_k
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.operands import descriptors_allowed, weights_are_kn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 16, 17, 100, 4096, 49152)


@pytest.mark.parametrize("arch", ["cpu", "sm80", "sm89", "sm90", "sm100", "gfx942"])
def test_default_config_is_valid_everywhere(arch):
    for m, n, k, dtype, count, precision in product(
        SIZES, SIZES, SIZES, DTYPES, (1, 2), ("ieee", "tf32")
    ):
        for desc in (True, False):
            options = {"num_weights": count, "precision": precision}
            config = default_config(m, n, k, dtype, arch, desc, **options)
            assert is_valid(config, dtype, arch, **options), (m, n, k, dtype, config)
            assert desc or not config.desc


def test_default_config_examples():
    bf16, fp32 = torch.bfloat16, torch.float32
    sixteen_waves = default_config(8448, 8192, 8192, bf16, "sm90", True)
    assert sixteen_waves == Config(128, 256, 64, 8, 4, 8, True, desc_store=True, flatten=True)
    half_a_wave_more = default_config(1024, 6144, 12288, bf16, "sm90", True)
    assert (half_a_wave_more.splits, half_a_wave_more.split_tail) == (2, True)
    assert default_config(2048, 2048, 128, bf16, "sm90", True, batch=16).blocks_per_sm == 2
    assert default_config(16, 8192, 8192, bf16, "sm90", True).block_m == 16
    assert default_config(1024, 1024, 8192, bf16, "sm90", True).block_n == 128
    assert default_config(8192, 8192, 8192, bf16, "sm90", True, num_weights=2).block_n == 128
    assert default_config(8192, 8192, 8192, fp32, "sm90", True, precision="tf32").block_k == 32
    assert default_config(100, 100, 100, bf16, "cpu", True) == Config(32, 128, 128, 4, 1, 8, True)
    assert default_config(5, 7, 9, bf16, "cpu", False) == Config(16, 16, 16, 4, 1, 8, False)


def test_validity_has_limits():
    bf16, fp32 = torch.bfloat16, torch.float32
    good = Config(128, 256, 64, 8, 3, 8, True)
    assert is_valid(good, bf16, "sm90")
    assert not is_valid(good, bf16, "sm80")  # descriptors
    assert not is_valid(good, bf16, "sm90", num_weights=2)  # registers
    assert not is_valid(Config(128, 256, 64, 8, 5, 8, True), bf16, "sm90")  # shared memory
    assert not is_valid(Config(128, 96, 64, 8, 3, 8, True), bf16, "sm90")  # no power of two
    assert not is_valid(Config(8, 128, 64, 8, 3, 8, True), bf16, "sm90")  # below tl.dot's 16
    assert not is_valid(Config(128, 128, 32, 8, 3, 8, False), fp32, "sm90")  # no tensor cores


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_eight_bits_take_no_short_step_of_k(dtype, arch):
    good = Config(64, 64, 32, 4, 3, 8, False)
    assert is_valid(good, dtype, arch)
    assert not is_valid(replace(good, block_k=16), dtype, arch)
    assert is_valid(replace(good, block_k=16), torch.bfloat16, arch)
    assert (least_block_k(dtype), least_block_k(torch.float16)) == (32, 16)
    for k in (0, 1, 16, 31, 33, 4096):
        for choose in (candidates, tuning_candidates):
            found = choose(100, 200, k, dtype, arch, True)
            assert all(is_valid(each, dtype, arch) for each in found)
            assert min(each.block_k for each in found) >= 32


def test_blocks_of_one_sm_share_what_it_has():
    def valid(blocks_per_sm, *config, dtype=torch.bfloat16):
        return is_valid(Config(*config, True, blocks_per_sm=blocks_per_sm), dtype, "sm90")

    assert valid(2, 128, 128, 64, 8, 3, 8)
    assert not valid(3, 128, 128, 64, 8, 2, 8)  # registers
    assert not valid(2, 128, 256, 64, 8, 1, 8)
    # The hardware keeps 1 KiB for itself beside each block: 3 x 72 fit 227 KiB, 3 x 75 do not.
    assert valid(3, 64, 128, 128, 4, 3, 8, dtype=torch.float8_e4m3fn)
    assert not valid(3, 64, 256, 64, 4, 4, 8, dtype=torch.float8_e4m3fn)


def test_candidates_are_valid_unique_and_start_with_the_default():
    problem = (4096, 8192, 4096, torch.bfloat16, "sm90", True)
    found = candidates(*problem)
    assert found[0] == default_config(*problem)
    assert len(set(found)) == len(found) > 20
    assert all(is_valid(config, torch.bfloat16, "sm90") for config in found)
    assert Config(256, 128, 64, 8, 3, 8, True) in found


def operands(m, n, k):
    return torch.randn(m, k).bfloat16(), [torch.randn(n, k).bfloat16()]


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "padded rows": lambda t: F.pad(t, (0, 8))[:, : t.shape[1]],
    "every other column": lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2],
    "odd address": lambda t: F.pad(t, (1, 0))[:, 1:],
}


def test_descriptors_need_aligned_rows():
    x, (weight,) = operands(33, 48, 40)
    allowed = {
        name: descriptors_allowed(make(x), [weight], "sm90") for name, make in LAYOUTS.items()
    }
    assert allowed == {
        "contiguous": True,
        "transposed": False,
        "padded rows": True,
        "every other column": False,
        "odd address": False,
    }
    assert not descriptors_allowed(x, [weight], "sm80")
    assert not descriptors_allowed(x[:1].expand(33, 40), [weight], "sm90")
    assert weights_are_kn([weight.t().contiguous().t()])
    assert descriptors_allowed(x, [weight.t().contiguous().t()], "sm90")
    assert not weights_are_kn([weight, weight.t().contiguous().t()])


def test_plan_is_one_persistent_launch():
    x, weights = operands(100, 300, 64)
    out = torch.empty(100, 300)
    config = Config(32, 128, 64, 4, 1, 8, False)
    program = plan_matmul(x, weights, [], out, activation="none", config=config, num_sms=5)
    assert program.operator == "matmul"
    (launch,) = program.commands
    assert (launch.grid, launch.stream, launch.num_warps) == (5, "main", 4)
    assert launch.args["HAS_BIAS"] is launch.args["STORE_PRE"] is False
    many = plan_matmul(x, weights, [], out, activation="none", config=config, num_sms=132)
    assert many.launches()[0].grid == 4 * 3
    nothing = plan_matmul(x[:0], weights, [], out[:0], activation="none", config=config, num_sms=5)
    assert nothing.commands == []
