"""The fp8 and int8 forms of the overlapped GEMMs, compiled for sm90 with the tiles chosen there."""

import re
from dataclasses import replace

import pytest
import torch

from plait.collectives.push import gather_bytes
from plait.collectives.segments import Segments
from plait.device import device_info
from plait.ops.matmul.configs import shared_memory_limit
from plait.ops.matmul.launch import Scaling
from plait.overlap.ag_gemm import configs as ag_gemm_configs
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common import tile_config
from plait.overlap.common.operands import Weights
from plait.overlap.common.row_scales import RowScales
from plait.overlap.gemm_ar import launch as gemm_ar_launch
from plait.overlap.gemm_rs import launch as gemm_rs_launch
from plait.symm.lang.patterns import wait
from plait.testing.ranks import run_virtual
from tests.host.symm.ptx_checks import (
    FENCE,
    POLL,
    REGISTERS_PER_SM,
    TMA_LOAD,
    assert_no_spill,
    compiled,
    line_in,
    lines_of_the_main_loop,
)

pytestmark = pytest.mark.newest_triton

E4M3, E5M2, INT8, BF16, FP32 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float32,
)  # fmt: skip
KINDS = ("tensor", "rows", "blocks")
WORLD, ROWS, N = 2, 1024, 8192
SHORT, LONG = 2048, 8192  # of K: bf16 sums of fp8 stay in one accumulator up to 4096
INFO = replace(device_info("cpu"), arch="sm90", num_sms=132)


@pytest.fixture(autouse=True)
def _as_on_sm90(monkeypatch):
    for module in (ag_gemm_configs, tile_config):
        monkeypatch.setattr(module, "device_info", lambda device: INFO)


def operands(dtype, kind, rows, k, n=N):
    """x, the weight with its scaling, uninitialised: only layouts matter to the compiler."""
    blocks = -(-k // 128)
    name, x_shape, w_shape = {
        "tensor": ("rows", (1,), (1,)),
        "rows": ("rows", (rows,), (n,)),
        "blocks": ("blocks", (rows, blocks), (-(-n // 128), blocks)),
    }[kind]
    scaling = Scaling(name, torch.empty(x_shape), torch.empty(w_shape))
    weight = torch.empty(n, k).to(dtype)
    return torch.empty(rows, k).to(dtype), Weights((weight,), (torch.empty(n),), (scaling,))


def launches_of_ag_gemm(dtype, kind, k, out_dtype=BF16, rows=ROWS, activation="none"):
    def plan(group):
        x, weights = operands(dtype, kind, rows, k)
        out = torch.empty(rows * WORLD, N, dtype=out_dtype)
        segments = Segments.of(x.shape, 0, (rows,) * WORLD)
        scales = RowScales.of(weights.scalings[0].x, segments, group.rank)
        region = group.take_region(gather_bytes(segments, k + scales.row_bytes))
        program = ag_gemm_launch.plan_ag_gemm(
            group, region, x, weights, segments, [out], [], activation, None, scales
        )
        return program.launches()[1:]

    return run_virtual(plan, WORLD)[1]


def launch_of_gemm_rs(dtype, kind, k, partial=BF16):
    def plan(group):
        x, weights = operands(dtype, kind, ROWS * WORLD, k)
        out = torch.empty(ROWS, N, dtype=BF16)
        segments = Segments.of(out.shape, 0, (ROWS,) * WORLD)
        region = group.take_region(WORLD * out.numel() * partial.itemsize)
        steps = gemm_rs_launch.plan_gemm_rs(group, region, x, weights, segments, out, partial)
        return steps[-1]

    return run_virtual(plan, WORLD)[1]


def launch_of_gemm_ar(dtype, kind, k, algorithm, rows):
    def plan(group):
        x, weights = operands(dtype, kind, rows, k)
        out = torch.empty(rows, N, dtype=BF16)
        region = group.take_region(2 * WORLD * out.nbytes)
        program = gemm_ar_launch.plan_gemm_ar(group, region, x, weights, out, BF16, algorithm)
        return program.launches()[-1]

    return run_virtual(plan, WORLD)[1]


CASES = {
    "ag_gemm tensor": (lambda: launches_of_ag_gemm(E4M3, "tensor", SHORT), "e4m3.e4m3", 256),
    "ag_gemm rows": (lambda: launches_of_ag_gemm(E4M3, "rows", SHORT), "e4m3.e4m3", 256),
    "ag_gemm rows, long": (lambda: launches_of_ag_gemm(E4M3, "rows", LONG), "e4m3.e4m3", 128),
    "ag_gemm rows, fp32": (
        lambda: launches_of_ag_gemm(E4M3, "rows", SHORT, FP32), "e4m3.e4m3", 128,
    ),
    "ag_gemm rows, gelu": (
        lambda: launches_of_ag_gemm(E4M3, "rows", SHORT, activation="gelu"), "e4m3.e4m3", 256,
    ),
    "ag_gemm blocks": (lambda: launches_of_ag_gemm(E4M3, "blocks", LONG), "e4m3.e4m3", 128),
    "ag_gemm e5m2": (lambda: launches_of_ag_gemm(E5M2, "rows", SHORT), "e5m2.e5m2", 256),
    "ag_gemm int8": (lambda: launches_of_ag_gemm(INT8, "rows", LONG), "s32.s8.s8", 256),
    "ag_gemm int8 blocks": (lambda: launches_of_ag_gemm(INT8, "blocks", LONG), "s32.s8.s8", 128),
    "gemm_rs tensor": (lambda: [launch_of_gemm_rs(E4M3, "tensor", SHORT)], "e4m3.e4m3", 128),
    "gemm_rs rows": (lambda: [launch_of_gemm_rs(E4M3, "rows", LONG)], "e4m3.e4m3", 128),
    "gemm_rs rows, fp32": (
        lambda: [launch_of_gemm_rs(E4M3, "rows", SHORT, FP32)], "e4m3.e4m3", 128,
    ),
    "gemm_rs blocks": (lambda: [launch_of_gemm_rs(E4M3, "blocks", LONG)], "e4m3.e4m3", 128),
    "gemm_rs int8": (lambda: [launch_of_gemm_rs(INT8, "rows", LONG)], "s32.s8.s8", 128),
    "one_shot rows": (
        lambda: [launch_of_gemm_ar(E4M3, "rows", LONG, "one_shot", 64)], "e4m3.e4m3", 64,
    ),
    "one_shot blocks": (
        lambda: [launch_of_gemm_ar(E4M3, "blocks", LONG, "one_shot", 64)], "e4m3.e4m3", 64,
    ),
    "two_shot rows": (
        lambda: [launch_of_gemm_ar(E4M3, "rows", LONG, "two_shot", 2048)], "e4m3.e4m3", 128,
    ),
    "two_shot blocks": (
        lambda: [launch_of_gemm_ar(E4M3, "blocks", LONG, "two_shot", 2048)], "e4m3.e4m3", 128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tensor_cores_without_spills(case):
    make, types, block_n = CASES[case]
    for launch in make():
        assert launch.args["DESC"]
        assert launch.args["BLOCK_N"] * launch.args.get("PIECES", 1) == block_n
        found = compiled(launch)
        assert rf"wgmma\.mma_async.*{types.replace('.', '[.]')}" in found.ptx
        assert TMA_LOAD in found.ptx
        # The non-coherent path may hold what was there before a peer wrote.
        assert found.ptx.count(r"ld\.global\.nc") == 0
        assert_no_spill(found)
        assert found.registers_per_block <= REGISTERS_PER_SM
        assert found.shared_bytes <= shared_memory_limit("sm90")


@pytest.mark.parametrize("k", [SHORT + 1, LONG + 1])
def test_pointers_take_short_steps(k):
    """K of no round number of bytes: no descriptors, but loads byte by byte."""
    launches = launches_of_ag_gemm(E4M3, "rows", k)
    summed = launch_of_gemm_rs(E4M3, "rows", k)
    for launch in (*launches, summed):
        assert not launch.args["DESC"]
        assert launch.args["BLOCK_K"] == 32
        found = compiled(launch)
        assert "wgmma.mma_async" in found.ptx
        assert found.spill_bytes < 512  # with steps of 128 it would be 2,000 and more


@pytest.mark.parametrize(("rows", "k"), [(16, 16), (40, 16), (16, SHORT), (40, SHORT)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_and_a_short_k_compile(kind, rows, k):
    launches = launches_of_ag_gemm(E4M3, kind, k, rows=rows)
    for launch in (*launches, launch_of_gemm_ar(E4M3, kind, k, "one_shot", rows)):
        found = compiled(launch)
        assert found.spill_bytes <= 40  # below 64 rows, of mma and not wgmma, as in bf16
        assert rows == 16 or (found.spill_bytes, found.stack_bytes) == (0, 0)


def test_tiles_that_ranks_exchange_depend_on_nothing_that_may_differ():
    """K, the kind of scales and the layout of x are each rank's own."""
    sizes = {
        tuple(launch_of_gemm_rs(E4M3, kind, k).args[name] for name in ("BLOCK_M", "BLOCK_N"))
        for kind in KINDS
        for k in (16, SHORT, LONG, LONG + 1)
    }
    assert sizes == {(128, 128)}


@pytest.mark.parametrize("kind", ["tensor", "rows"])
def test_flattened_loads_come_after_their_wait(kind):
    """As of bf16 (test_ptx.py): each iteration acquires, fences, then loads what it multiplies."""
    (launch,) = launches_of_ag_gemm(E4M3, kind, SHORT)
    assert launch.args["FLATTEN"]
    ptx = compiled(launch).ptx
    loop = lines_of_the_main_loop(ptx)
    marks = {"A": POLL, "F": FENCE, "L": TMA_LOAD, "M": r"wgmma\.mma_async"}
    inside = "".join(
        letter
        for at, line in enumerate(ptx.text.splitlines())
        for letter, pattern in marks.items()
        if at in loop and re.search(pattern, line) and (letter != "A" or line_in(ptx, at, wait))
    )
    assert re.fullmatch(r"A+FM+LL", inside), inside
