"""Launch plans: what later calls of a signature do, and which calls share one."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plait.ops.aten import dispatch, gate, report, spec
from plait.ops.engine import plans
from plait.ops.engine.call import Pointer
from tests.host.ops.engine.conftest import ADD, BLOCK, STREAM, add_scaled, add_scaled_kernel


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def test_later_calls_run_the_plan_on_their_own_tensors(planned):
    add = planned(ADD, "add.Tensor")
    for number in range(4):
        x, y = rand(5, 20), rand(5, 20)
        assert torch.equal(add(x, y), x + y)
        assert len(add.plans) == 1
        assert len(add.log) == number  # the first one ran as it was recorded
    name, stream, middle, *rest = add.log[-1]
    assert (name, stream, middle) == ("add_scaled_kernel", STREAM, "middle")
    assert rest[:2] == [x.data_ptr(), y.data_ptr()]
    assert rest[3:] == [100, 1, BLOCK]
    assert not add.slow


def test_an_operand_given_twice_is_not_one_for_ever(planned):
    add = planned(ADD, "add.Tensor")
    x, y = rand(9), rand(9)
    assert torch.equal(add(x, x), x + x)
    assert torch.equal(add(x, y), x + y)
    assert len(add.plans) == 1
    assert torch.equal(add(y, y), y + y)


def test_in_place_and_out(planned):
    add_ = planned(ADD, "add_.Tensor")
    for _ in range(3):
        x, y = rand(70), rand(70)
        expected = x + y
        assert add_(x, y) is x
        assert torch.equal(x, expected)
    assert len(add_.log) == 2
    into = planned(ADD, "add.out")
    for _ in range(3):
        x, y, out = rand(7), rand(7), rand(7)
        assert into(x, y, out=out) is out
        assert torch.equal(out, x + y)
    assert len(into.plans) == 1


def test_results_that_share_memory_with_an_operand_are_atens(planned):
    """The same shapes apart and not apart are two signatures, in either order."""
    into, add_ = planned(ADD, "add.out"), planned(ADD, "add_.Tensor")
    x, y, out = rand(8), rand(8), rand(8)
    with report.report() as counted:
        for _ in range(2):
            expected = x + y
            into(x, y, out=x)
            assert torch.equal(x, expected)
            into(x, y, out=out)
            expected = x + x
            add_(x, x)
            assert torch.equal(x, expected)
            add_(x, y)
    shared = "a result that shares memory with another operand"
    found = {(row.key, row.reason): row.calls for row in counted.rows}
    assert found == {(key, why): 2 for key in ("add.out", "add_.Tensor") for why in ("", shared)}
    assert len(into.plans) == len(add_.plans) == 2


def test_an_out_that_does_not_fit_is_resized_by_aten_every_time(planned):
    into = planned(ADD, "add.out")
    x, y = rand(8), rand(8)
    for _ in range(3):
        out = torch.empty(0)
        into(x, y, out=out)
        assert torch.equal(out, x + y)
    assert not into.log
    assert len(into.plans) == 1  # the fallback is remembered


def test_a_declined_call_costs_a_look_up_and_is_counted(planned):
    add, seen = None, []

    def compute(call, self, other, *, alpha=1):
        seen.append(self.shape)
        add_scaled(call, self, other, alpha=alpha)

    add = planned(spec.OpSpec("add", ("add.Tensor",), compute=compute), "add.Tensor")
    x, y = rand(3), rand(2, 3)
    with report.report() as counted:
        for _ in range(5):
            assert torch.equal(add(x, y), x + y)
    assert len(seen) == 1
    assert counted.fallbacks == {"operands of two kinds": 5}


def test_numbers_and_tensors_without_memory_go_the_slow_way(planned):
    add = planned(ADD, "add.Tensor")
    x = rand(4)
    assert torch.equal(add(x, 2.5), x + 2.5)
    assert len(add.slow) == 1
    assert not add.plans


def test_runtime_numbers_share_a_plan_within_their_class(planned):
    operator = spec.OpSpec("add", ("add.Tensor",), compute=add_scaled, runtime_numbers=("alpha",))
    add = planned(operator, "add.Tensor")
    x, y = rand(6), rand(6)
    for alpha in (0.5, 1.0, -2.0, 16.0):
        assert torch.equal(add(x, y, alpha=alpha), torch.add(x, y, alpha=alpha))
    assert len(add.plans) == 1
    assert [row[-2] for row in add.log] == [1.0, -2.0, 16.0]
    # Triton compiles another kernel for 1 and for multiples of 16: integers cannot share one.
    with pytest.raises(AssertionError, match="may differ from call to call"):
        add(x, y, alpha=3)


def test_other_numbers_are_part_of_the_plan(planned):
    add = planned(ADD, "add.Tensor")
    x, y = torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])
    for _ in range(2):
        for alpha in (0.0, -0.0, 1, 1.0, 2):
            got = add(x, y, alpha=alpha)
            assert torch.equal(got.signbit(), torch.add(x, y, alpha=alpha).signbit())
    assert len(add.plans) == 5


def _two_results(call, self, dim=None, keepdim=False):
    """A pair (x + 2 x, None or x + x) by scratch memory and pointers; made-up."""
    double = call.empty(self.shape, self.dtype)
    first, second = call.result(self.shape, self.dtype), call.result((3,), torch.int32)
    size = {"size": self.numel(), "scale": 1, "BLOCK": BLOCK}
    call.launch(add_scaled_kernel, 1, {"x_ptr": self, "y_ptr": self, "out_ptr": double, **size})
    call.launch(add_scaled_kernel, 1, {"x_ptr": self, "y_ptr": double, "out_ptr": first, **size})
    tail = Pointer(self, torch.int32, offset=self.numel() - 3)
    args = {"x_ptr": tail, "y_ptr": tail, "out_ptr": second, **size, "size": 3, "scale": 0}
    call.launch(add_scaled_kernel, 1, args)


def test_several_results_scratch_memory_and_pointers(planned):
    operator = spec.OpSpec("aminmax", ("aminmax",), compute=_two_results)
    both = planned(operator, "aminmax")
    for _ in range(3):
        x = rand(6)
        first, second = both(x)
        assert torch.equal(first, x + (x + x))
        assert torch.equal(second, x[3:].view(torch.int32))
    assert len(both.plans) == 1
    assert len(both.log) == 6


def test_a_result_that_nobody_asked_for_is_none(planned):
    def compute(call, self, dim=None, keepdim=False):
        add_scaled(call, self, self)
        call.no_result()

    both = planned(spec.OpSpec("aminmax", ("aminmax",), compute=compute), "aminmax")
    for _ in range(2):
        x = rand(5)
        first, second = both(x)
        assert torch.equal(first, x + x)
        assert second is None


def test_empty_tensors_launch_nothing(planned):
    add = planned(ADD, "add.Tensor")
    for _ in range(2):
        assert add(rand(0, 3), rand(0, 3)).shape == (0, 3)
    assert not add.log


def test_a_plan_keeps_no_tensor(planned):
    add = planned(ADD, "add.Tensor")
    x, y = rand(1000), rand(1000)
    out = add(x, y)
    held = [StorageWeakRef(each.untyped_storage()) for each in (x, y, out)]
    del x, y, out
    gc.collect()
    assert all(each.expired() for each in held)


def test_watched_launches_take_the_ordinary_way(planned, monkeypatch):
    add = planned(ADD, "add.Tensor")
    x, y = rand(4), rand(4)
    watched = []
    monkeypatch.setattr(plans, "launches_are_watched", lambda: bool(watched))
    add(x, y)
    add(x, y)
    assert len(add.log) == 1
    watched.append(True)
    with report.report() as counted:
        assert torch.equal(add(x, y), x + y)
    assert len(add.log) == 1
    assert counted.served == 1
    watched.clear()
    add(x, y)
    assert len(add.log) == 2


def test_the_calls_device_is_current_meanwhile(planned, devices):
    add = planned(ADD, "add.Tensor")
    devices.count = 2
    x, y = rand(4), rand(4)
    add(x, y)
    add(x, y)
    devices.entered.clear()
    assert torch.equal(add(x, y), x + y)
    assert devices.entered == [None]  # the index of these operands' device
    assert devices.current == 0
    devices.current = None
    devices.entered.clear()
    add(x, y)
    assert devices.entered == []


def test_forgotten_when_operators_change(planned):
    add = planned(ADD, "add.Tensor")
    x, y = rand(4), rand(4)
    add(x, y)
    assert add.plans
    spec.remove(ADD)
    assert not add.plans
    assert torch.equal(add(x, y), x + y)
    assert not add.log
    spec.add(ADD)
    add(x, y)
    add(x, y)
    assert len(add.log) == 1


def test_a_decision_made_before_operators_changed_is_not_kept(planned):
    other = spec.OpSpec("mul", ("mul.Tensor",), compute=add_scaled)

    def compute(call, self, other_, *, alpha=1):
        add_scaled(call, self, other_, alpha=alpha)
        spec.add(other)

    rename = lambda call, self, other, *, alpha=1: compute(call, self, other, alpha=alpha)  # noqa: E731
    add = planned(spec.OpSpec("add", ("add.Tensor",), compute=rename), "add.Tensor")
    add(rand(3), rand(3))
    assert not add.plans


def test_the_number_of_plans_is_bounded(planned, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 10)
    add = planned(ADD, "add.Tensor")
    for size in range(25):
        for _ in range(2):
            x, y = rand(size), rand(size)
            assert torch.equal(add(x, y), x + y)
        assert len(add.plans) <= 10


def test_off_and_inside_are_not_planned(planned):
    add = planned(ADD, "add.Tensor")
    x, y = rand(3), rand(3)
    gate.STATE.everywhere -= {"add.Tensor"}
    add(x, y)
    assert len(add.slow) == 1
    gate.STATE.everywhere |= {"add.Tensor"}
    gate.RUNNING.inside = True
    try:
        add(x, y)
    finally:
        gate.RUNNING.inside = False
    assert len(add.slow) == 2


def test_an_error_of_an_operator_leaves_nothing_behind(planned):
    def compute(call, self, other, *, alpha=1):
        raise ZeroDivisionError

    add = planned(spec.OpSpec("add", ("add.Tensor",), compute=compute), "add.Tensor")
    with pytest.raises(ZeroDivisionError):
        add(rand(3), rand(3))
    assert not add.plans
    assert not gate.RUNNING.inside


def test_threads_share_plans(planned):
    add = planned(ADD, "add.Tensor")
    wrong, rounds = [], 40

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for turn in range(rounds):
            size = (turn * 7 + number) % 12
            x, y = (torch.randn(size, generator=generator) for _ in range(2))
            if not torch.equal(add(x, y), x + y):
                wrong.append((number, turn))
            if turn % 10 == 0:
                spec.decide_anew()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    with report.report() as counted:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not wrong
    assert counted.served == 6 * rounds
    assert len(add.plans) <= 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_goes_on_with_them(planned):
    add = planned(ADD, "add.Tensor")
    x, y = rand(5), rand(5)
    expected = x + y
    add(x, y)
    child = os.fork()
    if child == 0:
        planned_right = torch.equal(add(x, y), expected) and len(add.log) == 1
        os._exit(0 if planned_right and torch.equal(add(x[:3], y[:3]), expected[:3]) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not add.log


def test_every_target_has_an_entry_that_compiles():
    from plait.ops.aten.originals import Original, why_not
    from plait.ops.aten.targets import targets

    count = 0
    for key in targets():
        if not why_not(key, "CPU"):
            server = dispatch.Server(Original(key, "CPU"), "cpu")
            dispatch.planned_entry(server, lambda *args, **kwargs: None)
            plans.fallback(server.schema, server.original.call, [0, 0.0])
            count += 1
    assert count > 600
