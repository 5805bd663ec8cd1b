"""`plait bench ag_gemm|gemm_rs|gemm_ar`: requests, rows and tables with invented times, and the
check of results on virtual ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import plait
from plait.cli import bench_overlap, bench_overlap_cases
from plait.cli.bench_overlap import Request
from plait.cli.bench_overlap_backward import BackwardCase, mirrored
from plait.cli.bench_overlap_cases import Case
from plait.cli.bench_overlap_report import TIMES, Result, config_text, row
from plait.cli.main import main
from plait.cli.shapes import read_shapes
from plait.errors import ArgumentError, GroupError
from plait.model.problem import Link, Problem
from plait.runtime import lab as labs
from plait.runtime.lab import Lab
from plait.runtime.timing import Timing
from tests.host.cli.bench_fakes import GPU
from tests.tiny.tree import ROOT

US = dict(zip(TIMES, (102.0, 100.0, 40.0, 145.0, 150.0, 110.0, 120.0), strict=True))
PROBLEM = Problem("ag_gemm", 4096, 49152, 12288, 8)


def timings(**changes: float) -> dict[str, Timing]:
    times = {**US, **changes}
    return {name: Timing(name, (us * 0.99, us, us, us * 1.01)) for name, us in times.items()}


class FakeCase:
    """A case whose contestants do nothing."""

    wrong: ClassVar[dict[str, str]] = {}

    def __init__(self, request, problem, group):
        self.problem, self.auto_impl = problem, "fused"
        self.config = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "blocks": 131}

    def check(self) -> str:
        return self.wrong.get(self.problem.shape_text, "")

    def contestants(self):
        return dict.fromkeys(TIMES, lambda: None)


@pytest.fixture
def gpu(monkeypatch):
    """A lab with invented times, and groups that are none. `timed` lists rounds; see US."""
    found = SimpleNamespace(timed=[], opened=[], closed=0)

    def times(contestants, rounds):
        found.timed.append((list(contestants), rounds))
        return timings()

    def close():
        found.closed += 1

    def group(request, device):
        found.opened.append(request)
        executor = SimpleNamespace(num_sms=GPU.num_sms - 1)
        return SimpleNamespace(executor=executor, close=close, synchronize=lambda: None)

    device = torch.empty(0).device
    lab = Lab(device, GPU, lambda program: None, times)
    monkeypatch.setattr(labs, "gpu_lab", lambda: lab)
    monkeypatch.setattr(labs, "gpu_clocks", lambda device: "1980 MHz")
    monkeypatch.setattr(bench_overlap, "open_group", group)
    monkeypatch.setattr(bench_overlap, "make_case", FakeCase)
    monkeypatch.setattr(FakeCase, "wrong", {})
    return found


# Requests


def test_sizes_are_those_of_all_ranks():
    request = Request("ag_gemm", (4096, 49152, 12288), dtype="float16")
    (problem,) = request.problems()
    assert problem == PROBLEM
    assert problem.local_shape == (4096, 6144, 12288)
    (problem,) = Request("gemm_rs", (4096, 12288, 49152), tp=4, dtype="float32").problems()
    assert problem.local_shape == (4096, 12288, 12288)
    assert (problem.world_size, problem.dtype_bytes) == (4, 4)


@pytest.mark.parametrize(("name", "operator"), [("ag", "ag_gemm"), ("rs", "gemm_rs")])
def test_the_shape_files_hold_the_dense_layers(name, operator):
    path = ROOT / "benchmarks" / "shapes" / f"overlap_{name}.txt"
    sides = [(49152, 12288), (28672, 8192)]
    sides = sides if operator == "ag_gemm" else [side[::-1] for side in sides]
    rows = (1024, 2048, 4096, 8192, 16384)
    assert read_shapes(path) == [(M, *side) for side in sides for M in rows]
    assert len(Request(operator, shapes=path).problems()) == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("paced:360", Link(360.0, 3.0)),
        ("paced:160@5+traffic", Link(160.0, 5.0)),
        ("pcie", Link(55.0, 3.0, 4.8)),
        ("real", Link(360.0)),
    ],
)
def test_the_model_sees_the_same_link(text, expected):
    assert Request("ag_gemm", link=text).model_link() == expected


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("bench ag_gemm", 2, "give M N K"),
        ("bench gemm_rs 1 2", 2, "give M N K"),
        ("bench gemm_ar 1 2 3 --shapes x", 2, "give M N K"),
        ("bench ag_gemm 64 100 64", 1, "N: expected a multiple of the 8 ranks, got 100"),
        ("bench gemm_rs 64 64 100 --tp 3", 1, "K: expected a multiple of the 3 ranks"),
        ("bench ag_gemm 64 64 64 --dtype int8", 1, "int8"),
        ("bench ag_gemm 64 64 64 --dtype fp8", 1, "bfloat16, float16 or float32"),
        ("bench ag_gemm 64 64 64 --link paced", 1, "paced:360"),
        ("bench ag_gemm --shapes nowhere.txt", 1, "nowhere.txt"),
        ("bench ag_gemm 63 64 64 --link real", 1, "M: expected a multiple of 8"),
        ("bench gemm_ar 64 64 64 --backward", 1, "expected ag_gemm or gemm_rs, got gemm_ar"),
    ],
)
def test_mistakes(command, status, text, gpu, capsys):
    assert main(command.split()) == status
    captured = capsys.readouterr()
    assert text in captured.err + captured.out
    assert not gpu.opened


@pytest.mark.parametrize("link", ["paced:360", "real"])
def test_without_a_gpu_the_text_says_so(link, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = f"bench ag_gemm 4096 49152 12288 --dtype float16 --iters 10 --link {link}"
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert "DeviceError: device: expected a GPU" in captured.err
    assert "plait doctor" in captured.err
    assert "Traceback" not in captured.err + captured.out


def test_real_ranks_need_torchrun(gpu):
    with pytest.raises(GroupError, match="torchrun --nproc-per-node 8"):
        bench_overlap.bench_overlap(Request("ag_gemm", (64, 64, 64), link="real"))


# Rows and tables


def test_a_row_holds_the_metrics():
    result = Result(PROBLEM, "bfloat16", "paced:360", times=timings(), auto_impl="unfused")
    line = row(result, {"gpu": "none"})
    assert (line["M"], line["N"], line["K"], line["tp"]) == (4096, 49152, 12288, 8)
    assert line["local_shape"] == [4096, 6144, 12288]
    assert (line["gemm"], line["plait_gemm_us"], line["torch_gemm_us"]) == ("plait_gemm", 100, 102)
    assert line["ect_us"] == pytest.approx(10.0)
    assert line["overlap_efficiency"] == pytest.approx(0.75)
    assert line["hidden_share"] == pytest.approx(0.75)
    assert line["bound_ratio"] == pytest.approx(1.1)
    assert line["speedup"] == pytest.approx(145 / 110)
    assert line["auto_speedup"] == pytest.approx(145 / 120)
    assert line["auto_impl"] == "unfused"
    assert (line["pass"], line["plait_unfused_us"]) == ("forward", 150.0)
    assert 0 < line["fused_spread"] < 0.02
    assert line["gpu"] == "none"
    assert line["wrong"] is None
    json.dumps(line, allow_nan=False)


def test_a_row_without_communication_is_still_json():
    alone = Problem("ag_gemm", 64, 64, 64, 1)
    times = {**timings(), "communication": Timing("communication", (0.0,))}
    result = Result(alone, "bfloat16", "pcie", times=times)
    assert row(result, {})["overlap_efficiency"] is None
    json.dumps(row(result, {}), allow_nan=False)


def test_a_wrong_row_has_no_times():
    line = row(Result(PROBLEM, "bfloat16", "pcie", wrong="NaN"), {})
    assert line["wrong"] == "NaN"
    assert line["fused_us"] is None
    assert "bound_ratio" not in line


def test_config_text():
    full = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}
    assert config_text({**full, "blocks": 131, "num_chunks": 4}) == "128x256x64 w8 s3 b131 c4"
    assert config_text({**full, "slices": 2}) == "128x256x64 w8 s3 2 slices"
    assert config_text({}) == ""


def test_the_greedy_schedule_has_the_measured_product():
    times = timings(torch_gemm=765.1, plait_gemm=770.7)
    result = Result(PROBLEM, "bfloat16", "paced:360", times=times, sms_held=1)
    found = bench_overlap.greedy(Request("ag_gemm"), result)
    assert found.gemm_us == pytest.approx(765.1)
    assert found.comm_us == pytest.approx(247.7, abs=0.1)
    assert 1.0 < found.bound_ratio < 1.15


# The command


def test_the_command_reports(gpu, tmp_path, capsys):
    path = tmp_path / "new" / "rows.jsonl"
    command = "bench ag_gemm 4096 49152 12288 --dtype float16 --iters 10"
    assert main([*command.split(), "--json", str(path)]) == 0
    (line,) = [json.loads(each) for each in path.read_text().splitlines()]
    assert line["benchmark"] == "ag_gemm"
    assert (line["dtype"], line["link"], line["rounds"]) == ("float16", "paced:360", 10)
    assert (line["gpu"], line["clocks"], line["sms_held_by_pacer"]) == (GPU.name, "1980 MHz", 1)
    assert {"torch", "triton", "plait"} <= set(line["versions"])
    assert line["config"]["block_n"] == 256
    assert line["greedy"]["bound_ratio"] >= 1
    assert gpu.timed == [(list(TIMES), 10)]
    assert gpu.closed == 1
    out = capsys.readouterr().out
    for text in ("4096 49152 12288", "1.100", "75%", "128x256x64", "pacer holds 1 SM", "1980 MHz"):
        assert text in out


def test_the_backward_pass_is_reported_as_such(gpu, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    command = "bench gemm_rs 4096 12288 49152 --backward"
    assert main([*command.split(), "--json", str(path)]) == 0
    line = json.loads(path.read_text())
    assert (line["benchmark"], line["pass"]) == ("gemm_rs", "backward")
    assert "greedy" not in line  # the model has no such pass
    out = capsys.readouterr().out
    assert "gemm_rs, backward" in out
    assert "greedy:" not in out


def test_many_shapes_have_means_and_a_plot(gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    shapes, plot = tmp_path / "shapes.txt", tmp_path / "new" / "bars.png"
    shapes.write_text("1024 8192 28672\n4096 8192 28672\n4096 12288 49152")
    command = ["bench", "gemm_rs", "--shapes", str(shapes), "--link", "pcie", "--plot", str(plot)]
    assert main(command) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "geometric mean" in out
    assert "all" in out
    assert len(gpu.timed) == gpu.closed == 3


def test_a_wrong_result_is_not_timed(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FakeCase, "wrong", {"64 64 64": "largest error inf"})
    shapes, path = tmp_path / "shapes.txt", tmp_path / "rows.jsonl"
    shapes.write_text("64 64 64\n128 64 64")
    command = ["bench", "gemm_ar", "--shapes", str(shapes), "--json", str(path)]
    assert main(command) == 1
    bad, good = [json.loads(each) for each in path.read_text().splitlines()]
    assert bad["wrong"] == "rank 0: largest error inf"
    assert bad["fused_us"] is None
    assert good["bound_ratio"] == pytest.approx(1.1)
    assert len(gpu.timed) == 1
    assert gpu.closed == 2
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "FAILED: wrong results: 64 64 64" in out


# The check, on virtual ranks


def checked(problem: Problem, emulated: bool, change=None) -> list[str]:
    def rank(group):
        case = Case(problem, torch.float32, group, emulated)
        if change is not None:
            change(case)
        wrong = case.check()
        assert case.config["block_m"] >= 16
        assert case.config["slices"] == 1
        return wrong

    return plait.run_virtual(rank, problem.world_size)


SMALL = [
    Problem("ag_gemm", 40, 64, 48, 2, 4),
    Problem("ag_gemm", 21, 32, 32, 2, 4),  # uneven rows
    Problem("gemm_rs", 40, 48, 64, 2, 4),
    Problem("gemm_rs", 21, 32, 32, 2, 4),
    Problem("gemm_ar", 8, 48, 64, 2, 4),  # one shot
    Problem("gemm_ar", 70, 16, 48, 3, 4),  # two shots
]


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_right_results_pass(problem):
    assert checked(problem, emulated=False) == [""] * problem.world_size


@pytest.mark.parametrize("problem", SMALL[2:], ids=str)
def test_what_lies_in_the_slots_is_what_was_summed(problem, monkeypatch):
    # The peers are real here, so the regions stay as they left them.
    monkeypatch.setattr(bench_overlap_cases, "fill_regions", lambda group, dtype: None)
    assert checked(problem, emulated=True) == [""] * problem.world_size


def backward_of(problem: Problem, group, impl: str, change=None):
    """A rank's backward case and its wrong text; the last call was of `impl`."""
    case = BackwardCase(problem, torch.float32, group, False)
    if change is not None:
        change(case)
    wrong = case.check()
    return case, case.overlapped(impl), wrong


@pytest.mark.parametrize("problem", SMALL[:4], ids=str)
def test_the_backward_case_gives_the_gradients_of_autograd(problem):
    def rank(group):
        case, grad_x, wrong = backward_of(problem, group, "fused")
        assert wrong == ""
        x, grad = case.saved.requires_grad_(), case.x
        weight = case.weight.t().contiguous().requires_grad_()
        sizes = list(problem.rows_per_rank)
        call = plait.ag_gemm if problem.operator == "ag_gemm" else plait.gemm_rs
        out = call(x, weight, group=group, rows_per_rank=sizes, impl="fused")
        expected = torch.autograd.grad(out, (x, weight), grad)
        return grad_x, case.weight_gradient, *expected

    for grad_x, grad_weight, expected_x, expected_weight in plait.run_virtual(rank, 2):
        assert torch.equal(grad_x, expected_x)
        assert torch.equal(grad_weight, expected_weight)


@pytest.mark.parametrize("problem", SMALL[:4], ids=str)
def test_the_backward_of_both_implementations_is_the_same(problem):
    def rank(group):
        fused = backward_of(problem, group, "fused")
        unfused = backward_of(problem, group, "unfused")
        return fused, unfused

    for (case, grad_x, _), (other, other_x, _) in plait.run_virtual(rank, 2):
        torch.testing.assert_close(grad_x, other_x)
        torch.testing.assert_close(case.weight_gradient, other.weight_gradient)
        # The plain products have the shapes of what they stand for.
        case.torch_gemm()
        assert case.product_for_weight.shape == case.weight_gradient.shape


def test_a_wrong_gather_beside_the_reduce_scatter_is_found():
    def change(case):
        right = case.overlapped

        def wrong(impl, return_gathered=False):
            result = right(impl, return_gathered)
            if return_gathered:
                result[1][-1] += 1
            return result

        case.overlapped = wrong

    found = plait.run_virtual(lambda group: backward_of(SMALL[0], group, "fused", change)[2], 2)
    assert all("gathered" in text for text in found), found


def test_a_backward_pass_has_the_other_operators_product():
    other = mirrored(PROBLEM)
    assert (other.operator, other.M, other.N, other.K) == ("gemm_rs", 4096, 12288, 49152)
    assert other.flops == PROBLEM.flops
    with pytest.raises(ArgumentError, match="--backward"):
        mirrored(Problem("gemm_ar", 64, 64, 64, 2))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("problem", [SMALL[0], SMALL[2], SMALL[5]], ids=str)
def test_wrong_results_do_not(problem, emulated, monkeypatch):
    monkeypatch.setattr(bench_overlap_cases, "fill_regions", lambda group, dtype: None)

    def change(case):
        right = case.overlapped

        def wrong(impl, return_gathered=False):
            result = right(impl, return_gathered)
            out = result[0] if return_gathered else result
            first = sum(problem.rows_per_rank[: case.group.rank])  # an own row in two shots
            out[first if problem.operator == "gemm_ar" else -1, -1] += 0.01
            return result

        case.overlapped = wrong

    found = checked(problem, emulated, change)
    assert all("largest error" in text for text in found), found


def test_a_wrong_gathered_tensor_is_found():
    def change(case):
        right = case.overlapped

        def wrong(impl, return_gathered=False):
            result = right(impl, return_gathered)
            if return_gathered:
                result[1][-1] += 1
            return result

        case.overlapped = wrong

    assert all("gathered" in text for text in checked(SMALL[0], False, change))


def test_regions_are_filled_alike():
    def rank(group):
        group.take_region(1024)
        group.take_region(2048)
        bench_overlap_cases.fill_regions(group, torch.bfloat16)
        regions = group.workspace.regions[:2]
        return [region.buffer.local[:1024].view(torch.bfloat16) for region in regions]

    ((first, second),) = plait.run_virtual(rank, 1)
    assert torch.equal(first, second)
    assert 0.5 < first.float().std() < 1.5


def test_shapes_that_do_not_divide_are_refused():
    with pytest.raises(ArgumentError, match="multiple of the 8 ranks"):
        Request("gemm_ar", (4096, 12288, 49150)).problems()
