"""What the kernels of the protocol promise, read in the PTX that Triton emits for sm90."""

import re
from dataclasses import replace

import pytest
import torch

from plait.collectives.push import close_region, open_region
from plait.ops.matmul.configs import Config, shared_memory_limit
from plait.settings import override
from plait.symm import signals
from plait.symm.kernels import _barrier_kernel
from plait.symm.lang.patterns import signal, signal_all, wait, wait_all
from plait.testing.compile_sm90 import assert_before, compile_for
from tests.host.symm.ptx_checks import (
    ARRIVAL,
    CTA_BARRIER,
    ENDED,
    FENCE,
    LEADS,
    POLL,
    REGISTERS_PER_SM,
    RELEASE,
    TMA_LOAD,
    assert_no_spill,
    assert_signals_release_after_a_barrier,
    assert_waits_acquire,
    assert_waits_end,
    compiled,
    launch_of_gemm_ar,
    launch_of_gemm_rs,
    launches_of_ag_gemm,
    line_in,
    lines_of_the_main_loop,
    region_launch,
)

pytestmark = pytest.mark.newest_triton


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
    assert_signals_release_after_a_barrier(found.ptx, signal_all)
    assert_no_spill(found)


def test_barrier_signals_then_waits():
    args = {"OP": int(signals.Operator.BARRIER)}
    found = compile_for(
        _barrier_kernel, region_launch(lambda region: {"ctx_ptr": region.ctx}) | args, num_warps=1
    )
    assert_signals_release_after_a_barrier(found.ptx, signal_all)
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

    assert_signals_release_after_a_barrier(ptx, signal_all)
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


def events_of(ptx):
    """(line, letter) in the order of the text: a tile's wait acquires (A), the fence after it (F),
    a descriptor is loaded (L), tiles are multiplied (M)."""
    lines = ptx.text.splitlines()
    letters = {"A": POLL, "F": FENCE, "L": TMA_LOAD, "M": r"wgmma\.mma_async"}
    return [
        (at, letter)
        for at, line in enumerate(lines)
        for letter, pattern in letters.items()
        if re.search(pattern, line) and (letter != "A" or line_in(ptx, at, wait))
    ]


@pytest.mark.parametrize("stages", [3, 4])
def test_flattened_ag_gemm_loads_a_tile_after_its_wait(monkeypatch, stages):
    """One loop over tiles and K, whose loads run ahead by stages - 1: so do the waits.

    The peeled iterations before the loop and the loop itself must each acquire, fence, then load.
    """
    config = Config(128, 256, 64, 8, stages, 8, True, desc_store=True, flatten=True)
    _, gemm = launches_of_ag_gemm(monkeypatch, config)
    constants = {name: gemm.args[name] for name in ("FLATTEN", "DESC", "OUT_DESC", "LEADS")}
    assert constants == {"FLATTEN": True, "DESC": True, "OUT_DESC": True, "LEADS": False}
    assert (gemm.num_warps, gemm.num_stages) == (8, stages)
    found = compiled(gemm)
    loop = lines_of_the_main_loop(found.ptx)
    events = events_of(found.ptx)

    inside = "".join(letter for at, letter in events if at in loop)
    assert re.fullmatch(r"A+FM+LL", inside), inside  # both operands of the iteration stages - 1 on
    first_load = next(at for at, letter in events if letter == "L")
    before = "".join(letter for at, letter in events if at < min(loop))
    # Without K nothing is loaded: that loop over tiles has a wait of its own, wherever it lies.
    assert re.fullmatch(rf"(A+F)*(A+FLL){{{stages - 1}}}", before), before
    # Nothing is loaded or multiplied elsewhere.
    after = "".join(letter for at, letter in events if at > max(loop))
    assert not set(after) & set("LM"), after
    assert min(loop) > first_load
    assert_no_spill(found)
    assert found.registers_per_block <= REGISTERS_PER_SM
    assert found.shared_bytes <= shared_memory_limit("sm90")


def test_the_pieces_of_the_last_wave_follow_the_kernel_before_them(monkeypatch):
    """A second launch that starts early: the tiles' waits as in the first, then that kernel's end.

    Whatever follows on the stream, and the peers that `finish` tells, follow both.
    """
    config = Config(128, 256, 64, 8, 4, 8, True, desc_store=True, flatten=True)
    with override(cpu_blocks=5):
        _, lead, tail = launches_of_ag_gemm(monkeypatch, config)
    assert [each.args["PIECES"] for each in (lead, tail)] == [1, 2]
    assert [each.args["BLOCK_N"] for each in (lead, tail)] == [256, 128]
    assert lead.args["LEADS"]
    tail = replace(tail, args=tail.args | {"EARLY": True})

    first, second = compiled(lead).ptx, compiled(tail).ptx
    assert (LEADS in first, ENDED in first) == (True, False)
    assert (LEADS in second, ENDED in second) == (False, True)
    assert_before(first, LEADS, POLL, "wgmma", ARRIVAL)
    assert_before(second, POLL, "wgmma", ENDED, FENCE, CTA_BARRIER, ARRIVAL)
    loop = lines_of_the_main_loop(second)
    inside = "".join(letter for at, letter in events_of(second) if at in loop)
    assert re.fullmatch(r"A+FM+LL", inside), inside


VECTORS = r"{}\.global\S*\.v4\.b32"
NARROW = r"\b(ld|st)\.global\S*\.(b|u|s)(8|16)\b"


@pytest.mark.parametrize(
    "config",
    [
        Config(128, 256, 64, 8, 3, 8, True),
        Config(128, 128, 64, 8, 3, 8, True),
        Config(128, 128, 64, 8, 3, 8, False),
        Config(64, 64, 64, 4, 3, 8, True),
    ],
    ids=lambda config: f"{config.block_m}x{config.block_n} desc={config.desc}",
)
@pytest.mark.parametrize(
    ("num_cols", "world_size", "partial"),
    [(2048, 8, torch.bfloat16), (2064, 2, torch.bfloat16), (2048, 4, torch.float32)],
    ids=str,
)
def test_partial_sums_move_in_vectors(monkeypatch, config, num_cols, world_size, partial):
    """Tiles of partial sums, their sums and the bias: 16 bytes at a time, N divisible by 16."""
    launch = launch_of_gemm_rs(monkeypatch, config, num_cols, world_size, partial)
    found = compiled(launch)
    assert found.ptx.count(VECTORS.format("st")) >= 2  # the partial tile and the sum
    assert found.ptx.count(VECTORS.format("ld")) >= world_size  # a slot of each rank
    assert found.ptx.count(NARROW) == 0
    assert_no_spill(found)
    assert_signals_release_after_a_barrier(found.ptx, signal)
    assert_waits_acquire(found.ptx, 1)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_gemm_ar_moves_partial_sums_in_vectors(monkeypatch, algorithm):
    config = Config(64 if algorithm == "one_shot" else 128, 128, 64, 8, 3, 8, True)
    found = compiled(launch_of_gemm_ar(monkeypatch, config, algorithm, 64))
    assert found.ptx.count(VECTORS.format("st")) >= 2
    assert found.ptx.count(VECTORS.format("ld")) >= 8
    assert found.ptx.count(NARROW) == 0
    assert_no_spill(found)
    assert_signals_release_after_a_barrier(found.ptx, signal_all)
    assert_waits_acquire(found.ptx, 1)


def test_columns_that_no_vector_divides_are_still_moved(monkeypatch):
    config = Config(128, 128, 64, 8, 3, 8, True)
    found = compiled(launch_of_gemm_rs(monkeypatch, config, 2047, 2))
    assert found.ptx.count(NARROW) > 0  # so the tests above can fail


@pytest.mark.parametrize(("num_warps", "atomics"), [(1, 2), (2, 1), (8, 1)])
def test_signal_all_and_wait_all_are_one_atomic_of_all_peers(num_warps, atomics):
    """One instruction for 64 peers where the block has as many threads, with its barrier."""
    args = region_launch(lambda region: {"ctx_ptr": region.ctx, "OP": 7})
    found = compile_for(_barrier_kernel, args, num_warps=num_warps)
    ptx = found.ptx
    lines = ptx.text.splitlines()
    anywhere = ptx.find_all(r"\batom\.global")
    signals_at = [at for at in anywhere if line_in(ptx, at, signal_all)]
    waits_at = [at for at in anywhere if line_in(ptx, at, wait_all)]
    assert (len(signals_at), len(waits_at)) == (atomics, atomics)
    assert all(re.search(RELEASE, lines[at]) for at in signals_at)
    assert all(re.search(POLL + r"add", lines[at]) for at in waits_at)
    assert max(signals_at) < min(waits_at)
    assert_signals_release_after_a_barrier(ptx, signal_all)
    # The barrier of the source comes after the acquire, before anything else is decided.
    barriers = [at for at in ptx.find_all(CTA_BARRIER) if line_in(ptx, at, wait_all)]
    assert any(
        at > max(waits_at) and line_in(ptx, at, wait_all) == "tl.debug_barrier()" for at in barriers
    )
    first_branch = next(at for at in ptx.find_all(r"\bbra\b") if at > max(waits_at))
    assert any(max(waits_at) < at < first_branch for at in barriers)
    assert_no_spill(found)
