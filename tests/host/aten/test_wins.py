"""The win table: classes of calls, what rules say between and beyond them, files."""

from __future__ import annotations

import json

import pytest
import torch

from plait.errors import SettingError
from plait.ops.aten import wins
from plait.ops.aten.classes import CallClass, classify
from plait.ops.aten.wins import ATEN_FASTER, NOT_MEASURED, Rule, WinTable
from plait.ops.engine.signature import Schema
from plait.settings import override

aten = torch.ops.aten


def class_of(overload, *args, **kwargs) -> tuple[str, float, float]:
    schema = Schema(getattr(overload, "default", overload))
    found = classify(schema, schema.bind(args, kwargs))
    return found.layout, found.size, found.row


X = torch.ones(4, 8, 16)


@pytest.mark.parametrize(
    ("dims", "layout", "row"),
    [
        ([2], "kr", 4),
        ([-1], "kr", 4),
        ([0], "rk", 2),
        ([1], "krk", 3),
        ([0, 1], "rk", 5),
        ([1, 2], "kr", 7),
        ([0, 2], "rkr", 6),
        ([0, 1, 2], "r", 9),
        ([], "r", 9),
        (None, "r", 9),
    ],
)
def test_layouts_of_a_reduction(dims, layout, row):
    assert class_of(aten.sum.dim_IntList, X, dims) == (layout, 9, row)


def test_layouts_are_of_memory_not_of_dims():
    assert class_of(aten.sum.dim_IntList, X.permute(2, 0, 1), [0]) == ("kr", 9, 4)
    assert class_of(aten._softmax, X.transpose(1, 2), 2, False) == ("krk", 9, 3)
    assert class_of(aten.amax, X[:, :1], [0]) == ("rk", 6, 2)  # sizes of 1 are nowhere
    assert class_of(aten.amax, X[:, :, 3], [0])[0] == ""  # nothing lies side by side
    assert class_of(aten.amax, torch.ones(4, 1).expand(4, 8), [1])[0] == ""
    assert class_of(aten.sum.dim_IntList, torch.ones(()), []) == ("r", 0, 0)
    assert class_of(aten.sum.dim_IntList, torch.ones(0, 4), [1])[0] == ""
    assert class_of(aten.sum.IntList_out, X[0], [1], out=torch.ones(64)) == ("kr", 7, 4)


def test_rows_that_no_wide_load_fits():
    assert class_of(aten.amax, torch.ones(4, 17), [1])[0] == "kr~"
    assert class_of(aten.amax, torch.ones(4, 20), [1])[0] == "kr"
    assert class_of(aten.amax, torch.ones(4, 20).bfloat16(), [1])[0] == "kr~"
    assert class_of(aten.amax, torch.ones(4, 17)[:, 1:], [1])[0] == "kr~"
    assert class_of(aten.amax, torch.ones(4, 20)[:, 1:], [1])[0] == "kr~"  # its address
    assert class_of(aten.amax, torch.ones(4, 20)[:, 4:], [1])[0] == "kr"
    assert class_of(aten.amax, torch.ones(4, 7, 12), [1, 2])[0] == "kr"
    assert class_of(aten.amax, torch.ones(4, 7, 13), [1, 2])[0] == "kr~"
    assert class_of(aten.amax, torch.ones(4, 6, 6), [1, 2])[0] == "kr"  # 36 elements a row
    assert class_of(aten.amax, torch.ones(17), [0])[0] == "r"
    assert class_of(aten.amax, torch.ones(17)[1:], [0])[0] == "r~"


def test_rows_of_other_operators():
    x, w = torch.ones(4, 8, 6, 6), torch.ones(8)
    norm = aten.native_batch_norm
    assert class_of(norm, x, w, w, w, w, True, 0.1, 1e-5)[0] == "rkr"
    layer = aten.native_layer_norm
    assert class_of(layer, X, [8, 16], None, None, 1e-5) == ("kr", 9, 7)
    group = aten.native_group_norm
    assert class_of(group, X, w, w, 4, 8, 16, 2, 1e-5) == ("kr", 9, 6)
    nll = aten.nll_loss_forward
    labels = torch.zeros(4, dtype=torch.long)
    assert class_of(nll, torch.ones(4, 16), labels, None, 1, -100) == ("kr", 6, 4)
    weight = aten._weight_norm_interface
    assert class_of(weight, torch.ones(4, 16), torch.ones(4, 1), 0) == ("kr", 6, 4)
    assert class_of(aten.cumsum, X, 2) == ("kr", 9, 4)


def test_dtypes_and_losses_of_each_element():
    def dtype(overload, *args, **kwargs):
        schema = Schema(getattr(overload, "default", overload))
        return classify(schema, schema.bind(args, kwargs)).dtype

    low = X.bfloat16()
    assert dtype(aten.amax, low, [1]) == "bfloat16"
    assert dtype(aten.sum.dim_IntList, low, [1], dtype=torch.bfloat16) == "bfloat16"
    assert dtype(aten.sum.dim_IntList, low, [1], dtype=torch.float32) == "bfloat16->float32"
    assert dtype(aten._softmax, X.half(), 1, True) == "float16->float32"
    assert dtype(aten._softmax_backward_data, X, X, 1, torch.float32) == "float32"
    assert dtype(aten._softmax_backward_data, X, X, 1, torch.half) == "float32->float16"
    assert class_of(aten.mse_loss, X, X) == ("r", 9, 9)
    assert class_of(aten.mse_loss, X, X, 0) == ("k", 9, 0)


def at(size: float, row: float = 0.0, layout: str = "kr", dtype: str = "bfloat16") -> CallClass:
    return CallClass(dtype, layout, size, row)


GRID = WinTable(
    [
        Rule("op", "bfloat16", "kr", 6, {10: 1.2, 14: 0.9, 18: 1.3, 22: 1.4}),
        Rule("op", "bfloat16", "kr", 10, {14: 1.5, 18: 1.5, 22: 1.5}),
        Rule("op", "bfloat16", "r", 0, {10: 1.01, 20: 2.0}),
    ]
)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (at(18, 6), ""),
        (at(14, 6), ATEN_FASTER),
        (at(10, 6), ""),
        (at(5, 6), ""),  # below the smallest a launch takes as long
        (at(12, 6), ATEN_FASTER),  # between one that wins and one that does not
        (at(16, 6), ATEN_FASTER),
        (at(20, 6), ""),
        (at(24, 6), ""),
        (at(24.5, 6), NOT_MEASURED),
        (at(14, 10), ""),
        (at(14, 8), ATEN_FASTER),  # between two rows both count
        (at(18, 8), ""),
        (at(22, 12), ""),
        (at(22, 13), NOT_MEASURED),
        (at(22, 3.9), NOT_MEASURED),
        (at(10, 10, "r"), ATEN_FASTER),  # within the noise
        (at(20, 20, "r"), ""),
        (at(18, 6, "rk"), NOT_MEASURED),
        (at(18, 6, ""), NOT_MEASURED),
        (at(18, 6, "kr", "float32"), NOT_MEASURED),
        (at(18, 6, "kr", "float16"), ""),  # as bfloat16
        (at(14, 6, "kr", "float16"), ATEN_FASTER),
    ],
)
def test_neighbours_must_win(call, reason):
    assert GRID.why_not("op", call) == reason
    assert GRID.why_not("another", call) == NOT_MEASURED


def test_who_wins_somewhere():
    table = WinTable([Rule("a", "float32", "r", 0, {10: 1.01}), *GRID.rules])
    assert table.winners() == {"op"}


def test_of_two_calls_in_a_place_the_slower_stays():
    table = WinTable()
    for ratio in (1.5, 1.1, 1.3):
        table.add("op", at(10.2, 6.4), ratio)
        table.add("op", at(10.2, 10.2, "r"), ratio)
        table.add("op", at(10.2, 10.2, "r~"), ratio)
    assert table.rules == [
        Rule("op", "bfloat16", "kr", 6, {10: 1.1}),
        Rule("op", "bfloat16", "r", 0, {10: 1.1}),
        Rule("op", "bfloat16", "r~", 0, {10: 1.1}),
    ]
    assert table.why_not("op", at(10, 10, "r~")) == ""


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "gpu.json"
    table = WinTable(GRID.rules, {"date": "2026-12-01"})
    wins.write_wins(path, table, "NVIDIA H200")
    found = wins.read_wins(path)
    assert found.rules == table.rules
    assert found.measured == table.measured
    assert json.loads(path.read_text())["gpu"] == "NVIDIA H200"
    assert len(path.read_text().splitlines()) == len(table.rules) + 2
    assert list(path.parent.iterdir()) == [path]
    assert wins.read_wins(tmp_path / "none.json").rules == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "measured": {}, "rules": []}',
        '{"format": 1, "measured": {}, "rules": [{"operator": "a"}]}',
        '{"format": 1, "measured": {}, "rules": [{"operator": "a", "dtype": "b", "layout": "r",'
        ' "row": 0, "ratios": {"x": 1}}]}',
        '{"format": 1, "measured": {}, "rules": [{"operator": "a", "dtype": "b", "layout": "r",'
        ' "row": "0", "ratios": {}}]}',
        '{"format": 1, "measured": {}, "rules": [{"operator": 1, "dtype": "b", "layout": "r",'
        ' "row": 0, "ratios": {}}]}',
    ],
)
def test_a_broken_file_is_named(text, tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=r"gpu\.json.*plait tune ops"):
        wins.read_wins(path)


def test_the_users_table_hides_shipped_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(wins, "SHIPPED_TABLES", tmp_path / "shipped")
    wins.write_wins(tmp_path / "shipped" / "some-gpu.json", GRID, "Some GPU")
    with override(tuning_dir=str(tmp_path / "own")):
        assert wins.win_table("Some GPU").why_not("op", at(18, 6)) == ""
        own = WinTable([Rule("op", "bfloat16", "kr", 6, {18: 0.5})])
        wins.write_wins(wins.user_wins_path("Some GPU"), own, "Some GPU")
        table = wins.win_table("Some GPU")
        assert table.why_not("op", at(18, 6)) == ATEN_FASTER
        assert table.why_not("op", at(22, 10)) == NOT_MEASURED  # the whole group is the user's
        assert table.why_not("op", at(20, 0, "r")) == ""
    wins.forget_wins()


def test_the_shipped_table_is_one():
    for path in wins.SHIPPED_TABLES.glob("*.json"):
        found = wins.read_wins(path)
        from plait.ops.aten import spec

        names = {each.name for key in spec.served() if (each := spec.find(key))}
        assert {rule.operator for rule in found.rules} <= names
        assert found.measured or not found.rules
