"""What a trace costs in compiled code: nothing without it, and no spilled registers with it."""

import re
from dataclasses import replace

import pytest
import torch

from plait.ops.matmul.configs import Config
from plait.testing.compile_sm90 import compile_for
from tests.host.symm.ptx_checks import (
    launch_of_gemm_ar,
    launch_of_gemm_rs,
    launches_of_ag_gemm,
)

pytestmark = pytest.mark.newest_triton

TIMER, SM = r"mov\.u64.*%globaltimer", r"mov\.u32.*%smid"
STORE = r"st\.(shared|global)|cp\.async\.bulk\.tensor.*global\.shared::cta"
# Kernel with the tile that large problems take -> its launch, and stamps of a tile.
WIDE = Config(128, 256, 64, 8, 4, 8, True)
SQUARE = Config(128, 128, 64, 8, 3, 8, True, blocks_per_sm=2)
CASES = {
    "ag_gemm": (lambda patch: launches_of_ag_gemm(patch, WIDE)[-1], 4),
    "gemm_rs 256": (lambda patch: launch_of_gemm_rs(patch, WIDE), 6),
    "gemm_rs 128": (lambda patch: launch_of_gemm_rs(patch, replace(SQUARE, blocks_per_sm=1)), 6),
    "one_shot": (
        lambda patch: launch_of_gemm_ar(
            patch, Config(64, 128, 64, 8, 3, 8, True), "one_shot", 64
        ),
        6,
    ),
    "two_shot": (
        lambda patch: launch_of_gemm_ar(
            patch, Config(128, 128, 64, 8, 3, 8, True), "two_shot", 2048
        ),
        9,
    ),
}  # fmt: skip


def compiled(launch, **more):
    return compile_for(
        launch.kernel,
        {**launch.args, **more},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=launch.max_registers,
    )


@pytest.mark.parametrize("name", CASES)
def test_stamps_cost_nothing_unless_traced(monkeypatch, name):
    make, num_stamps = CASES[name]
    launch = make(monkeypatch)
    plain = compiled(launch)
    assert SM not in plain.ptx
    buffer = torch.zeros(8, 8, dtype=torch.int64)
    traced = compiled(launch, trace_ptr=buffer, TRACE=True)
    assert traced.ptx.count(TIMER) >= plain.ptx.count(TIMER) + num_stamps
    assert traced.ptx.count(r"\.param") > plain.ptx.count(r"\.param")
    assert (traced.spill_bytes, traced.stack_bytes) == (0, 0)
    assert traced.shared_bytes == plain.shared_bytes
    assert traced.registers_per_block <= 65_536  # as resident as without stamps
    # The stamp after the K loop comes when its last product is done.
    done = traced.ptx.find(r"wgmma\.wait_group\.sync\.aligned\s+0")
    following = traced.ptx.text.splitlines()[done + 1 :]
    what_next = next(line for line in following if re.search(rf"{TIMER}|{STORE}|wgmma\.mma", line))
    assert re.search(TIMER, what_next)
