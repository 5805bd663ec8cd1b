"""`plait trace`: its file and tables on virtual ranks, its errors, and its calls on a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from plait.cli import bench_overlap, bench_overlap_cases
from plait.cli import trace as command
from plait.cli.main import main
from plait.overlap.common.trace import is_tracing
from plait.runtime import lab as labs
from plait.runtime import timing
from plait.runtime.lab import Lab
from tests.host.cli.bench_fakes import GPU

pytest.importorskip("rich")


@pytest.mark.parametrize(
    ("arguments", "ranks", "steps"),
    [
        ("ag_gemm 48 64 16 --tp 2", 2, {"wait", "compute", "store"}),
        ("gemm_rs 96 40 48 --tp 3", 3, {"compute", "store", "wait", "sum"}),
        ("gemm_ar 80 40 32 --tp 2 --dtype float32", 2, {"compute", "store", "wait", "sum"}),
    ],
)
def test_virtual_ranks(arguments, ranks, steps, tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main(["trace", *arguments.split(), "--virtual", "--out", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(ranks))
    assert {event["name"] for event in events if event["ph"] == "X"} == steps
    out = capsys.readouterr().out
    assert arguments.split()[0] in out
    assert "invented clock" in out
    assert all(name in out for name in ("waves", "idle", "first tile", "last tile"))
    assert "link:" not in out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("ag_gemm 64 64", 2, "Missing argument"),
        ("nothing 64 64 64", 1, "one of ag_gemm, gemm_rs, gemm_ar"),
        ("ag_gemm 64 63 64", 1, "a multiple of the 8 ranks"),
        ("ag_gemm 64 64 64 --dtype float8_e4m3", 1, "bfloat16, float16 or float32"),
        ("ag_gemm 64 64 64 --link real", 1, "link: expected 'pcie'"),
    ],
)
def test_usage_errors(arguments, status, text, capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert main(["trace", *arguments.split(), "--out", str(path)]) == status
    assert text in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu(capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert main(["trace", "gemm_rs", "64", "64", "64", "--out", str(path)]) == 2
    assert "DeviceError: device: expected a GPU" in capsys.readouterr().err


def test_on_a_gpu_the_last_captured_call_is_traced(monkeypatch, tmp_path, capsys):
    """Untraced calls first, the memory filled, then the traced call: eager, captured, replayed."""
    log = []
    group = SimpleNamespace(check=lambda: log.append("check"), close=lambda: log.append("close"))
    case = SimpleNamespace(overlapped=lambda impl: log.append((impl, is_tracing())))

    def capture(fn):
        fn()
        log.append("captured")
        fn()
        return SimpleNamespace(replay=lambda: log.append("replay"))

    lab = Lab(torch.empty(0).device, GPU, lambda program: None, lambda *_: {})
    monkeypatch.setattr(labs, "gpu_lab", lambda: lab)
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(bench_overlap, "open_group", lambda request, device: group)
    monkeypatch.setattr(bench_overlap, "make_case", lambda request, problem, group: case)
    monkeypatch.setattr(bench_overlap_cases, "fill_regions", lambda *_: log.append("fill"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    arguments = ["trace", "ag_gemm", "64", "64", "64", "--out", str(tmp_path / "trace.json")]
    assert main(arguments) == 0
    assert log == [
        *[("fused", False)] * command._WARM_CALLS,
        "fill",
        ("fused", True),
        "captured",
        ("fused", True),
        *["replay"] * command._REPLAYS,
        "synchronize",
        "check",
        "close",
    ]
    assert "emulated peers" in capsys.readouterr().out
