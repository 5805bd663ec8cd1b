"""`plait bench ag_gemm|gemm_rs|gemm_ar`: overlapped against unfused, and against the bound.

M, N and K are those of all ranks together, as in Flux's scripts.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import ArgumentError, GroupError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    import typer

    from plait.cli.bench_overlap_report import Result
    from plait.model.problem import Link as ModelLink
    from plait.model.problem import Operator, Problem
    from plait.runtime.lab import Lab
    from plait.runtime.timing import Timing
    from plait.symm.group import Group

_HELP = {
    "ag_gemm": "AllGather + GEMM: x [M/tp, K] of each rank, weight [N/tp, K].",
    "gemm_rs": "GEMM + ReduceScatter: x [M, K/tp], weight [N, K/tp], result [M/tp, N].",
    "gemm_ar": "GEMM + AllReduce: x [M, K/tp], weight [N, K/tp], result [M, N].",
}
_REAL = "real"
_NVLINK_GB_S = 360.0  # what the model supposes of real GPUs: usable, one way, of an H200's NVLink
_PCIE_CHUNK_US = 4.8  # a copy and its signal in a graph


def add_overlap_commands(app: typer.Typer) -> None:
    """Give the app one command for each overlapped operator."""
    for operator in _HELP:
        _add_command(app, operator)


def _add_command(app: typer.Typer, operator: Any) -> None:
    import typer

    @app.command(operator, help=f"{_HELP[operator]} Sizes are those of all ranks together.")
    def command(
        sizes: list[int] | None = typer.Argument(None, metavar="[M N K]", show_default=False),
        shapes: Path | None = typer.Option(None, help="Many: one `M N K` a line; JSON, YAML."),
        tp: int = typer.Option(8, min=1, max=64, help="Ranks that share the product."),
        dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32."),
        link: str = typer.Option(
            "paced:360", help="pcie, paced:GBps[@us][+traffic], or real (under torchrun)."
        ),
        iters: int = typer.Option(20, min=1, help="Timed rounds."),
        json_file: Path | None = typer.Option(
            None, "--json", metavar="FILE", help="Append one JSON object a line."
        ),
        plot: Path | None = typer.Option(None, metavar="FILE", help="Draw times over the bound."),
        backward: bool = typer.Option(
            False, "--backward", help="The gradients of x and weight instead (not gemm_ar)."
        ),
    ) -> None:
        if (shapes is None) == (not sizes) or (sizes and len(sizes) != 3):
            raise typer.BadParameter("give M N K, or --shapes FILE")
        request = Request(operator, tuple(sizes or ()), shapes, tp, dtype, link, backward)
        bench_overlap(request, rounds=iters, json_file=json_file, plot=plot)


@dataclass(frozen=True)
class Request:
    """What to measure, as on the command line."""

    operator: Operator
    sizes: tuple[int, ...] = ()
    shapes: Path | None = None
    tp: int = 8
    dtype: str = "bfloat16"
    link: str = "paced:360"
    backward: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The operands' dtype; ArgumentError for other than bfloat16, float16 and float32."""
        from plait.ops.matmul.operands import FP8_DTYPES
        from plait.ops.matmul.problem import parse_dtype

        dtype = parse_dtype(self.dtype)
        if dtype in FP8_DTYPES or not dtype.is_floating_point:
            remedy = "Overlapped operators take no scales yet."
            raise ArgumentError("dtype", "bfloat16, float16 or float32", self.dtype, remedy)
        return dtype

    @property
    def emulated(self) -> bool:
        """Whether peers are memory, not other processes."""
        return self.link != _REAL

    def model_link(self) -> ModelLink:
        """The link as the model sees it; ArgumentError for a text that names none."""
        from plait.model.problem import Link as ModelLink

        if not self.emulated:
            return ModelLink(_NVLINK_GB_S)
        from plait.symm.transports.link import Link

        link = Link.parse(self.link)
        chunk_us = _PCIE_CHUNK_US if link.kind == "pcie" else 0.0
        return ModelLink(link.gb_s, link.latency_us, chunk_us)

    def problems(self) -> list[Problem]:
        """The calls asked for; ArgumentError if something does not fit."""
        from plait.cli.shapes import read_shapes
        from plait.model.problem import Problem

        if self.backward:
            from plait.cli.bench_overlap_backward import check_backward

            check_backward(self.operator)
        itemsize = self.torch_dtype.itemsize
        shapes = [self.sizes] if self.shapes is None else read_shapes(self.shapes)
        problems = [Problem(self.operator, M, N, K, self.tp, itemsize) for M, N, K in shapes]
        if not self.emulated and self.operator != "gemm_ar":
            for each in problems:
                if each.M % self.tp:
                    remedy = "NCCL's collectives, the baseline, take equal shares."
                    raise ArgumentError("M", f"a multiple of {self.tp}", each.M, remedy)
        return problems


def bench_overlap(
    request: Request, *, rounds: int = 20, json_file: Path | None = None, plot: Path | None = None
) -> None:
    """Measure, print and write; exits with 1 if a result is wrong."""
    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("rich", "plait bench", 'pip install "plait[cli]"') from None
    from plait.cli import bench_overlap_report as report
    from plait.cli.bench_plot import check_plots
    from plait.runtime.lab import gpu_clocks, gpu_lab

    problems = request.problems()
    request.model_link()  # a wrong text is named before anything else happens
    if plot is not None:
        check_plots()
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a log has no width of its own
    with _ranks(request) as first:
        lab = gpu_lab()
        results = []
        for problem in problems:
            result = measure(request, problem, lab, rounds)
            results.append(result)
            if json_file is not None and first:
                facts = _facts(lab, rounds, gpu_clocks(lab.device))
                _append(json_file, report.row(result, facts))
        if first:
            title = _title(request, lab)
            console.print(report.result_table(results, title))
            console.print(report.summary(results))
            console.print(_notes(request, results, gpu_clocks(lab.device)))
            if plot is not None:
                from plait.cli.bench_overlap_plot import write_bars

                write_bars(plot, results, title)
    wrong = [f"{each.problem.shape_text} ({each.wrong})" for each in results if each.wrong]
    if wrong:
        if first:
            console.print(f"FAILED: wrong results: {'; '.join(wrong)}")
        raise SystemExit(1)


def measure(request: Request, problem: Problem, lab: Lab, rounds: int) -> Result:
    """Check one problem, then time it; nothing is timed if the check fails."""
    from plait.cli.bench_overlap_report import Result

    group = open_group(request, lab.device)
    try:
        case = make_case(request, problem, group)
        held = lab.info.num_sms - group.executor.num_sms
        base = Result(
            problem, request.dtype, request.link, sms_held=held, backward=request.backward
        )
        wrong = _anywhere(request, case.check())
        if wrong:
            return replace(base, wrong=wrong)
        contestants = case.contestants()
        times = _slowest(request, lab.times(contestants, rounds))
        group.synchronize()
        timed = replace(base, times=times, config=case.config, auto_impl=case.auto_impl)
        # The model knows one product a call.
        return timed if request.backward else replace(timed, prediction=greedy(request, timed))
    finally:
        group.close()


def make_case(request: Request, problem: Problem, group: Group) -> Any:
    """The operands and contestants of one problem."""
    if request.backward:
        from plait.cli.bench_overlap_backward import BackwardCase

        return BackwardCase(problem, request.torch_dtype, group, request.emulated)
    from plait.cli.bench_overlap_cases import Case

    return Case(problem, request.torch_dtype, group, request.emulated)


def open_group(request: Request, device: torch.device) -> Group:
    """A new group over the wanted link."""
    from plait.symm.group import Group

    if request.emulated:
        return Group.emulated(request.tp, link=request.link, device=device)
    group = Group.from_process_group(device=device)
    if group.world_size != request.tp:
        remedy = f"Start it with torchrun --nproc-per-node {request.tp}, or change --tp."
        raise GroupError("tp", f"the {group.world_size} ranks that run", request.tp, remedy)
    return group


def greedy(request: Request, result: Result) -> Any:
    """The model's greedy schedule, with tile rates scaled to the measured best product."""
    from plait.model.predict import calibrated, predict
    from plait.model.rates import H200

    rates = calibrated(H200, result.problem, result.gemm_us)
    link = request.model_link()
    num_sms = max(1, rates.num_sms - result.sms_held)
    return predict(result.problem, link, rates, num_sms=num_sms)


# --- several processes
@contextmanager
def _ranks(request: Request) -> Iterator[bool]:
    """Whether this process reports. With real ranks torch.distributed is up meanwhile."""
    if request.emulated:
        yield True
        return
    import torch
    import torch.distributed as dist

    from plait.runtime.lab import gpu_lab

    gpu_lab()  # raises where there is no GPU, before ranks meet
    if not dist.is_torchelastic_launched() and not dist.is_initialized():
        remedy = f"Start it as: torchrun --nproc-per-node {request.tp} -m plait bench ..."
        raise GroupError("link", "a process for each rank", "one process", remedy)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group()
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        yield dist.get_rank() == 0
    finally:
        if started:
            dist.destroy_process_group()


def _everybody(request: Request, value: Any) -> list[Any]:
    if request.emulated:
        return [value]
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _anywhere(request: Request, wrong: str) -> str:
    found = _everybody(request, wrong)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), "")


def _slowest(request: Request, times: Mapping[str, Timing]) -> dict[str, Timing]:
    """Of each contestant the times of the rank with the largest median."""
    everybody = _everybody(request, dict(times))
    return {
        name: max((each[name] for each in everybody), key=lambda timing: timing.median_us)
        for name in times
    }


# --- text
def _facts(lab: Lab, rounds: int, clocks: str) -> dict[str, Any]:
    from plait.runtime.lab import versions

    return {
        "gpu": lab.info.name,
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["plait", *sys.argv[1:]]),
        "rounds": rounds,
        "method": "GPU time of graph replays, cold L2, interleaved, median, slowest rank; "
        "random normal data",
        "clocks": clocks,
    }


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Each problem's line is in the file before the next one starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _title(request: Request, lab: Lab) -> str:
    from plait.runtime.lab import versions

    peers = "one live rank, emulated peers" if request.emulated else "real ranks"
    texts = ", ".join(f"{name} {text}" for name, text in versions().items())
    today = datetime.now(timezone.utc).date().isoformat()
    return (
        f"{request.operator}{', backward' if request.backward else ''}, {lab.info.name}, "
        f"{request.dtype}, TP{request.tp}, {request.link} "
        f"({peers}), {today}, {texts}"
    )


def _notes(request: Request, results: Sequence[Result], clocks: str) -> str:
    held = max((each.sms_held for each in results), default=0)
    parts = [f"clocks under load: {clocks or 'unknown'}"]
    if request.emulated:
        parts.append(f"the link is a model; its pacer holds {held} SM")
    if not request.backward:
        parts.append("greedy: the model's schedule at the measured product's rate")
    return "; ".join(parts)


__all__ = ["Request", "add_overlap_commands", "bench_overlap", "greedy", "measure"]
