"""`enable()` and `use()` without names: plait serves what the win table says, and ATen the rest."""

from __future__ import annotations

import time

import pytest
import torch

import plait
from plait.ops.aten import gate, registration, report, spec, wins
from plait.ops.aten.dispatch import Server, planned_entry
from plait.ops.aten.originals import Original
from plait.ops.aten.wins import ATEN_FASTER, NOT_MEASURED, Rule, WinTable

LARGE, SMALL = torch.ones(64, 64), torch.ones(4, 4)
TABLE = WinTable(
    [
        Rule("sums", "float32", "kr", 2, {4: 0.9}),
        Rule("sums", "float32", "kr", 6, {12: 1.5}),
        Rule("others", "float32", "r", 0, {4: 0.5}),
    ]
)


def _rows_of_77(x, *rest, **keywords):
    return x.new_full((len(x),), 77)


@pytest.fixture
def sums(marked):
    """An operator that wins on LARGE and loses on SMALL, and one that wins nowhere."""
    marked("exp", name="others")
    made = marked("sum.dim_IntList", name="sums", run=_rows_of_77)
    with wins.only(TABLE):
        yield made


def way(x, call=lambda x: torch.sum(x, 1)) -> tuple[str, str]:
    (told,) = [each for each in plait.explain(call, x).calls if each.key == "sum.dim_IntList"]
    return told.path, told.reason


def test_only_what_wins_somewhere_is_registered(sums):
    plait.enable(device="cpu")
    assert registration.registered("CPU") == {"sum.dim_IntList"}
    assert gate.selected() == {"?sum.dim_IntList"}


def test_each_call_follows_the_table(sums):
    with plait.use(device="cpu"), plait.report() as counted:
        assert torch.sum(LARGE, 1)[0] == 77
        assert torch.sum(SMALL, 1)[0] == 4
        assert way(LARGE) == ("plait", "")
        assert way(SMALL) == ("aten", ATEN_FASTER)
        assert way(LARGE.double()) == ("aten", NOT_MEASURED)
        assert way(LARGE, lambda x: torch.sum(x, 0)) == ("aten", NOT_MEASURED)
    assert counted.fallbacks == {ATEN_FASTER: 2, NOT_MEASURED: 2}
    assert counted.served == 2
    assert ATEN_FASTER in str(counted)


def test_a_name_forces(sums):
    with plait.use("sum", device="cpu"):
        assert way(SMALL) == ("plait", "")
        with plait.use(device="cpu"):  # adds; what is forced stays so
            assert way(SMALL) == ("plait", "")
    with plait.use(device="cpu"):
        with plait.use("sum.dim_IntList", device="cpu"):
            assert way(SMALL) == ("plait", "")
        assert way(SMALL) == ("aten", ATEN_FASTER)


@pytest.mark.parametrize("off", ["sum", "*", "reduction"])
def test_a_name_turns_it_off(sums, off):
    with plait.use(device="cpu"), plait.use((), off):
        assert way(LARGE) == ("aten", "off in this thread")
    plait.enable(device="cpu")
    assert way(LARGE) == ("plait", "")
    plait.disable(off)
    assert not gate.selected()
    with plait.use(exclude=off, device="cpu"):
        assert not gate.selected()


def test_the_table_decides_before_an_operator_looks(sums, marked):
    """Otherwise a call that ATen serves would pay for what plait would have done."""
    looked = []
    marked("amax", name="looks", supports=lambda *args: looked.append(args) or "")
    table = WinTable([Rule("looks", "float32", "kr", 6, {12: 0.5, 13: 2.0})])
    with wins.only(table), plait.use(device="cpu"):
        torch.amax(LARGE, 1)
        assert not looked
        torch.amax(torch.ones(128, 64), 1)
        assert len(looked) == 1


def test_another_table_is_followed_at_once(sums):
    with plait.use(device="cpu"), wins.only(WinTable()):
        assert way(LARGE) == ("aten", NOT_MEASURED)
        with plait.use(device="cpu"):
            assert registration.registered("CPU") == {"sum.dim_IntList"}
    with wins.only(WinTable()):
        plait.enable(device="cpu")
        assert not gate.selected()


def test_recording_tells_and_remembers_nothing(sums):
    with plait.use(device="cpu"):
        with wins.recording() as asked:
            assert torch.sum(LARGE, 1)[0] == 64
        assert torch.sum(LARGE, 1)[0] == 77
    (one,) = asked
    assert (one.key, one.operator, one.call.row) == ("sum.dim_IntList", "sums", 6.0)
    assert one.named["self"] is LARGE


# --- the generated entry, which only GPUs have


@pytest.fixture
def entry(sums):
    """The entry of a GPU's slot over the CPU's kernel; what falls back is remembered as there."""
    server = Server(Original("sum.dim_IntList", "CPU"), "cpu")
    yield server, planned_entry(server, lambda *args, **kwargs: "off")
    registration.uninstall()


def test_the_entry_keeps_two_sets_of_plans(entry):
    server, call = entry
    assert call(SMALL, [1]) == "off"
    gate.turn(frozenset(["?sum.dim_IntList"]), frozenset())
    assert call(LARGE, [1])[0] == 77
    with plait.report() as counted:
        for _ in range(3):
            assert call(SMALL, [1])[0] == 4
    assert counted.fallbacks == {ATEN_FASTER: 3}
    assert len(server.plans_if_faster) == 1
    assert not server.plans
    gate.turn(frozenset(["sum.dim_IntList"]), frozenset())
    assert call(SMALL, [1])[0] == 77
    gate.turn(frozenset(), frozenset(["sum.dim_IntList"]))
    assert call(SMALL, [1])[0] == 4
    spec.decide_anew()
    assert not server.plans_if_faster
    with wins.recording() as asked:
        call(SMALL, [1])
    assert len(asked) == 1
    assert not server.plans_if_faster
    gate.turn(frozenset(), frozenset(["?sum.dim_IntList"]))
    assert call(SMALL, [1]) == "off"


def test_the_entry_costs_default_mode_next_to_nothing(entry, monkeypatch):
    server, call = entry
    modes = {"sum.dim_IntList": server.plans, "?sum.dim_IntList": server.plans_if_faster}
    seen = []
    monkeypatch.setattr(server, "serve", lambda *args, **kwargs: seen.append(args[2]))
    times = {name: [] for name in modes}
    for _ in range(40):  # in turns, since other programs run here as well
        for name, plans in modes.items():
            gate.STATE.everywhere = frozenset([name])
            if not plans:
                call(SMALL, [1])
                plans[seen[0]] = lambda *args: "planned"
            assert call(SMALL, [1]) == "planned"
            times[name].append(_us(call))
    gate.STATE.everywhere = frozenset()
    forced, default = (min(each) for each in times.values())
    assert default < forced + 0.5  # 0.05 us on a quiet machine


def _us(call) -> float:
    begin = time.perf_counter()
    for _ in range(500):
        call(SMALL, [1])
    return (time.perf_counter() - begin) / 500 * 1e6


def test_a_gpu_without_a_table_wins_nothing():
    assert wins.win_table("NVIDIA GeForce 256").winners() == frozenset()
    assert report.PLAIT == ""
