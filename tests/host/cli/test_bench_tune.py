"""`plait bench gemm` and `plait tune gemm` with a fake GPU: programs by torch, invented times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from plait.cli import bench_gemm
from plait.cli.main import main
from plait.cli.shapes import read_batched_shapes, read_shapes, with_batch
from plait.cli.tune import geometric_mean
from plait.errors import ArgumentError, PlaitError
from plait.ops.matmul import tune, tuned
from plait.ops.matmul.candidates import tuning_candidates
from plait.ops.matmul.configs import Config, default_config
from plait.ops.matmul.tuned import config_text
from plait.runtime import lab as labs
from plait.runtime.record import RunRecord
from plait.runtime.tuning_store import forget_tables, read_table, user_table_path
from plait.settings import override
from tests.host.cli.bench_fakes import GPU, FakeGpu
from tests.tiny.tree import ROOT

BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The fake GPU instead of a real one; all kernels are compiled already."""
    fake = FakeGpu()
    device = torch.empty(0).device
    monkeypatch.setattr(labs, "gpu_lab", lambda: fake.lab(device))
    monkeypatch.setattr(labs, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(tune, "precompile", lambda jobs, *args, **keywords: dict.fromkeys(jobs, ""))
    monkeypatch.setattr(bench_gemm, "ROOF_SIZE", 256)
    monkeypatch.setattr(bench_gemm, "COPY_BYTES", 4096)
    monkeypatch.setattr(tuned, "SHIPPED_TABLES", tmp_path / "shipped")
    forget_tables()
    with override(tuning_dir=str(tmp_path / "own")):
        yield fake
    forget_tables()


def shapes_file(folder: Path, *lines: str) -> str:
    path = folder / "shapes.txt"
    path.write_text("\n".join(lines))
    return str(path)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The commands without a GPU


@pytest.mark.parametrize(
    "command",
    ["bench gemm 4096 12288 6144 --dtype float16", "tune gemm --shapes {shapes}"],
)
def test_without_a_gpu_the_text_says_so(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shapes = shapes_file(tmp_path, "16 64 64")
    assert main(command.format(shapes=shapes).split()) == 2
    captured = capsys.readouterr()
    assert "DeviceError: device: expected a GPU" in captured.err
    assert "plait doctor" in captured.err
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("bench gemm", 2, ""),
        ("bench gemm 1 2", 2, "give M N K"),
        ("bench gemm 1 2 3 --shapes x", 2, "give M N K"),
        ("bench gemm 0 2 3", 1, "M, N and K above 0"),
        ("bench gemm 1 2 3 --dtype int7", 1, "'int7'"),
        ("bench gemm 1 2 3 --impl best", 1, "'best'"),
        ("bench gemm 1 2 3 --tf32", 1, "float32 operands"),
        ("bench gemm 1 2 3 --fast-accum", 1, "fp8 operands"),
        ("bench gemm 16 16 16 --dtype fp8 --batch 2", 1, "no batch"),
        ("bench gemm --shapes nowhere.txt", 1, "nowhere.txt"),
        ("bench gemm 16 16 16 --host --impl default", 1, "'tuned' with --host"),
        ("tune gemm", 2, "--shapes"),
        ("tune gemm --shapes nowhere.txt", 1, "nowhere.txt"),
        ("tune", 2, "gemm"),
    ],
)
def test_mistakes(command, status, text, capsys, gpu):
    assert main(command.split()) == status
    captured = capsys.readouterr()
    assert text in captured.err + captured.out
    assert gpu.ran == 0


# Shapes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "# M N K\n1 2 3\n\n4, 5, 6  # six\n1x2x3\n"),
        ("a.json", "[[1, 2, 3], [4, 5, 6]]"),
        ("a.json", '{"shapes": [{"M": 1, "N": 2, "K": 3}, {"M": 4, "N": 5, "K": 6}]}'),
        ("a.yaml", "- [1, 2, 3]\n- {M: 4, N: 5, K: 6}\n"),
    ],
)
def test_shapes_are_read(name, text, tmp_path):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    assert read_shapes(tmp_path / name) == [(1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "1 2 3\n8 1 2 3\n8 x 1 x 2 x 3"),
        ("a.json", '[[1, 2, 3], {"B": 8, "M": 1, "N": 2, "K": 3}]'),
    ],
)
def test_shapes_may_have_a_batch(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    found = read_batched_shapes(path)
    assert found == [(0, 1, 2, 3), (8, 1, 2, 3)]
    assert with_batch(found[:1], 5) == [(5, 1, 2, 3)]
    assert with_batch(found, 0) == found
    with pytest.raises(ArgumentError, match="--batch"):
        with_batch(found, 5)
    with pytest.raises(ArgumentError, match="three numbers"):
        read_shapes(path)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.txt", "1 2 3 4 5", "[1, 2, 3, 4, 5]"),
        ("a.json", '[{"B": 0, "M": 1, "N": 2, "K": 3}]', "'B': 0"),
        ("a.txt", "1 2 3\n1 2 k", "line 2"),
        ("a.txt", "1 2", "[1, 2]"),
        ("a.txt", "# nothing", "none in"),
        ("a.txt", "0 1 1", "[0, 1, 1]"),
        ("a.json", "[", "JSON"),
        ("a.json", "3", "none in"),
        ("a.json", "[[1, 2, true]]", "True"),
        ("a.json", '[{"M": 1, "N": 2}]', "'N': 2"),
    ],
)
def test_bad_shapes_are_named(name, text, part, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_shapes(tmp_path / name)
    assert part in str(caught.value)
    assert name in str(caught.value)


def test_the_dense_shapes_are_the_local_ones_of_tp8():
    found = read_shapes(ROOT / "benchmarks" / "shapes" / "dense_tp8.txt")
    sides = {(N, K) for _, N, K in found}
    assert len(found) == 11 * len(sides) == 88
    assert {(N, K) for K, N in sides} == sides
    assert {(6144, 12288), (3584, 8192), (6656, 16384), (1792, 4096)} < sides


def test_the_other_shapes_are_those_of_the_issues():
    folder = ROOT / "benchmarks" / "shapes"
    batched = read_batched_shapes(folder / "batched.txt")
    assert len(batched) == 9
    assert (32, 4096, 4096, 128) in batched
    fp8 = read_shapes(folder / "fp8.txt")
    dense = {shape[1:] for shape in read_shapes(folder / "dense_tp8.txt")}
    sides = {shape[1:] for shape in fp8}
    assert sides - dense == {(8192, 8192)}
    assert sorted(fp8) == sorted((M, *side) for M in (16, 256, 1024, 4096, 8192) for side in sides)


# Tuning


def test_the_command_keeps_what_is_done(gpu, tmp_path, capsys):
    shapes = shapes_file(tmp_path, "16 128 512", "128 256 512")
    assert main(["tune", "gemm", "--shapes", shapes, "--rounds", "5"]) == 0
    path = user_table_path(GPU.name)
    assert [each.shape["M"] for each in read_table(path).entries] == [16, 128]
    out = capsys.readouterr().out
    assert "16 128 512" in out
    assert "2 of 2 shapes tuned for NVIDIA H200" in out
    assert f"{path}" in out.replace("\n", "")
    assert gpu.timed[-1][1] == 5

    def interrupted(contestants, rounds):
        if len(gpu.timed) > seen + 1:
            raise KeyboardInterrupt
        return FakeGpu.times(gpu, contestants, rounds)

    seen, gpu.times = len(gpu.timed), interrupted
    shapes = shapes_file(tmp_path, "32 128 512", "64 128 512")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main(["tune", "gemm", "--shapes", shapes]))
    assert [each.shape["M"] for each in read_table(path).entries] == [16, 128, 32]


@pytest.mark.parametrize(("line", "options"), [("4 64 128 512", []), ("64 128 512", ["--batch"])])
def test_batches_have_entries_that_benchmarks_find(line, options, gpu, tmp_path, capsys):
    shapes, results = shapes_file(tmp_path, line), tmp_path / "rows.jsonl"
    command = ["tune", "gemm", "--shapes", shapes, *[each for x in options for each in (x, "4")]]
    gpu.slow = {"64x64x64 w4 s4 g8 desc o3": 0.5}
    assert main(command) == 0
    (entry,) = read_table(user_table_path(GPU.name)).entries
    assert entry.key == tuned.tuning_key(BF16, batch=4)
    assert entry.config["blocks_per_sm"] == 3
    assert main(["bench", "gemm", "--shapes", shapes, *command[4:], "--json", str(results)]) == 0
    assert main(["bench", "gemm", "64", "128", "512", "--json", str(results)]) == 0
    assert [(each["source"], each["batch"]) for each in rows(results)] == [
        ("tuned", 4),
        ("default", 0),
    ]
    assert "4 x 64 128 512" in capsys.readouterr().out


def test_fp8_sums_of_both_kinds_have_entries(gpu, tmp_path):
    shapes, results = shapes_file(tmp_path, "256 512 1024"), tmp_path / "rows.jsonl"
    gpu.slow = {"64x128x128 w4 s3 g8 desc o3": 0.5}
    options = ["--shapes", shapes, "--dtype", "fp8", "--scales", "rows"]
    assert main(["tune", "gemm", *options]) == 0
    for fast, source in (([], "tuned"), (["--fast-accum"], "default")):
        assert main(["bench", "gemm", *options, *fast, "--json", str(results)]) == 0
        assert rows(results)[-1]["source"] == source
    assert main(["tune", "gemm", *options, "--fast-accum"]) == 0
    entries = read_table(user_table_path(GPU.name)).entries
    assert [each.key.get("fast_accum", False) for each in entries] == [False, True]


def test_the_command_fails_if_nothing_is_right(gpu, tmp_path, capsys):
    shapes, out = shapes_file(tmp_path, "16 128 512"), tmp_path / "table.json"
    configs = tuning_candidates(16, 128, 512, BF16)
    gpu.wrong = {f"{each.block_m}x{each.block_n}x{each.block_k}" for each in configs}
    assert main(["tune", "gemm", "--shapes", shapes, "--out", str(out)]) == 1
    assert not out.exists()
    assert f"rejected {len(configs)} times: wrong result" in capsys.readouterr().out


# Benchmarks


def test_bench_reports_a_product(gpu, tmp_path, capsys):
    gpu.slow = {"plait": 0.8}
    results = tmp_path / "new" / "rows.jsonl"
    command = ["bench", "gemm", "256", "512", "128", "--dtype", "float16", "--iters", "6"]
    assert main([*command, "--json", str(results)]) == 0
    assert main([*command, "--json", str(results)]) == 0
    row, again = rows(results)
    assert {**row, "error": 0, "date": ""} == {**again, "error": 0, "date": ""}
    assert (row["M"], row["N"], row["K"], row["dtype"]) == (256, 512, 128, "float16")
    assert row["gpu"] == GPU.name
    assert row["source"] == "default"
    assert row["plait_us"] == pytest.approx(80.8)
    assert row["baseline_us"] == pytest.approx(101.0)
    assert row["ratio"] == pytest.approx(1.25)
    assert 0 < row["plait_spread"] < 0.02
    assert row["tflops"] == pytest.approx(2 * 256 * 512 * 128 / 80.8e6)
    # Both roofs are invented: the copy moves 8 KiB in 202 us.
    intensity = 2 * 256 * 512 * 128 / (2 * (256 * 512 + 128 * (256 + 512)))
    roof = min(2 * 256**3 / 101e6, 8192 / 202e6 * intensity)
    assert row["roof_tflops"] == pytest.approx(roof)
    assert row["roof_share"] == pytest.approx(row["tflops"] / roof)
    assert {"torch", "triton", "plait"} <= set(row["versions"])
    assert row["command"].startswith("plait")
    assert row["rounds"] == 6
    assert row["clocks"] == "1980 MHz"
    assert [rounds for names, rounds in gpu.timed if "plait" in names] == [6, 6]
    out = capsys.readouterr().out
    assert "256 512 128" in out
    assert "1.250" in out
    assert "torch.matmul" in out


@pytest.mark.parametrize(
    ("options", "baseline"),
    [
        ("", "torch.matmul"),
        ("--dtype float32 --tf32", "torch.matmul"),
        ("--dtype float16 --batch 3 --layout kn", "torch.bmm"),
        ("--dtype float8_e4m3", "torch._scaled_mm(use_fast_accum=False)"),
        ("--dtype fp8 --scales rows", "torch._scaled_mm(use_fast_accum=False)"),
        ("--impl default", "torch.matmul"),
    ],
)
def test_bench_takes_each_kind(options, baseline, gpu, tmp_path):
    results = tmp_path / "rows.jsonl"
    command = f"bench gemm 64 128 256 {options} --json {results}"
    before = torch.backends.cuda.matmul.fp32_precision
    assert main(command.split()) == 0
    (row,) = rows(results)
    assert row["baseline"] == baseline
    assert row["precision"] == ("tf32" if "tf32" in options else "ieee")
    assert row["ratio"] == pytest.approx(1.0)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_bench_measures_host_time(gpu, tmp_path, capsys, monkeypatch):
    """Both sides in turns; whether a plan was found is said by the call's own record."""
    turns, results = [], tmp_path / "rows.jsonl"
    plans = iter(["planned", ""])

    def host_us(call, calls, repeats):
        call()
        turns.append(call.__name__)
        return (15.0 if call.__name__ == "ours" else 20.0) + 1 / len(turns)

    monkeypatch.setattr(bench_gemm, "host_us", host_us)
    monkeypatch.setattr(bench_gemm.plait, "matmul", lambda x, weight, impl: x @ weight.mT)
    monkeypatch.setattr(
        bench_gemm.plait, "last_run", lambda: RunRecord("matmul", "fused", "", next(plans))
    )
    for _ in range(2):
        assert main(["bench", "gemm", "16", "64", "64", "--host", "--json", str(results)]) == 0
    assert main(["bench", "gemm", "16", "64", "64", "--json", str(results)]) == 0
    assert turns == ["ours", "theirs"] * 2 * bench_gemm.HOST_TURNS
    planned, checked, without = rows(results)
    assert planned["host_us"] == pytest.approx(15 + 1 / 9)
    assert planned["host_baseline_us"] == pytest.approx(20.1)
    assert [each["host_planned"] for each in (planned, checked, without)] == [True, False, None]
    assert without["host_us"] is without["host_baseline_us"] is None
    out = capsys.readouterr().out
    assert out.count("15.1/20.1 ") == 1
    assert out.count("host us") == 2
    assert out.count("no plan") == 1


def test_bench_uses_the_table_that_tune_wrote(gpu, tmp_path):
    shapes, results = shapes_file(tmp_path, "256 512 1024"), tmp_path / "rows.jsonl"
    fastest = tuning_candidates(256, 512, 1024, BF16)[3]
    gpu.slow = {config_text(fastest): 0.5}
    assert main(["tune", "gemm", "--shapes", shapes]) == 0
    for sizes, options in (("256 512 1024", ""), ("300 512 1024", ""), ("256 512 1024", "default")):
        command = f"bench gemm {sizes} --json {results}".split()
        assert main([*command, *(["--impl", options] if options else [])]) == 0
    tuned_row, near, default = rows(results)
    assert [each["source"] for each in (tuned_row, near, default)] == [
        "tuned",
        "nearest",
        "default",
    ]
    assert Config(**tuned_row["config"]) == fastest == Config(**near["config"])
    assert default["impl"] == "default"


def test_bench_does_not_time_a_wrong_result(gpu, tmp_path, capsys):
    shapes, results = shapes_file(tmp_path, "16 128 512", "256 128 512"), tmp_path / "rows.jsonl"
    config = default_config(256, 128, 512, BF16, "sm90", True)
    gpu.wrong = {f"{config.block_m}x{config.block_n}x{config.block_k}"}
    assert main(["bench", "gemm", "--shapes", shapes, "--json", str(results)]) == 1
    good, bad = rows(results)
    assert good["ratio"] == pytest.approx(1.0)
    assert bad["plait_us"] is bad["ratio"] is bad["roof_share"] is None
    assert sum("plait" in names for names, _ in gpu.timed) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "FAILED: wrong results: 256 128 512" in out


def test_bench_draws_a_roofline(gpu, tmp_path):
    pytest.importorskip("matplotlib")
    shapes, plot = shapes_file(tmp_path, "16 128 512", "256 128 512"), tmp_path / "new" / "roof.png"
    assert main(["bench", "gemm", "--shapes", shapes, "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))


def test_the_real_lab_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlaitError, match="a GPU that PyTorch can use"):
        labs.gpu_lab()
    assert {"torch", "triton", "plait"} < set(labs.versions())
