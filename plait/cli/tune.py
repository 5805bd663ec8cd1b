"""`plait tune gemm`: measures configs on this GPU and writes the table that products look in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import MissingDependencyError

if TYPE_CHECKING:
    import typer

    from plait.ops.matmul.problem import Problem
    from plait.ops.matmul.tune import Clock, Task, Tuned
    from plait.runtime.lab import Lab

RATIO_TITLE = "torch's time over plait's (above 1: plait is faster)"


def add_commands(app: typer.Typer) -> None:
    """Give the app the commands of `plait tune`."""
    import typer

    from plait.cli.tune_ops import add_ops_command
    from plait.cli.tune_overlap import add_overlap_command

    add_overlap_command(app)
    add_ops_command(app)

    @app.command("gemm")
    def gemm(
        shapes: Path = typer.Option(..., help="One `M N K`, or `B M N K`, a line; JSON, YAML."),
        dtype: str = typer.Option("bf16", help="bf16, fp16, fp32 or fp8."),
        scales: str = typer.Option("tensor", help="For fp8: tensor or rows."),
        layout: str = typer.Option("nk", help="How the weight lies in memory: nk or kn."),
        fast_accum: bool = typer.Option(False, help="For fp8: sum in the short accumulator."),
        batch: int = typer.Option(0, min=0, help="So many products at once, as in torch.bmm."),
        rounds: int = typer.Option(7, min=1, help="Rounds of the best few candidates."),
        out: Path | None = typer.Option(None, help="The table; by default the user's own."),
        limit_s: float | None = typer.Option(None, help="Stop in time, keeping what is done."),
    ) -> None:
        """Find the fastest config of each shape on this GPU and keep it for `plait.matmul`.

        Compiles all candidates in parallel, checks each result against torch, times them
        interleaved with torch's call, and writes the table after every shape.
        """
        request = Request(shapes, dtype, scales, layout, fast_accum, batch)
        tune_gemm(request, rounds=rounds, out=out, limit=limit_s)


@dataclass(frozen=True)
class Request:
    """Which products to tune, as on the command line."""

    shapes: Path
    dtype: str = "bf16"
    scales: str = "tensor"
    layout: str = "nk"
    fast_accum: bool = False
    batch: int = 0

    def problems(self) -> list[Problem]:
        """The products asked for; ArgumentError if something does not fit."""
        from plait.checks import check_one_of
        from plait.cli.shapes import read_batched_shapes, with_batch
        from plait.ops.matmul.operands import FP8_DTYPES
        from plait.ops.matmul.problem import Problem, parse_dtype

        check_one_of("layout", self.layout, ("nk", "kn"))
        check_one_of("scales", self.scales, ("tensor", "rows"))
        dtype = parse_dtype(self.dtype)
        options: dict[str, Any] = {"layout": self.layout, "fast_accum": self.fast_accum}
        options["scales"] = self.scales if dtype in FP8_DTYPES else "none"
        return [
            Problem(M, N, K, dtype, batch=batch, **options)
            for batch, M, N, K in with_batch(read_batched_shapes(self.shapes), self.batch)
        ]


def tune_gemm(
    request: Request, *, rounds: int = 7, out: Path | None = None, limit: float | None = None
) -> None:
    """Tune all shapes of the request; exits with 1 if not a single entry was found."""
    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("rich", "plait tune", 'pip install "plait[cli]"') from None
    from plait.ops.matmul.tune import Clock, make_task
    from plait.runtime.lab import gpu_lab
    from plait.runtime.tuning_store import user_table_path

    problems = request.problems()
    clock = Clock(limit)
    lab = gpu_lab()
    path = out or user_table_path(lab.info.name)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no width of its own
    tasks = [make_task(problem, lab.info) for problem in problems]
    found = _run(tasks, lab, clock, rounds, path, console)
    console.print(summary(found))
    for line in _complaints(found):
        console.print(line, markup=False, highlight=False)
    done = [each for each in found if each.entry is not None]
    console.print(f"{len(done)} of {len(tasks)} shapes tuned for {lab.info.name}: {path}")
    if not done:
        raise SystemExit(1)


def _run(
    tasks: Sequence[Task], lab: Lab, clock: Clock, rounds: int, path: Path, console: Any
) -> list[Tuned]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from plait.ops.matmul import tune
    from plait.runtime.tuning_store import read_table, write_table

    table = read_table(path)
    found: list[Tuned] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("compiling", total=len(tune.distinct_jobs(tasks)))
        compiled = tune.compile_tasks(tasks, lab.info.arch, clock, lambda: progress.advance(bar))
        bar = progress.add_task("measuring", total=len(tasks))
        for each in tune.tune_all(tasks, lab, compiled, clock, rounds=rounds):
            found.append(each)
            if each.entry is not None:
                table.add(each.entry)
                write_table(path, table, lab.info.name)
            progress.advance(bar)
            progress.console.print(_line(each), markup=False, highlight=False)
    return found


def _line(tuned: Tuned) -> str:
    from plait.ops.matmul.tuned import config_text

    entry = tuned.entry
    if entry is None or tuned.config is None:
        return f"{tuned.problem.shape_text:>18}: nothing to record, see below"
    default = "" if tuned.default_us is None else f"default {tuned.default_us:9.1f} us, "
    return (
        f"{tuned.problem.shape_text:>18}: torch {entry.baseline_us:9.1f} us, "
        f"plait {entry.time_us:9.1f} us, {entry.baseline_us / entry.time_us:5.3f} of torch, "
        f"{default}{config_text(tuned.config)} "
        f"({tuned.num_timed} timed, {len(tuned.rejected)} rejected, {tuned.wall_s:.1f} s)"
    )


def summary(found: Sequence[Tuned]) -> Any:
    """A rich table: for each M, speed relative to torch before and after tuning."""
    from rich.table import Table

    table = Table(title=RATIO_TITLE, title_justify="left")
    for name in ("M", "shapes", "geometric mean", "worst", "before tuning"):
        table.add_column(name, justify="right")
    rows: dict[str, list[Tuned]] = {}
    for each in found:
        if each.entry is not None:
            rows.setdefault(str(each.problem.M), []).append(each)
    everything = [each for group in rows.values() for each in group]
    if len(rows) > 1:
        rows["all"] = everything
    for name, group in rows.items():
        entries = [each.entry for each in group if each.entry is not None]
        after = [entry.baseline_us / entry.time_us for entry in entries]
        before = [
            each.entry.baseline_us / each.default_us
            for each in group
            if each.entry is not None and each.default_us
        ]
        table.add_row(
            name,
            str(len(group)),
            f"{geometric_mean(after):.3f}",
            f"{min(after):.3f}",
            f"{geometric_mean(before):.3f}" if before else "",
        )
    return table


def geometric_mean(values: Sequence[float]) -> float:
    """Of numbers above 0; NaN for none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _complaints(found: Sequence[Tuned]) -> list[str]:
    """Each reason for a rejection once, with how often and one example."""
    reasons: dict[str, list[str]] = {}
    for each in found:
        for text in each.rejected:
            config, _, reason = text.partition(": ")
            kind = reason.split(", error")[0]
            reasons.setdefault(kind, []).append(f"{each.problem.shape_text}, {config}: {reason}")
    return [
        f"rejected {len(examples)} times: {kind}; first {examples[0]}"
        for kind, examples in reasons.items()
    ]


__all__ = ["RATIO_TITLE", "Request", "add_commands", "geometric_mean", "summary", "tune_gemm"]
