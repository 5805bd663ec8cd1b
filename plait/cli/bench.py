"""`plait bench gemm`: plait's matrix product against torch's, checked, interleaved, cold L2."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    import typer

    from plait.cli.bench_gemm import Measured, Roofs
    from plait.ops.matmul.problem import Problem
    from plait.runtime.lab import Lab

_ROOF_ROUNDS = 10


def add_commands(app: typer.Typer) -> None:
    """Give the app the commands of `plait bench`."""
    import typer

    from plait.cli.bench_models import add_models_command
    from plait.cli.bench_ops import add_ops_command
    from plait.cli.bench_overlap import add_overlap_commands

    @app.command("gemm")
    def gemm(
        sizes: list[int] | None = typer.Argument(None, metavar="[M N K]", show_default=False),
        shapes: Path | None = typer.Option(
            None, help="Many: one `M N K`, or `B M N K`, a line; JSON, YAML."
        ),
        dtype: str = typer.Option(
            "bfloat16", help="float16, bfloat16, float32 or float8_e4m3; also bf16 and so on."
        ),
        scales: str = typer.Option("tensor", help="For fp8: tensor or rows."),
        fast_accum: bool = typer.Option(False, help="For fp8, on both sides."),
        batch: int = typer.Option(0, min=0, help="Compare this many products with torch.bmm."),
        layout: str = typer.Option("nk", help="How the weight lies in memory: nk or kn."),
        tf32: bool = typer.Option(False, help="For float32: let both sides round to tf32."),
        impl: str = typer.Option("tuned", help="tuned (by table) or default (computed)."),
        host: bool = typer.Option(False, help="Host time of a planned call, too."),
        iters: int = typer.Option(20, min=1, help="Timed rounds."),
        json_file: Path | None = typer.Option(
            None, "--json", metavar="FILE", help="Append one JSON object a line."
        ),
        plot: Path | None = typer.Option(None, metavar="FILE", help="Draw a roofline plot."),
    ) -> None:
        """Time x [M, K] @ weight [N, K]^T by plait and by torch on this GPU.

        Results are checked first; a wrong one is not timed, and the exit code is 1. Times are
        medians of GPU time with cold L2 cache.
        """
        if (shapes is None) == (not sizes) or (sizes and len(sizes) != 3):
            raise typer.BadParameter("give M N K, or --shapes FILE")
        request = Request(
            tuple(sizes or ()), shapes, dtype, scales, fast_accum, batch, layout, tf32, impl, host
        )
        bench_gemm(request, rounds=iters, json_file=json_file, plot=plot)

    add_overlap_commands(app)
    add_ops_command(app)
    add_models_command(app)


@dataclass(frozen=True)
class Request:
    """What to measure, as on the command line."""

    sizes: tuple[int, ...] = ()
    shapes: Path | None = None
    dtype: str = "bfloat16"
    scales: str = "tensor"
    fast_accum: bool = False
    batch: int = 0
    layout: str = "nk"
    tf32: bool = False
    impl: str = "tuned"
    host: bool = False

    def problems(self) -> list[Problem]:
        """The products asked for; ArgumentError if something does not fit."""
        from plait.checks import check_one_of
        from plait.cli.shapes import read_batched_shapes, with_batch
        from plait.ops.matmul.operands import FP8_DTYPES
        from plait.ops.matmul.problem import Problem, parse_dtype

        check_one_of("impl", self.impl, ("tuned", "default"))
        check_one_of("layout", self.layout, ("nk", "kn"))
        check_one_of("scales", self.scales, ("tensor", "rows"))
        if self.host and self.impl != "tuned":
            remedy = "Leave out --host: a planned call takes the config of the table."
            raise ArgumentError("impl", "'tuned' with --host", repr(self.impl), remedy)
        dtype = parse_dtype(self.dtype)
        if self.tf32 and dtype.itemsize != 4:
            raise ArgumentError("tf32", "float32 operands", dtype, "Leave out --tf32.")
        scales = self.scales if dtype in FP8_DTYPES else "none"
        options: dict[str, Any] = {"layout": self.layout, "scales": scales}
        options["fast_accum"] = self.fast_accum
        shapes = [(0, *self.sizes)] if self.shapes is None else read_batched_shapes(self.shapes)
        return [
            Problem(M, N, K, dtype, batch=batch, **options)
            for batch, M, N, K in with_batch(shapes, self.batch)
        ]


def bench_gemm(
    request: Request, *, rounds: int = 20, json_file: Path | None = None, plot: Path | None = None
) -> None:
    """Measure, print and write; exits with 1 if a result is wrong."""
    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("rich", "plait bench", 'pip install "plait[cli]"') from None
    from plait.cli import bench_gemm as gemm
    from plait.cli.bench_plot import check_plots, write_roofline
    from plait.runtime.lab import gpu_clocks, gpu_lab

    problems = request.problems()
    if plot is not None:
        check_plots()
    lab = gpu_lab()
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no width of its own
    with _tf32(request.tf32):
        roofs = gemm.measure_roofs(lab, problems[0], min(rounds, _ROOF_ROUNDS))
        facts = _facts(lab, rounds, roofs, gpu_clocks(lab.device))
        results = _measure_all(request, problems, lab, rounds, roofs, facts, json_file, console)
        dtype = str(problems[0].dtype).removeprefix("torch.")
        versions = ", ".join(f"{name} {text}" for name, text in facts["versions"].items())
        title = (
            f"{lab.info.name}, {dtype}, {problems[0].baseline}, {facts['date'][:10]}, {versions}"
        )
        console.print(gemm.result_table(results, roofs, title))
        console.print(gemm.means(results))
        console.print(
            f"roofs: {roofs.call} {roofs.tflops:.0f} TFLOP/s, copy {roofs.tb_per_s:.2f} TB/s; "
            f"clocks under load: {facts['clocks'] or 'unknown'}"
        )
        if plot is not None:
            write_roofline(plot, results, roofs, title)
    wrong = [each.problem.shape_text for each in results if each.plait_us is None]
    if wrong:
        console.print(f"FAILED: wrong results: {'; '.join(wrong)}")
        raise SystemExit(1)


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if wanted else before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _facts(lab: Lab, rounds: int, roofs: Roofs, clocks: str) -> dict[str, Any]:
    from plait.runtime.lab import versions

    return {
        "gpu": lab.info.name,
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["plait", *sys.argv[1:]]),
        "rounds": rounds,
        "method": "GPU time of graph replays, cold L2, interleaved, median; random normal data",
        "roofs": {"tflops": roofs.tflops, "tb_per_s": roofs.tb_per_s, "call": roofs.call},
        "clocks": clocks,
    }


def _measure_all(
    request: Request,
    problems: Sequence[Problem],
    lab: Lab,
    rounds: int,
    roofs: Roofs,
    facts: dict[str, Any],
    json_file: Path | None,
    console: Any,
) -> list[Measured]:
    """Each problem in turn; its line is in the file before the next one starts."""
    from rich.progress import track

    from plait.cli import bench_gemm as gemm

    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for problem in track(problems, "measuring", console=console, disable=not console.is_terminal):
        impl: Any = request.impl
        measured = gemm.measure(problem, lab, impl=impl, rounds=rounds, with_host=request.host)
        results.append(measured)
        if json_file is not None:
            line = json.dumps({**gemm.row(measured, roofs, facts), "impl": request.impl})
            with json_file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return results


__all__ = ["Request", "add_commands", "bench_gemm"]
