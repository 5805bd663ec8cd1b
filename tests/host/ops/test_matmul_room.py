"""The validity predicate against the cubin: registers, shared memory, room left of an SM."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import plait
from plait.device import device_info
from plait.ops.matmul.configs import (
    Config,
    default_config,
    is_valid,
    shared_memory_bytes,
)
from plait.ops.matmul.launch import Scaling, plan_matmul
from plait.ops.matmul.occupancy import Room, leaves_room, room_left
from plait.overlap.common import tile_config
from plait.symm.group import Group
from plait.testing.compile_sm90 import compile_for
from plait.testing.ranks import run_virtual

pytestmark = pytest.mark.newest_triton

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INFO = replace(device_info("cpu"), arch="sm90", num_sms=132)
WORLD, N, K = 2, 8192, 1024
FEW_SPILLED_BYTES = 96  # of exact fp32, and of tiles of 16 and 32 rows: outside the loop over K


def compiled(launch):
    return compile_for(
        launch.kernel,
        launch.args,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=launch.max_registers,
    )


def config_of(launch):
    """The tile of a launch, whatever chose it."""
    names = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "group_m": "GROUP_M"}
    given = {field: launch.args[name] for field, name in names.items()}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    stored = {"desc_store": launch.args.get("OUT_DESC", False)}
    stored["flatten"] = launch.args.get("FLATTEN", False)
    return Config(**given, **options, **stored, desc=launch.args["DESC"])


# --- plait.matmul


@pytest.mark.parametrize(
    ("shape", "dtype", "desc"),
    [
        ((8192, 8192, 4096), BF16, True),
        ((8192, 8192, 4096), BF16, False),
        ((256, 8192, 8192), BF16, True),
        ((64, 4096, 4096), BF16, True),
        ((16, 8192, 8192), BF16, True),
        ((16, 8192, 8192), BF16, False),
        ((8192, 8192, 4096), FP32, False),
        ((8192, 8192, 8192), FP8, True),
        ((16, 8192, 8192), FP8, True),
    ],
    ids=str,
)
def test_default_configs_are_what_the_predicate_says(shape, dtype, desc):
    """No spill, no more shared memory than predicted, and as many blocks an SM as planned."""
    m, n, k = shape
    config = default_config(m, n, k, dtype, "sm90", desc)
    x, weight = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    out = torch.empty(m, n, dtype=BF16 if dtype is FP8 else dtype)
    options = {}
    if dtype is FP8:
        scaling = Scaling("rows", torch.empty(m), torch.empty(n))
        options = {"scaling": scaling, "fast_accum": True}
    launch = plan_matmul(
        x, [weight], [], out, activation="none", config=config, num_sms=132, **options
    ).launches()[0]
    found = compiled(launch)
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
    assert found.shared_bytes <= shared_memory_bytes(config, dtype)
    room = room_left(config, found.registers, found.shared_bytes, "sm90")
    assert min(room.registers, room.shared_bytes, room.threads) >= 0


@pytest.mark.parametrize(
    "config",
    [
        Config(128, 128, 64, 8, 3, 8, True, blocks_per_sm=2),
        Config(64, 128, 64, 4, 3, 8, True, blocks_per_sm=3),
        Config(64, 64, 64, 4, 4, 8, True, blocks_per_sm=3),
    ],
    ids=str,
)
def test_several_blocks_an_sm_are_resident_together(config):
    assert is_valid(config, BF16, "sm90")
    x, weight, out = (torch.empty(8, 1024, 1024, dtype=BF16) for _ in range(3))
    launch = plan_matmul(
        x, [weight], [], out, activation="none", config=config, num_sms=132
    ).launches()[0]
    assert launch.grid == 132 * config.blocks_per_sm
    found = compiled(launch)
    assert found.spill_bytes == 0
    room = room_left(config, found.registers, found.shared_bytes, "sm90")
    assert min(room.registers, room.shared_bytes, room.threads) >= 0


# --- kernels that wait


def _ag_gemm(group, rows, dtype):
    x, weight = torch.empty(rows, K, dtype=dtype), torch.empty(N, K, dtype=dtype)
    plait.ag_gemm(x, weight, group=group, impl="fused")


def _gemm_rs(group, rows, dtype):
    x, weight = torch.empty(rows * WORLD, K, dtype=dtype), torch.empty(N, K, dtype=dtype)
    plait.gemm_rs(x, weight, group=group, impl="fused")


def _gemm_ar(algorithm):
    def call(group, rows, dtype):
        x, weight = torch.empty(rows * WORLD, K, dtype=dtype), torch.empty(N, K, dtype=dtype)
        plait.gemm_ar(x, weight, group=group, impl="fused", algorithm=algorithm)

    return call


CALLS = {
    "ag_gemm": _ag_gemm,
    "gemm_rs": _gemm_rs,
    "one_shot": _gemm_ar("one_shot"),
    "two_shot": _gemm_ar("two_shot"),
}


@cache
def waiting_kernel(name, rows, dtype):
    """The config that a rank with `rows` rows would run with on sm90, and its kernel, compiled."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_config, "device_info", lambda device: INFO)
        patch.setattr(Group, "run", lambda group, program, *_: found.append((group.rank, program)))
        run_virtual(lambda group: CALLS[name](group, rows, dtype), WORLD, check=False)
    launches = [each for rank, program in found if rank == 1 for each in program.launches()]
    (launch,) = [each for each in launches if "BLOCK_M" in each.args]
    return config_of(launch), compiled(launch)


CASES = [
    ("ag_gemm", 1024, BF16),
    ("ag_gemm", 128, BF16),
    ("ag_gemm", 8, BF16),
    ("gemm_rs", 1024, BF16),
    ("gemm_rs", 128, BF16),
    ("gemm_rs", 8, BF16),
    ("one_shot", 8, BF16),
    ("two_shot", 1024, BF16),
    ("two_shot", 128, BF16),
    ("ag_gemm", 1024, FP32),
    ("gemm_rs", 1024, FP32),
]


@pytest.mark.parametrize(("name", "rows", "dtype"), CASES)
def test_waiting_kernels_keep_to_the_predicate(name, rows, dtype):
    config, found = waiting_kernel(name, rows, dtype)
    assert is_valid(config, dtype, "sm90")
    assert found.shared_bytes <= shared_memory_bytes(config, dtype)
    exact = dtype is FP32 or config.block_m < 64
    assert found.spill_bytes <= (FEW_SPILLED_BYTES if exact else 0)
    room = room_left(config, found.registers, found.shared_bytes, "sm90")
    assert room.registers >= 0
    # Registers may be short (then SMs stay free for copies); all else is there.
    assert leaves_room(config, 64, found.shared_bytes, "sm90")


@pytest.mark.parametrize(("name", "rows"), [case[:2] for case in CASES if case[2] is BF16])
def test_the_predicate_promises_no_room_that_the_cubin_lacks(name, rows):
    config, found = waiting_kernel(name, rows, BF16)
    promised = is_valid(config, BF16, "sm90", room_for_copies=True)
    large = config.block_m * config.block_n > 128 * 128
    assert promised == (not large)
    if promised and name in ("ag_gemm", "gemm_rs"):
        assert leaves_room(config, found.registers, found.shared_bytes, "sm90")
    if rows == 8:
        assert leaves_room(config, found.registers, found.shared_bytes, "sm90")


# --- the arithmetic


def test_room_is_what_the_blocks_do_not_take():
    config = Config(128, 256, 64, 8, 3, 8, True)
    assert room_left(config, 200, 147_480, "sm90") == Room(
        registers=65_536 - 256 * 200, shared_bytes=233_472 - 148_504, threads=2048 - 256
    )
    assert room_left(config, 201, 0, "sm90").registers == 65_536 - 256 * 208
    twice = room_left(replace(config, blocks_per_sm=2), 200, 147_480, "sm90")
    assert (twice.registers, twice.shared_bytes) == (65_536 - 512 * 200, 233_472 - 2 * 148_504)
    assert room_left(config, 200, 0, "sm89").threads == 1536 - 256


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "blocks_per_sm", "expected"),
    [
        (192, 1024, 1, True),
        (193, 1024, 1, False),
        (192, 233_472 - 1024 - 9216, 1, True),
        (192, 233_472 - 1024 - 9215, 1, False),
        (16, 1024, 7, True),
        (16, 1024, 8, False),
    ],
)
def test_a_copy_needs_registers_shared_memory_and_threads(
    registers, shared_bytes, blocks_per_sm, expected
):
    config = Config(128, 128, 64, 8, 3, 8, True, blocks_per_sm=blocks_per_sm)
    assert leaves_room(config, registers, shared_bytes, "sm90") == expected


def test_room_for_copies_is_part_of_the_predicate():
    config = Config(128, 128, 64, 8, 3, 8, True)
    assert is_valid(config, BF16, "sm90", room_for_copies=True)
    for change in ({"block_n": 256}, {"blocks_per_sm": 2}):
        assert is_valid(replace(config, **change), BF16, "sm90")
        assert not is_valid(replace(config, **change), BF16, "sm90", room_for_copies=True)
    deep = replace(config, num_stages=7)  # all of the shared memory
    assert is_valid(deep, BF16, "sm90")
    assert not is_valid(deep, BF16, "sm90", room_for_copies=True)
