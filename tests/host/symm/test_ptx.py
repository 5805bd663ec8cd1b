"""What the kernels of the protocol promise, read in the PTX that Triton emits for sm90."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from plait.collectives.push import close_region, gather_bytes, open_region
from plait.collectives.segments import Segments
from plait.ops.matmul.configs import Config, shared_memory_limit
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common.operands import Weights
from plait.symm import signals
from plait.symm.kernels import _barrier_kernel
from plait.symm.lang.patterns import signal, wait
from plait.testing.compile_sm90 import assert_before, compile_for
from plait.testing.ranks import run_virtual

pytestmark = pytest.mark.newest_triton

REGISTERS_PER_SM = 65_536
ROWS, K, N, WORLD = 256, 1024, 2048, 2

# The release of `signal`, the polls of `wait` (acquiring loads from Triton 3.9 on), its abort word.
RELEASE = r"atom\.global\.(sys\.release|release\.sys)\.exch"
POLL = r"(atom|ld)\.global\.(sys\.acquire|acquire\.sys)\."
ARRIVAL = r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add"
ABORT = r"ld\.volatile\.global"
FENCE = r"fence\.proxy\.async;"
CTA_BARRIER = r"\b(bar|barrier)\.(cta\.)?sync"
LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
TMA_LOAD = r"cp\.async\.bulk\.tensor"


def launches_of_ag_gemm(monkeypatch, config, activation="none", full_epilogue=False):
    """The launches of rank 1's program, as they would be made on a GPU with this config."""
    monkeypatch.setattr(ag_gemm_launch, "choose_config", lambda *args: config)
    num_weights = 2 if activation in ("swiglu", "geglu") else 1

    def plan(group):
        x = torch.empty(ROWS, K, dtype=torch.bfloat16)
        weight = torch.empty(N, K, dtype=torch.bfloat16)
        out = torch.empty(ROWS * WORLD, N, dtype=torch.bfloat16)
        weights = Weights((weight,) * num_weights, (out[0],) * num_weights * full_epilogue)
        segments = Segments.of(x.shape, 0, (ROWS,) * WORLD)
        region = group.take_region(gather_bytes(segments, K * x.element_size()))
        pres = [out] * num_weights * full_epilogue
        return ag_gemm_launch.plan_ag_gemm(
            group, region, x, weights, segments, [out], pres, activation, None
        ).launches()

    return run_virtual(plan, WORLD)[1]


def compiled(launch):
    return compile_for(
        launch.kernel, launch.args, num_warps=launch.num_warps, num_stages=launch.num_stages
    )


def region_launch(make):
    """A launch of the protocol itself on rank 1's first region."""
    return run_virtual(lambda group: make(group.workspace.regions[0]), WORLD)[1]


def line_in(ptx, at, function):
    """The line of a device function's source that PTX line `at` comes from; None for others."""
    lines = ptx.text.splitlines()
    source, first = inspect.getsourcelines(function.fn)
    where = next(found for line in reversed(lines[:at]) if (found := LOCATION.search(line)))
    file = next(line for line in lines if re.match(rf"\s*\.file\s+{where[1]}\s", line))
    in_file = file.rstrip().endswith(f'{Path(inspect.getsourcefile(function.fn)).name}"')
    offset = int(where[2]) - first
    return source[offset].strip() if in_file and 0 <= offset < len(source) else None


def assert_signals_release_after_a_barrier(ptx):
    """A CTA barrier is the last thing that orders memory before each signal: no store between."""
    lines = ptx.text.splitlines()
    found = [at for at in ptx.find_all(RELEASE) if line_in(ptx, at, signal)]
    assert found, "no signal releases at system scope"
    for at in found:
        for line in reversed(lines[:at]):
            if re.search(CTA_BARRIER, line):
                break
            assert not re.search(r"\bst\.|\batom\.|\bred\.|\bbra\b|^\$L__BB", line), line
        else:
            raise AssertionError("no CTA barrier before a signal")


def assert_waits_acquire(ptx, num_waits):
    """Every look at a word acquires, and then the CTA learns of it before it reads on."""
    lines = ptx.text.splitlines()
    polls = ptx.find_all(POLL)
    looks = [text for at in polls if (text := line_in(ptx, at, wait))]
    source = [line.strip() for line in inspect.getsource(wait.fn).splitlines()]
    expected = sum(line.startswith("seen =") for line in source)
    assert all(text.startswith("seen =") for text in looks)
    assert len(looks) >= expected * num_waits  # the compiler may copy a loop
    volatile = [line_in(ptx, at, wait) or "" for at in ptx.find_all(ABORT)]
    assert not any(text.startswith("seen =") for text in volatile)
    for at in polls:
        after = next(
            line
            for line in lines[at + 1 :]
            if re.search(rf"{CTA_BARRIER}|ld\.global|cp\.async", line)
        )
        assert re.search(CTA_BARRIER, after), after
    # An add of 0 that is no acquire would be a poll, too: the only other add is the arrival.
    others = set(ptx.find_all(r"atom\.global.*\.add")) - set(polls)
    assert others == set(ptx.find_all(ARRIVAL))


def assert_waits_end(ptx, num_waits):
    """Each wait looks at the clock before and inside its loop, and at the abort word."""
    assert ptx.count("%globaltimer") >= 2 * num_waits
    assert ptx.count(ABORT) >= 2 * num_waits


def assert_no_spill(found):
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)


def test_prologue_acquires_and_has_a_deadline():
    found = compiled(region_launch(lambda region: open_region(region, 2, signals.Operator.AG_GEMM)))
    assert_waits_acquire(found.ptx, 1)
    assert_waits_end(found.ptx, 1)
    # The epoch becomes visible to the call's kernels after the peers have consumed the region.
    assert_before(found.ptx, POLL, r"st\.global")
    assert_no_spill(found)


def test_finish_arrives_after_its_reads_and_releases():
    found = compiled(region_launch(close_region))
    assert_before(found.ptx, FENCE, CTA_BARRIER, ARRIVAL, CTA_BARRIER, RELEASE)
    assert_signals_release_after_a_barrier(found.ptx)
    assert_no_spill(found)


def test_barrier_signals_then_waits():
    args = {"OP": int(signals.Operator.BARRIER)}
    found = compile_for(
        _barrier_kernel, region_launch(lambda region: {"ctx_ptr": region.ctx}) | args, num_warps=1
    )
    assert_signals_release_after_a_barrier(found.ptx)
    assert_waits_acquire(found.ptx, 1)
    assert_waits_end(found.ptx, 1)
    assert_before(found.ptx, RELEASE, POLL)
    assert_no_spill(found)


@pytest.mark.parametrize(
    ("activation", "block_n", "full_epilogue", "desc"),
    [
        ("none", 256, False, True),
        ("none", 256, False, False),
        ("swiglu", 128, False, True),
        ("swiglu", 128, False, False),
        ("gelu", 256, True, True),
        ("geglu", 128, True, False),
    ],
)
def test_ag_gemm_keeps_the_protocol_and_fits_an_sm(
    monkeypatch, activation, block_n, full_epilogue, desc
):
    config = Config(128, block_n, 64, 8, 3, 8, desc)
    prologue, gemm = launches_of_ag_gemm(monkeypatch, config, activation, full_epilogue)
    assert (prologue.kernel.fn.__name__, gemm.num_warps, gemm.num_stages) == (
        "_prologue_kernel", 8, 3,
    )  # fmt: skip
    found = compiled(gemm)
    ptx = found.ptx
    assert "wgmma.mma_async" in ptx

    assert_signals_release_after_a_barrier(ptx)
    assert_waits_acquire(ptx, 2)  # one for tiles, one for a rank that had too few of them
    assert_waits_end(ptx, 2)
    assert_before(
        ptx, POLL, FENCE, TMA_LOAD if desc else r"cp\.async\.c[ag]", FENCE, CTA_BARRIER, ARRIVAL
    )
    assert (TMA_LOAD in ptx) == desc
    if desc:
        assert ptx.find(FENCE) < ptx.find(TMA_LOAD)
    # The non-coherent path may hold what was there before a peer wrote.
    assert ptx.count(r"ld\.global\.nc") == 0

    assert_no_spill(found)
    assert found.registers_per_block <= REGISTERS_PER_SM
    assert found.shared_bytes <= shared_memory_limit("sm90")
    # One pipeline of tiles: a second loop over tiles would double it.
    tiles = 3 * 64 * (128 + block_n * (2 if activation in ("swiglu", "geglu") else 1)) * 2
    assert tiles <= found.shared_bytes < 1.5 * tiles
