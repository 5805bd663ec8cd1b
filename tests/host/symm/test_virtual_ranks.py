"""The engine of virtual ranks: order, seeds, failure, deadlock, residency and threads."""

import re
import threading

import pytest
import torch
import triton
import triton.language as tl

import plait
from plait.backends.commands import Launch, Program
from plait.errors import ArgumentError, DeadlockError, RankCountError, WorldStoppedError
from plait.symm import signals
from plait.symm.lang.patterns import signal, wait
from plait.symm.lang.words import READY, get_rank
from plait.symm.signals import MAX_RANKS
from plait.symm.virtual.observe import Observer
from plait.testing.ranks import run_virtual

USER = int(signals.Operator.USER)


@triton.jit
def _fill_kernel(out_ptr, value, EXPECTED: tl.constexpr):
    tl.static_assert(EXPECTED == 1, "this kernel wants EXPECTED == 1")
    tl.store(out_ptr + tl.program_id(0), value)


@triton.jit
def _second_block_first_kernel(ctx_ptr, OP: tl.constexpr):
    """Block 0 waits for block 1 of the same launch."""
    rank = get_rank(ctx_ptr)
    if tl.program_id(0) == 0:
        wait(ctx_ptr, READY, 1, rank, OP)
    else:
        signal(ctx_ptr, rank, READY, 1)


class Log(Observer):
    """The interleaving, without addresses, which differ from run to run."""

    def __init__(self):
        self.events = []

    def item_started(self, item):
        self.events.append(("item", item.rank, item.name, item.index))

    def block_started(self, block):
        self.events.append(("block", str(block)))

    def block_asleep(self, block, address):
        self.events.append(("asleep", str(block)))

    def atomic(self, block, address, *, acquire, release, poll, scope, site, vector=False):
        self.events.append(("atomic", str(block), poll, site.line))

    def hosts_met(self, ranks):
        self.events.append(("met", ranks))


class Residency(Observer):
    """The most blocks that one rank had resident at once."""

    def __init__(self):
        self.now, self.most = {}, 0

    def block_started(self, block):
        self.now[block.rank] = self.now.get(block.rank, 0) + 1
        self.most = max(self.most, self.now[block.rank])

    def block_finished(self, block):
        self.now[block.rank] -= 1


def user_launch(group, kernel, grid, args):
    group.run(Program("user", [Launch(kernel, grid, args)]), call=kernel.fn.__name__)


def fill(group, expected=1, grid=1):
    out = torch.zeros(grid, dtype=torch.int32)
    args = {"out_ptr": out, "value": group.rank, "EXPECTED": expected}
    user_launch(group, _fill_kernel, grid, args)
    return out


def meet(group):
    group.barrier()
    return group.rank


def interleaving(seed, schedule="random", world_size=3):
    log = Log()
    run_virtual(meet, world_size, seed, schedule=schedule, check=False, observers=[log])
    return log.events


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_are_in_rank_order(world_size):
    def fn(group):
        assert (group.world_size, group.device.type) == (world_size, torch.device("cpu").type)
        return group.rank, fill(group, grid=2).tolist()

    expected = [(rank, [rank, rank]) for rank in range(world_size)]
    assert run_virtual(fn, world_size, device=torch.device("cpu")) == expected


@pytest.mark.parametrize("schedule", ["random", "late:1", "waiter_first"])
def test_a_seed_fixes_the_interleaving(schedule):
    first = interleaving(7, schedule)
    assert len(first) > 10
    assert interleaving(7, schedule) == first
    assert any(interleaving(seed, schedule) != first for seed in (8, 9, 10))


@pytest.mark.parametrize(
    "schedule", ["random", "late:0", "late:2", "waiter_first", "consumer_first", "copies_last"]
)
def test_every_schedule_ends(schedule):
    assert run_virtual(meet, 3, schedule=schedule) == [0, 1, 2]


def test_the_late_rank_is_late():
    order = []
    run_virtual(lambda group: order.append(group.rank), 3, schedule="late:1")
    assert order[-1] == 1


@pytest.mark.parametrize("schedule", ["fastest", "late:", "late:x", ""])
def test_unknown_schedules_are_named(schedule):
    with pytest.raises(ArgumentError, match=r"schedule: expected one of random, .*late:R"):
        run_virtual(meet, 2, schedule=schedule)


@pytest.mark.parametrize("world_size", [0, -1, MAX_RANKS + 1, 2.0, "2", None])
def test_world_size_must_be_a_count(world_size):
    with pytest.raises(RankCountError, match=f"world_size: expected an int from 1 to {MAX_RANKS}"):
        run_virtual(meet, world_size)


def test_the_first_exception_is_the_one_raised_and_ends_the_others_waits():
    ended = {}

    def fn(group):
        if group.rank == 1:
            raise KeyError("rank 1 has had enough")
        try:
            group.barrier()
        except WorldStoppedError as error:
            ended[group.rank] = error
            raise

    with pytest.raises(KeyError, match="rank 1 has had enough"):
        run_virtual(fn, 3, schedule="late:1")
    assert sorted(ended) == [0, 2]
    assert all(error.rank == 1 and "has had enough" in str(error) for error in ended.values())


def test_a_rank_that_swallows_the_stop_cannot_go_on():
    late = []

    def fn(group):
        if group.rank == 0:
            raise KeyError("first")
        for _ in range(2):
            try:
                group.barrier()
            except WorldStoppedError as error:
                late.append(error)

    with pytest.raises(KeyError, match="first"):
        run_virtual(fn, 2, schedule="late:0")
    assert len(late) == 2


def test_the_world_is_usable_after_a_failure():
    def fail(group):
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            run_virtual(fail, 2)
        assert run_virtual(meet, 2) == [0, 1]


def test_nested_runs_are_refused():
    with pytest.raises(ArgumentError, match="expected a call from outside virtual ranks"):
        run_virtual(lambda group: run_virtual(meet, 2), 2)


def test_a_rank_that_never_comes_is_named():
    def fn(group):
        group.barrier()
        return group.rank == 2 or group.barrier()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(fn, 3)
    text = str(caught.value)
    assert caught.value.cycle == ()
    for rank in (0, 1):
        assert f"rank {rank} host: runs barrier" in text
        assert f"rank {rank} _barrier_kernel[0] of barrier waits at" in text
    assert re.search(r"patterns\.py:\d+ for a word that rank 2 sets", text)


def opposite_orders(group, prepare):
    """Ranks 0 and 1 meet in two groups, each in another order."""
    groups = [group.new_group([0, 1], name) for name in ("left", "right")]
    if group.rank < 2:
        for each in groups * prepare:
            each.barrier()
        for each in groups if group.rank == 0 else reversed(groups):
            each.barrier()


@pytest.mark.parametrize("prepare", [True, False], ids=["blocks", "hosts"])
def test_a_cycle_of_two_ranks_is_shown(prepare):
    with pytest.raises(DeadlockError, match="cycle: rank 0 -> rank 1 -> rank 0") as caught:
        run_virtual(lambda group: opposite_orders(group, prepare), 3)
    assert caught.value.cycle == ("rank 0", "rank 1")


def test_who_is_missing_at_a_meeting_of_hosts_is_named():
    with pytest.raises(DeadlockError, match=r"rank 0 host: waits .* in virtual; missing: rank 1"):
        run_virtual(lambda group: group.rank or group.empty(4), 2)


def test_an_exception_in_a_block_surfaces():
    ended = []

    def fn(group):
        try:
            fill(group, expected=2 if group.rank == 0 else 1)
            group.barrier()
        except WorldStoppedError:
            ended.append(group.rank)
            raise

    with pytest.raises(AssertionError, match="this kernel wants EXPECTED == 1"):
        run_virtual(fn, 3)
    assert sorted(ended) == [0, 1, 2]  # the block's own rank was only waiting for it


def wait_within_a_launch(group):
    region = group.workspace.regions[0]
    user_launch(group, _second_block_first_kernel, 2, {"ctx_ptr": region.ctx, "OP": USER})
    return True


@pytest.mark.parametrize("slots", [2, 3, None])
def test_blocks_that_fit_may_wait_for_each_other(slots):
    seen = Residency()
    found = run_virtual(
        wait_within_a_launch, 2, schedule="waiter_first", sm_slots=slots, observers=[seen]
    )
    assert found == [True, True]
    assert seen.most == 2


def test_blocks_that_do_not_fit_deadlock():
    with pytest.raises(DeadlockError, match=r"_second_block_first_kernel\[0\] of user waits"):
        run_virtual(wait_within_a_launch, 1, sm_slots=1)


def test_sm_slots_bound_the_resident_blocks():
    seen = Residency()
    run_virtual(lambda group: fill(group, grid=6), 2, sm_slots=2, observers=[seen])
    assert 1 <= seen.most <= 2


def test_no_thread_is_left():
    def fail(group):
        if group.rank == 1:
            raise KeyError("x")
        group.barrier()

    before = set(threading.enumerate())
    for index in range(50):
        if index % 5:
            run_virtual(lambda group: group.rank, 4, index, check=False)
        else:
            with pytest.raises(KeyError):
                run_virtual(fail, 3, index, check=False)
    assert set(threading.enumerate()) == before


def in_another_thread(fn):
    caught = []

    def body():
        try:
            fn()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def test_forward_and_backward_in_different_threads():
    def fn(group):
        x = torch.full((3,), float(group.rank + 1), requires_grad=True)
        kept = []
        in_another_thread(lambda: kept.append((x * x).sum()))
        group.barrier()
        in_another_thread(kept[0].backward)
        return x.grad.tolist()

    assert run_virtual(fn, 3) == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


def test_operators_work_from_any_thread_of_a_rank():
    xs = [torch.randn(4, 8) for _ in range(2)]
    weight = torch.randn(6, 8)

    def fn(group):
        x, w = xs[group.rank].clone().requires_grad_(), weight.clone().requires_grad_()
        kept = []
        in_another_thread(lambda: kept.append(plait.ag_gemm(x, w, group=group)))
        in_another_thread(kept[0].sum().backward)
        return kept[0].detach(), x.grad, w.grad

    gathered = torch.cat(xs)
    for out, grad_x, grad_w in run_virtual(fn, 2):
        torch.testing.assert_close(out, gathered @ weight.t())
        torch.testing.assert_close(grad_x, 2 * weight.sum(0).expand(4, 8))
        torch.testing.assert_close(grad_w, gathered.sum(0).expand(6, 8))


def test_grad_mode_and_default_dtype_of_the_caller_are_kept():
    with torch.no_grad():
        run_virtual(lambda group: group.rank, 2)
        assert not torch.is_grad_enabled()
    assert run_virtual(lambda group: torch.is_grad_enabled(), 2) == [True, True]
