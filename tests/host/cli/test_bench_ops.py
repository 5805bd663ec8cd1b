"""`plait bench ops`, `plait tune ops` and `plait bench models` with a fake GPU: kernels under the
interpreter, invented times."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import plait
from plait.cli import bench_ops_compile, bench_ops_flaggems, bench_ops_host
from plait.cli.bench_ops_cases import CASES, FAMILIES, Arrangement, find_cases
from plait.cli.bench_ops_measure import ask, check, operands_of
from plait.cli.bench_ops_points import Point, grid, read_dtypes, read_sizes, read_suite, sweep
from plait.cli.main import main
from plait.errors import ArgumentError
from plait.ops.aten import registration, spec, targets, wins
from plait.ops.aten.wins import Rule, WinTable
from plait.runtime import lab as labs
from plait.runtime.compile_pool import precompile
from plait.settings import override
from tests.host.cli.bench_fakes import FakeGpu
from tests.tiny.tree import ROOT

SUITE = ROOT / "benchmarks" / "shapes" / "ops.json"
CPU = torch.empty(0).device
# Batch norms that training modules reach on other ways than `native_batch_norm`.
_NO_CASE = {
    "batch_norm_backward_with_reserve",
    "batch_norm_with_update",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The fake GPU instead of a real one, with an empty table; nothing is compiled."""
    fake = FakeGpu()
    fake.slow["plait"] = 0.8
    fake.compiled = {}

    def compile_none(jobs, *args, **keywords):
        fake.compiled.update(jobs)
        return dict.fromkeys(jobs, "")

    monkeypatch.setattr(labs, "gpu_lab", lambda: fake.lab(CPU))
    monkeypatch.setattr(labs, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(bench_ops_compile, "precompile", compile_none)
    monkeypatch.setattr(bench_ops_flaggems, "is_installed", lambda: False)
    monkeypatch.setattr(wins, "SHIPPED_TABLES", tmp_path / "shipped")
    wins.forget_wins()
    with override(tuning_dir=str(tmp_path / "own")):
        yield fake
    plait.uninstall()
    wins.forget_wins()


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Cases and points


def test_every_operator_of_the_catalog_has_a_case():
    """An operator without one would be in no table: default mode would never take it."""
    reached = set()
    for case in CASES:
        for layout in case.layouts:
            at = Arrangement(layout, 1 if layout == "r" else 4, 16)
            try:
                asked = ask(Point(case.name, case, at, case.dtypes[-1]), CPU)
            except NotImplementedError:  # a key that the CPU does not have
                asked = []
            reached |= {each.operator for each in asked}
    plait.uninstall()
    missing = {
        found.name
        for key in spec.served()
        if (found := spec.find(key))
        and targets.targets()[key].group in FAMILIES
        and registration.why_not(key, "CPU") == ""
    }.difference(reached, _NO_CASE)
    assert not missing, f"no case reaches {sorted(missing)}"


def test_operands_are_the_same_at_each_call():
    (case,) = find_cases(["layer_norm_backward"])
    point = Point("x", case, Arrangement("kr", 4, 16), "bfloat16")
    for one, again in zip(operands_of(point, CPU), operands_of(point, CPU), strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["sum"], {"sum"}),
        (["*_backward", "sum"], {"sum", "softmax_backward", "layer_norm_backward"}),
        (["scan"], {"cumsum", "cummax"}),
        ([], {case.name for case in CASES}),
    ],
)
def test_names_of_cases(names, found):
    assert found <= {case.name for case in find_cases(names)}
    assert {case.family for case in find_cases(FAMILIES)} == set(FAMILIES)


def test_sizes_and_dtypes():
    assert read_sizes("10-26:4") == (10, 14, 18, 22, 26)
    assert read_sizes("12,10-11") == (10, 11, 12)
    assert read_sizes("") == ()
    assert read_dtypes("bf16, float32") == ("bfloat16", "float32")
    points = sweep(find_cases(["sum", "any"]), ("float32", "bfloat16"), (10, 26))
    assert [str(each) for each in points if each.name == "sum"][:2] == [
        "sum float32 32x32 dim 1",
        "sum bfloat16 32x32 dim 1",
    ]
    assert {each.dtype for each in points if each.name == "any"} == {"bool"}
    assert {each.at.numel for each in points} == {2**10, 2**26}


def test_the_grid_has_single_rows_where_no_whole_is_asked():
    points = grid(find_cases(["sum", "softmax"]), ("float32",), (10, 14, 18))
    shapes = {(each.name, each.at.layout, each.at.rows, each.at.row) for each in points}
    assert ("sum", "r", 1, 2**14) in shapes
    assert ("softmax", "kr", 1, 2**14) in shapes
    assert ("sum", "kr", 1, 2**14) not in shapes
    assert ("sum", "rk", 16, 768) in shapes
    assert ("sum", "kr", 48, 5120) in shapes
    assert ("sum", "kr", 48, 5121) in shapes
    assert ("sum", "kr", 16, 769) not in shapes  # every other size only
    assert all(row <= 2**18 for _, _, _, row in shapes)


def test_the_suite_is_that_of_the_documents():
    points = read_suite(SUITE, find_cases([]), ("bfloat16",))
    assert len(points) == 19
    shapes = {each.name: each.at for each in points}
    assert shapes["softmax_vocab"] == Arrangement("kr", 4096, 32000)
    assert shapes["sum_dim0"].shape == (4096, 4096)
    (group,) = [each for each in points if each.name == "group_norm"]
    small = Point("g", group.case, Arrangement("kr", 64, 64), "float32")
    assert operands_of(small, CPU)[0].shape == (2, 64, 32)


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("bench ops nothing", 1, "'nothing'"),
        ("bench ops --dtype int8", 1, "'int8'"),
        ("bench ops --sizes a", 1, "powers of two"),
        ("bench ops --sizes 40", 1, "0 to 30"),
        ("bench ops --shapes nowhere.json", 1, "nowhere.json"),
        ("tune ops --family nothing", 1, "'nothing'"),
        ("bench models nothing", 1, "'nothing'"),
    ],
)
def test_mistakes(command, status, text, capsys, gpu):
    assert main(command.split()) == status
    assert text in capsys.readouterr().err
    assert not gpu.timed


@pytest.mark.parametrize("text", ["[", "[]", '{"rows": [{"name": "a", "case": "b"}]}'])
def test_a_bad_suite_is_named(text, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"suite\.json"):
        read_suite(path, find_cases([]), ("float32",))


@pytest.mark.parametrize("command", ["bench ops", "tune ops", "bench models"])
def test_without_a_gpu_the_text_says_so(command, capsys, monkeypatch):
    if "models" in command:
        pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command.split()) == 2
    assert "expected a GPU" in capsys.readouterr().err


# Measuring


def test_lines_tables_and_plot(gpu, tmp_path, capsys):
    gpu.slow["plait"] = 1.25
    path, plot = tmp_path / "deep" / "ops.jsonl", tmp_path / "ops.png"
    command = [
        "bench",
        "ops",
        "sum",
        "softmax",
        "--sizes",
        "6,10",
        "--dtype",
        "fp32",
        "--iters",
        "3",
    ]
    assert main([*command, "--json", str(path), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    found = [row for row in rows(path) if row["name"] in ("sum", "softmax")]
    assert [(row["name"], row["rows"] * row["row"]) for row in found] == [
        ("sum", 64),
        ("sum", 1024),
        ("softmax", 64),
        ("softmax", 1024),
    ]
    for row in found:
        assert row["ratio"] == pytest.approx(0.8)
        assert (row["chosen"], row["default_ratio"]) == ("aten", 1.0)
        assert row["plait_us"] == pytest.approx(125, rel=0.05)
        assert {"gpu", "versions", "date", "command", "method", "dtype", "keys"} <= row.keys()
    assert found[0]["keys"] == ["sum.dim_IntList"]
    assert "slower: 0.800" in text
    assert "kernels compiled" in text
    assert plot.stat().st_size > 1000
    assert {job.module.split(".")[2] for job in gpu.compiled} == {"reduction", "norm"}


def test_a_wrong_result_is_not_timed(gpu, tmp_path, capsys, monkeypatch):
    from plait.cli import bench_ops_measure

    real = bench_ops_measure.check
    monkeypatch.setattr(
        bench_ops_measure,
        "check",
        lambda point, operands, actual, plain: real(point, operands, actual + 1, plain),
    )
    path = tmp_path / "ops.jsonl"
    command = ["bench", "ops", "sum", "amax", "--sizes", "6", "--dtype", "fp32", "--json"]
    assert main([*command, str(path)]) == 1
    assert "WRONG: sum float32" in capsys.readouterr().out
    assert not gpu.timed
    assert all("plait_us" not in row and row["wrong"] for row in rows(path))


def test_what_raises_is_wrong_and_the_rest_goes_on(gpu, tmp_path, capsys, monkeypatch):
    def fails(call, **arguments):
        raise ZeroDivisionError("no launch")

    path = tmp_path / "ops.jsonl"
    with spec.only(spec.OpSpec("amax", ("amax",), compute=fails), spec.find("sum.dim_IntList")):
        command = ["bench", "ops", "amax", "sum", "--sizes", "6", "--dtype", "fp32", "--json"]
        assert main([*command, str(path)]) == 1
    assert "WRONG: amax float32 8x8 dim 1: raised ZeroDivisionError: no launch" in (
        capsys.readouterr().out
    )
    assert [row["wrong"] != "" for row in rows(path)] == [True, False]


def test_what_a_check_finds():
    (case,) = find_cases(["max"])
    point = Point("max", case, Arrangement("kr", 8, 16), "float32")
    operands = operands_of(point, CPU)
    plain = case.call(1, *operands)
    assert check(point, operands, plain, plain) == ""
    values, indices = plain
    assert "elements are not ATen's" in check(point, operands, (values, indices + 1), plain)
    assert "largest error" in check(point, operands, (values * 1.1, indices), plain)
    apart = torch.empty(16)[::2].copy_(values)
    assert "strides" in check(point, operands, (apart, indices), plain)
    assert check(point, operands, (apart, indices), plain, same_strides=False) == ""


def test_default_mode_is_told_by_the_table(gpu, tmp_path):
    table = WinTable(
        [
            Rule("sum", "float32", "kr", 5, {10: 1.5}),
            Rule("log_softmax", "float32", "kr", 5, {10: 1.5}),
        ]
    )
    path = tmp_path / "ops.jsonl"
    with wins.only(table):
        command = "bench ops sum amax cross_entropy --sizes 10 --dtype fp32 --json"
        assert main([*command.split(), str(path)]) == 0
    found = {row["name"]: row for row in rows(path)}
    assert (found["sum"]["chosen"], found["sum"]["default_ratio"]) == ("plait", 1.25)
    assert (found["amax"]["chosen"], found["amax"]["default_ratio"]) == ("aten", 1.0)
    if found["cross_entropy"]["ratio"] is not None:
        assert found["cross_entropy"]["chosen"] == "mixed"
        assert found["cross_entropy"]["default_us"] > 0


# Tuning


def test_tuning_writes_what_default_mode_reads(gpu, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    kept = WinTable([Rule("amax", "float32", "kr", 5, {10: 0.5})])
    wins.write_wins(path, kept, "NVIDIA H200")
    command = ["tune", "ops", "sum", "--sizes", "8,10", "--dtype", "fp32", "--iters", "3", "--out"]
    assert main([*command, str(path)]) == 0
    found = wins.read_wins(path)
    assert {rule.operator for rule in found.rules} == {"sum", "amax"}
    assert {rule.layout for rule in found.rules} == {"kr", "kr~", "rk", "r"}
    assert found.measured["gpu"] == "NVIDIA H200"
    ratios = {ratio for rule in found.rules for ratio in rule.ratios.values()}
    assert ratios - {0.5} == {1.25}  # three rounds have no spread
    x = torch.ones(16, 64)
    with wins.only(found), plait.use(device=CPU):
        for call in (lambda: x.sum(), lambda: x.sum(0), lambda: x.sum(1)):
            assert any(each.path == "plait" for each in plait.explain(call).calls)
        assert not any(each.path == "plait" for each in plait.explain(x.amax, 1).calls)
    assert "7 of 7 calls for NVIDIA H200" in capsys.readouterr().out


def test_tuning_without_a_single_rule_fails(gpu, tmp_path, monkeypatch):
    with spec.only():
        command = ["tune", "ops", "sum", "--sizes", "6", "--dtype", "fp32", "--out"]
        assert main([*command, str(tmp_path / "gpu.json")]) == 1
    assert not (tmp_path / "gpu.json").exists()


# Host time


def test_host_time_of_each_way(gpu, tmp_path, monkeypatch):
    """Each way is timed in the state that it is about."""
    (case,) = find_cases(["sum"])
    (point,) = bench_ops_host.host_points([case], "bfloat16")
    assert point.at.numel == 32
    seen = []

    def timer(call):
        with plait.report() as counted:
            call()
        seen.append((counted.served, tuple(counted.fallbacks), len(registration.registered("CPU"))))
        return 10.0 + len(seen)

    times = bench_ops_host.measure_host(point, CPU, timer, turns=1)
    by_name = dict(zip(("aten", "unregistered", "fallback", "off", "planned"), seen, strict=True))
    assert by_name["aten"] == (0, (), 0)
    assert by_name["unregistered"] == (0, (), 1)
    assert by_name["fallback"][:2] == (0, (wins.NOT_MEASURED,))
    assert by_name["off"][:2] == (0, ())
    assert by_name["off"][2] >= 1
    assert by_name["planned"][0] >= 1
    assert by_name["planned"][1] == ()
    assert (times.aten, times.planned) == (11.0, 15.0)
    line = bench_ops_host.host_row(times, {"date": "today"})
    assert (line["elements"], line["fallback_us"], line["date"]) == (32, 13.0, "today")
    assert bench_ops_host.host_table([times]).row_count == 2
    assert not registration.registered("CPU")


# Compiling in other processes


@pytest.mark.skipif(shutil.which("true") is None, reason="needs processes")
def test_what_is_recorded_compiles_without_a_gpu(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert main(["bench", "ops", "sum", "--sizes", "10", "--dtype", "bf16"]) == 0
    jobs = gpu.compiled
    assert len(jobs) == 1
    (job,) = jobs
    found = precompile(jobs, "sm90", remaining_s=lambda: 100.0, num_workers=1)
    assert found == {job: ""}
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {job.kernel}


# Models


def test_models_in_turns(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from plait.cli import bench_models

    models = bench_models.llama_decode(CPU, layers=1, hidden=128, steps=1, vocab=64)
    measured = bench_models.measure(models, turns=1)
    assert measured.wrong == ""
    assert {name: len(each) for name, each in measured.times.items()} == {
        "plain": 1,
        "default": 1,
        "forced": 1,
    }
    assert measured.served["plain"] == measured.served["default"] == 0
    assert measured.served["forced"] > 0
    assert measured.ratio("plain") == 1.0
    assert not registration.registered("CPU")
    line = bench_models._row(measured, {"date": "today"})
    assert line["forced_served"] == measured.served["forced"]
    assert bench_models._table([measured], "t").row_count == 1


def test_bert_runs():
    pytest.importorskip("transformers")
    from plait.cli import bench_models

    model, exact = bench_models.bert_forward(CPU, length=8, layers=1)
    assert model.step(None)[1].shape == (1, 8, 768)
    assert exact.step(None)[1].dtype == torch.float64
