"""`plait tune overlap`: result lines in, table entries out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.cli.tune_overlap import entry_of, obstacle, read_rows, tune_overlap
from plait.errors import ArgumentError
from plait.overlap.common.chooser import measurements
from plait.runtime.tuning_store import read_table, user_table_path
from plait.settings import override

ROW = {
    "benchmark": "gemm_ar", "M": 64, "N": 48, "K": 32, "tp": 4, "dtype": "float16",
    "link": "paced:160@5", "wrong": None, "fused_us": 7.126, "unfused_us": 8.0,
    "config": {"block_m": 16}, "gpu": "Some GPU", "versions": {"torch": "2.11.0"},
    "date": "2026-11-30T22:54:09+00:00",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path):
    with override(tuning_dir=str(tmp_path / "own")):
        yield


def file(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_becomes_an_entry():
    entry = entry_of(ROW)
    assert entry.operator == "gemm_ar"
    assert entry.key == {"dtype": "float16", "world_size": 4, "gb_s": 160.0, "latency_us": 5.0}
    assert entry.shape == {"M": 64, "N": 48, "K": 32}
    assert (entry.time_us, entry.baseline_us) == (7.13, 8.0)
    assert (entry.config, entry.date) == ({"block_m": 16}, "2026-11-30")


def test_unfused_is_what_auto_would_run():
    assert entry_of({**ROW, "plait_unfused_us": 9.5, "pass": "forward"}).baseline_us == 9.5
    assert entry_of({**ROW, "plait_unfused_us": None}).baseline_us == 8.0


def test_the_command_writes_the_users_table(tmp_path: Path, capsys):
    slower, other = {**ROW, "fused_us": 9.0}, {**ROW, "M": 1, "link": "pcie"}
    path = file(tmp_path, ROW, other)
    main(["tune", "overlap", "--results", str(path)])
    main(["tune", "overlap", "--results", str(file(tmp_path, slower, name="later.jsonl"))])
    table = user_table_path("Some GPU")
    assert str(table) in capsys.readouterr().out
    found = {each.problem.M: each for each in measurements(read_table(table))}
    assert found[64].fused_us == 9.0
    assert (found[1].bandwidth_gb_s, found[1].latency_us) == (55.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wrong": "error 1.0"}, "a wrong result"),
        ({"fused_us": None}, "not timed"),
        ({"link": "real"}, "nobody knows the speed"),
        ({"link": "paced:160+traffic"}, "background traffic"),
        ({"pass": "backward"}, "a backward pass"),
        ({}, ""),
    ],
)
def test_lines_that_are_left_out(changes: dict, reason: str, tmp_path: Path, capsys):
    row = {**ROW, **changes}
    assert obstacle(row).startswith(reason)
    assert bool(obstacle(row)) == bool(reason)
    out = tmp_path / "table.json"
    tune_overlap([file(tmp_path, row, {**ROW, "M": 3})], out)
    assert len(read_table(out).entries) == (1 if reason else 2)
    assert (f"left out: gemm_ar 64 48 32: {reason}" in capsys.readouterr().out) == bool(reason)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1 of .*rows.jsonl"),
        ([ROW, {"benchmark": "gemm"}], "no overlapped call .* in line 2"),
        ([{**ROW, "gpu": None}], "no 'gpu' in line 1"),
        ([], "a measured call or more"),
        ([{**ROW, "link": "real"}], "1 lines"),
    ],
)
def test_files_that_are_no_results(rows: list, message: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match=message):
        tune_overlap([file(tmp_path, *rows)])
    with pytest.raises(ArgumentError, match="a readable file"):
        read_rows(tmp_path / "missing.jsonl")


def test_one_file_holds_the_table_of_one_gpu(tmp_path: Path):
    path = file(tmp_path, ROW, {**ROW, "gpu": "Another"})
    with pytest.raises(ArgumentError, match="results of one GPU"):
        tune_overlap([path], tmp_path / "table.json")
    tune_overlap([path])
    assert user_table_path("Another").exists()
    assert user_table_path("Some GPU").exists()
