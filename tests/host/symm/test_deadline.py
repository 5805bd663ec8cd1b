"""A rank that never comes: the others' waits expire, name it, and leave NaN."""

import pytest
import torch

import plait
from plait.backends.commands import Program
from plait.collectives.push import close_region, open_region
from plait.collectives.segments import Segments
from plait.errors import PeerTimeoutError
from plait.overlap.ag_gemm.launch import run_ag_gemm
from plait.overlap.common.operands import Weights
from plait.symm import signals
from plait.symm.workspace import NUM_REGIONS
from plait.testing.ranks import run_virtual

ROWS, FEATURES, COLS = 32, 4, 16
DEADLINE_NS = 31e9  # beyond PLAIT_DEADLINE_S


def operands(world_size):
    x = torch.ones(ROWS, FEATURES)
    outs = [torch.zeros(world_size * ROWS, COLS)]
    segments = Segments.of((ROWS, FEATURES), 0, (ROWS,) * world_size)
    return x, Weights((torch.ones(COLS, FEATURES),)), segments, outs


def reserve(group):
    """Collective: later calls need not grow a region, which the absent rank would hold up."""
    for _ in range(NUM_REGIONS):
        group.take_region(1 << 14)


def multiply(group):
    """(error, out) of one AG+GEMM: the output is kept although the call raises."""
    x, weights, segments, outs = operands(group.world_size)
    error = None
    try:
        run_ag_gemm(group, x, weights, segments, outs, [], "none", None)
    except PeerTimeoutError as raised:
        error = raised
    return error, outs[0]


def run(fn, world_size=3, **options):
    options = {"deadline_ns_on_deadlock": DEADLINE_NS, "schedule": "random", **options}
    return run_virtual(fn, world_size, device="cpu", **options)


@pytest.mark.parametrize("seed", range(4))
def test_the_others_learn_who_did_not_come(seed):
    def fn(group):
        reserve(group)
        return None if group.rank == 1 else multiply(group)

    results = run(fn, seed=seed)
    for rank in (0, 2):
        error, out = results[rank]
        assert error.operator == "ag_gemm"
        assert error.peer == 1
        assert error.rank in (0, 2)  # whoever gave up first told both
        assert error.signal.startswith("ready[")
        assert (error.expected, error.seen) == (1, 0)
        assert "rank 1" in str(error)
        assert out[ROWS : 2 * ROWS].isnan().all()


def test_a_late_consumer_is_named_by_its_signal():
    def fn(group):
        reserve(group)
        calls = 2 if group.rank == 1 else 3
        for _ in range(calls):
            error = None
            try:
                plait.all_gather(torch.ones(ROWS, FEATURES), group=group, rows_per_rank=[ROWS] * 2)
            except PeerTimeoutError as raised:
                error = raised
        return error

    error, nothing = run(fn, 2)
    assert nothing is None
    assert (error.rank, error.operator, error.peer) == (0, "all_gather", 1)
    assert (error.expected, error.seen) == (2, 1)


def test_a_rank_that_is_behind_learns_that_a_peer_gave_up():
    """Its waits were satisfied, but what it read may have been overwritten."""

    def fn(group):
        region = group.take_region(1 << 14)
        words = group.workspace.word_views[group.rank]
        words[signals.ABORT], words[signals.RECORD + 1] = signals.ABORT_RECORDED, 6
        group.transport.exchange(None)
        program = Program("ag_gemm", [open_region(region, 1, signals.Operator.AG_GEMM)])
        with pytest.raises(PeerTimeoutError):
            group.run(program.add(close_region(region)), call="open and close")

    run(fn, 2)


def test_a_broken_group_raises_again_and_closes_while_others_work():
    def fn(group):
        others = group.new_group([0, 2])
        reserve(group)
        if group.rank == 1:
            return None
        first, _ = multiply(group)
        second, _ = multiply(group)
        assert first is second  # the group stays broken, and nobody waits again
        with pytest.raises(PeerTimeoutError):
            plait.all_gather(torch.ones(2, 4), group=group)
        group.close()
        group.close()
        return plait.all_gather(torch.full((1, 4), float(group.rank)), group=others)

    results = run(fn)
    for rank in (0, 2):
        assert results[rank].tolist() == [[0.0] * 4, [2.0] * 4]


def test_without_a_deadline_it_is_a_deadlock():
    def fn(group):
        group.take_region(1 << 14)
        if group.rank == 0:
            multiply(group)

    with pytest.raises(plait.errors.DeadlockError, match="rank 0"):
        run(fn, 2, deadline_ns_on_deadlock=None)
