"""Prepared programs: where addresses come from, and the steps that a program becomes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plait.backends.commands import Call, Copy, Launch, Program, Signal, StreamWait
from plait.runtime.prepared import PreparedProgram
from plait.runtime.relocation import CannotPrepareError, Place, Roles, Rows, as_rows, joined
from tests.host.runtime.device_fakes import HANDLES, LAUNCHES, MAIN, FakeBound, FakeExecutor

COMM = HANDLES["comm"]


class _Descriptor:
    """What a tensor descriptor looks like from outside."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.block_shape = base, [16, 16]


@pytest.fixture(autouse=True)
def _no_launches():
    LAUNCHES.clear()


def prepare(program: Program, roles: dict[str, torch.Tensor]) -> tuple[PreparedProgram, list]:
    executor = FakeExecutor()
    return PreparedProgram(program, roles, executor, FakeBound), executor.driver.log


# --- places
def test_a_role_is_found_by_the_bytes_it_spans():
    both = torch.zeros(6, 8)
    x, weight, other = both[:2], both[2:5], torch.zeros(4)
    roles = Roles({"x": x, "weight": weight})
    assert roles.place(x[1:]) == Place(0, 32)
    assert roles.place(weight.t()) == Place(1, 0)
    assert roles.place(weight[1:, 3:]) == Place(1, 4 * 11)
    assert roles.place(both[5]) == Place(None, both[5].data_ptr())
    assert roles.place(other) == Place(None, other.data_ptr())
    assert x[1:] in roles
    assert other not in roles
    assert Place(1, 44).address([100, 1000]) == 1044
    assert Place(None, 44).address([100, 1000]) == 44


def test_roles_do_not_share_memory():
    x = torch.zeros(6, 8)
    for first, second in ((x, x), (x[:4], x[3:]), (x[:, :4], x[:, 4:]), (x, x.t())):
        with pytest.raises(CannotPrepareError, match="share"):
            Roles({"a": first, "b": second})
    Roles({"a": x[:3], "b": x[3:], "empty": x[:0]})


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda t: (t, t), Rows(48 * 4, 1, 48 * 4, 48 * 4)),
        (lambda t: (t, t.t()), None),
        (lambda t: (t[:, :5], t[:, 3:]), Rows(20, 6, 32, 32)),
        (lambda t: (torch.zeros(6, 5), t[:, :5]), Rows(20, 6, 20, 32)),
        (lambda t: (t[:, :5], torch.zeros(6, 5)), Rows(20, 6, 32, 20)),
        (lambda t: (t[::2], torch.zeros(3, 8)), Rows(32, 3, 64, 32)),
        (lambda t: (t[1:2, :5], torch.zeros(1, 5)), Rows(20, 1, 20, 20)),
        (lambda t: (t.view(2, 3, 8)[:, :2], torch.zeros(2, 2, 8)), Rows(64, 2, 96, 64)),
        (lambda t: (t.view(2, 3, 8)[:, :2, :4], torch.zeros(2, 2, 4)), None),
        (lambda t: (torch.zeros(6, 8), t[:1].expand(6, 8)), None),
        (lambda t: (t, t.double()), None),
        (lambda t: (t, t[:1]), None),
        (lambda t: (t[:, ::2], torch.zeros(6, 4)), None),
    ],
)
def test_copies_as_rows(make, expected):
    dst, src = make(torch.zeros(6, 8))
    assert as_rows(dst, src) == expected


# --- steps
def test_an_overlapped_call():
    """Addresses of roles move with each call's tensors; all else stays, in order and on streams."""
    region, word, mirror = torch.zeros(8, 8), torch.zeros(1).int(), torch.ones(1).int()
    ctx = torch.zeros(4)
    first = {"x": torch.ones(4, 8), "out": torch.zeros(4, 4)}
    x, out = first["x"], first["out"]
    program = Program("call").add(
        Launch("prologue", 1, {"ctx_ptr": ctx, "N": 5}),
        StreamWait("comm", on="main"),
        Copy(region[4:6], x[:2]),
        Signal(word, mirror),
        Launch("gemm", 3, {"ctx_ptr": ctx, "x": _Descriptor(x), "tail": x[2:], "out_ptr": out}),
        StreamWait("main", on="comm"),
        Copy(out[1:], region[:3, :4], "main"),
    )
    prepared, log = prepare(program, first)
    assert log == []
    assert LAUNCHES == []
    for value in (2.0, 3.0):
        log.clear()
        LAUNCHES.clear()
        region[:4] = 10 * value
        word.zero_()
        later = {"x": torch.full((4, 8), value), "out": torch.zeros(4, 4)}
        prepared.run(later)
        assert log == [
            ("record", 1, MAIN),
            ("wait", 1, COMM),
            ("copy", 64, COMM),
            ("copy", 4, COMM),
            ("record", 2, COMM),
            ("wait", 2, MAIN),
            ("rows", 3, 16, MAIN),
        ]
        address, here = later["x"].data_ptr(), later["out"].data_ptr()
        moved = {"x": ("at", address), "tail": address + 64, "out_ptr": here}
        assert [
            ("prologue", MAIN, {"ctx_ptr": ctx.data_ptr()}),
            ("gemm", MAIN, {"ctx_ptr": ctx.data_ptr(), **moved}),
        ] == LAUNCHES
        assert region[4:6].eq(value).all()
        assert not region[6:].any()
        assert word.item() == 1
        assert later["out"][1:].eq(10 * value).all()
        assert not later["out"][0].any()
    assert not out.any()


def test_kernels_are_bound_before_any_step_exists():
    bound: list[object] = []

    def bind(launch: Launch) -> FakeBound:
        assert executor.driver.log == LAUNCHES == []
        bound.append(launch.kernel)
        return FakeBound(launch)

    executor = FakeExecutor()
    program = Program("call").add(Launch("a", 1, {}), Launch("b", 1, {}, stream="comm"))
    prepared = PreparedProgram(program, {}, executor, bind)
    prepared.run({})
    prepared.run({})
    assert bound == ["a", "b"]
    assert [(name, stream) for name, stream, _ in LAUNCHES] == [("a", MAIN), ("b", COMM)] * 2
    assert executor.num_transformed == 1


def test_tensors_of_the_first_call_are_not_kept():
    x, region = torch.ones(4, 8), torch.zeros(4, 8)
    kept, freed = (StorageWeakRef(each.untyped_storage()) for each in (region, x))
    launch = Launch("gemm", 1, {"x": x, "d": _Descriptor(x)})
    prepared, _ = prepare(Program("call").add(Copy(region, x, "main"), launch), {"x": x})
    del x, region, launch
    gc.collect()
    assert freed.expired()
    assert not kept.expired()
    prepared.run({"x": torch.full((4, 8), 3.0)})
    del prepared
    gc.collect()
    assert kept.expired()


def test_empty_copies_are_no_steps():
    program = Program("call").add(Copy(torch.zeros(0, 4), torch.zeros(0, 4)))
    assert prepare(program, {})[0].num_steps == 0


def test_a_driver_error_is_raised():
    x, region = torch.ones(4), torch.zeros(4)
    executor = FakeExecutor()
    program = Program("call").add(Copy(region, x, "main"))
    prepared = PreparedProgram(program, {"x": x}, executor, FakeBound)
    executor.driver.fails_with = 700
    with pytest.raises(RuntimeError, match="cuMemcpyAsync: 700"):
        prepared.run({"x": x})


def test_calls_run_unless_they_hold_tensors_of_one_call():
    x, stays = torch.ones(4), torch.zeros(4)
    add = Call(lambda: stays.add_(1), reads=(stays,), writes=(stays,))
    prepared, _ = prepare(Program("call").add(add), {"x": x})
    prepared.run({"x": x})
    prepared.run({"x": x})
    assert stays.eq(2).all()
    for refused in (Call(lambda: None), Call(lambda: None, reads=(x,), writes=(stays,))):
        with pytest.raises(CannotPrepareError):
            prepare(Program("call").add(refused), {"x": x})


def test_odd_strides_go_through_torch_where_nothing_changes():
    x, a, b = torch.ones(4, 4), torch.zeros(4, 4), torch.arange(16.0).view(4, 4)
    prepared, log = prepare(Program("call").add(Copy(a, b.t(), "main")), {"x": x})
    prepared.run({"x": x})
    assert torch.equal(a, b.t())
    assert log == []
    with pytest.raises(CannotPrepareError):
        prepare(Program("call").add(Copy(a, x.t(), "main")), {"x": x})


# --- streams
@pytest.mark.parametrize(
    ("waits", "left"),
    [
        ([("main", "comm")], []),
        ([], [("x", "comm")]),
        ([("peers", "comm"), ("main", "peers")], []),
        ([("main", "peers"), ("peers", "comm")], [("x", "comm")]),
    ],
)
def test_main_waits_for_what_still_uses_a_role(waits, left):
    x, region = torch.ones(4), torch.zeros(4)
    program = Program("call").add(StreamWait("comm", on="main"), Copy(region, x))
    program.add(*(StreamWait(stream, on=on) for stream, on in waits))
    assert joined(program, Roles({"x": x})) == left


def test_a_use_after_the_join_is_found():
    x, region = torch.ones(4), torch.zeros(4)
    program = Program("call").add(Copy(region, x), StreamWait("main", on="comm"), Copy(region, x))
    assert joined(program, Roles({"x": x})) == [("x", "comm")]


def test_what_a_graph_was_captured_with_is_kept():
    """The plan, and with it every context and table, outlives the caches that drop it."""
    table = torch.arange(4, dtype=torch.int32)
    x, out = torch.zeros(4), torch.zeros(4)
    executor = FakeExecutor()
    program = Program("copy", [Copy(out, x, "main"), Copy(table, table.clone(), "main")])
    prepared = PreparedProgram(program, {"x": x, "out": out}, executor, FakeBound)
    prepared.run({"x": x, "out": out})
    assert executor.captured == []
    executor.capturing = True
    prepared.run({"x": x, "out": out})
    assert executor.captured == [prepared]
