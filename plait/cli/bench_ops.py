"""`plait bench ops`: operators of ATen by plait's kernels and by ATen's, checked, interleaved."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import MissingDependencyError

if TYPE_CHECKING:
    import typer

    from plait.cli.bench_ops_cases import Case
    from plait.cli.bench_ops_measure import Measured
    from plait.cli.bench_ops_points import Point
    from plait.runtime.lab import Lab

DEFAULT_SIZES = "10-26:4"
METHOD = (
    "GPU time of graph replays, cold L2, interleaved, median; random normal data; "
    "by default: ATen's own time where the table says so"
)
HOST_METHOD = "wall time of calls that only enqueue, in turns, best average of 200 calls"


def add_ops_command(app: typer.Typer) -> None:
    """Give the app the command."""
    import typer

    @app.command("ops")
    def ops(
        names: list[str] | None = typer.Argument(
            None, metavar="[NAMES]", help="Cases, families or patterns.", show_default=False
        ),
        dtype: str = typer.Option("bf16,fp16,fp32", help="With commas between."),
        sizes: str | None = typer.Option(
            None, help=f"Exponents: 10,16 or 10-26:2; {DEFAULT_SIZES} unless --shapes; '' for none."
        ),
        shapes: Path | None = typer.Option(None, help="A suite: JSON, as benchmarks/shapes/ops."),
        host: bool = typer.Option(False, help="Host time at 32 elements, too."),
        iters: int = typer.Option(9, min=1, help="Timed rounds."),
        flaggems: bool = typer.Option(True, help="Time FlagGems on the suite, if installed."),
        json_file: Path | None = typer.Option(
            None, "--json", metavar="FILE", help="Append one JSON object a line."
        ),
        plot: Path | None = typer.Option(None, metavar="FILE", help="Draw ratios over sizes."),
    ) -> None:
        """Time ATen's operators served by plait and by ATen on this GPU.

        All kernels are compiled first, in parallel. Results are checked against fp64; a wrong one
        is not timed, and the exit code is 1. "By default" is what plait.enable() without names
        would take, by this GPU's table.
        """
        request = Request(tuple(names or ()), dtype, sizes, shapes, host, flaggems)
        bench_ops(request, rounds=iters, json_file=json_file, plot=plot)


@dataclass(frozen=True)
class Request:
    """What to measure, as on the command line."""

    names: tuple[str, ...] = ()
    dtype: str = "bf16,fp16,fp32"
    sizes: str | None = None
    shapes: Path | None = None
    host: bool = False
    flaggems: bool = True

    def cases(self) -> list[Case]:
        """The operators asked for."""
        from plait.cli.bench_ops_cases import find_cases

        return find_cases(self.names)

    def points(self) -> tuple[list[Point], list[Point]]:
        """The calls asked for: those of the suite, and those of the sweep over sizes."""
        from plait.cli.bench_ops_points import read_dtypes, read_sizes, read_suite, sweep

        cases, dtypes = self.cases(), read_dtypes(self.dtype)
        suite = [] if self.shapes is None else read_suite(self.shapes, cases, dtypes)
        sizes = self.sizes
        if sizes is None:
            sizes = DEFAULT_SIZES if self.shapes is None else ""
        return suite, sweep(cases, dtypes, read_sizes(sizes))


def bench_ops(
    request: Request, *, rounds: int = 9, json_file: Path | None = None, plot: Path | None = None
) -> None:
    """Measure, print and write; exits with 1 if a result is wrong."""
    suite, points = request.points()
    if plot is not None:
        from plait.cli.bench_plot import check_plots

        check_plots()
    from plait.cli import bench_ops_report as report
    from plait.cli.bench_ops_compile import compile_points
    from plait.runtime.lab import gpu_clocks, gpu_lab

    lab = gpu_lab()
    out = Output(json_file)
    compiled = compile_points([*suite, *points], lab, out.progress)
    facts = facts_of(lab, rounds, METHOD)
    out.print(str(compiled))
    results = _measure_all(request, suite, points, lab, rounds, facts, out)
    clocks = gpu_clocks(lab.device)
    title = title_of(lab, "operators of ATen")
    if results:
        out.print(report.result_table(results, title))
        out.print(report.means(results))
    for line in report.losses(results):
        out.print(f"slower: {line}")
    out.print(f"clocks under load: {clocks or 'unknown'}")
    if plot is not None:
        from plait.cli.bench_ops_plot import write_ratios

        write_ratios(plot, results, title)
    if request.host:
        _measure_host(request, lab, out)
    wrong = [f"{each.point}: {each.wrong}" for each in results if each.wrong]
    for line in wrong:
        out.print(f"WRONG: {line}")
    if wrong:
        raise SystemExit(1)


def _measure_all(
    request: Request,
    suite: Sequence[Point],
    points: Sequence[Point],
    lab: Lab,
    rounds: int,
    facts: Mapping[str, Any],
    out: Output,
) -> list[Measured]:
    """Each point in turn; its line is in the file before the next one starts."""
    from plait.cli import bench_ops_flaggems as flaggems
    from plait.cli.bench_ops_measure import measure
    from plait.cli.bench_ops_report import row

    others = request.flaggems and flaggems.is_installed()
    facts = {**facts, "flaggems_version": flaggems.version()} if others else dict(facts)
    advance = out.progress("measuring", len(suite) + len(points))
    results = []
    for index, point in enumerate([*suite, *points]):
        contestant = flaggems.contestant if others and index < len(suite) else None
        measured = measure(point, lab, rounds, contestant)
        results.append(measured)
        out.write(row(measured, facts))
        advance()
    return results


def _measure_host(request: Request, lab: Lab, out: Output) -> None:
    from plait.cli import bench_ops_host as host
    from plait.cli.bench_ops_measure import raised

    facts = facts_of(lab, host.TURNS, HOST_METHOD)
    points = host.host_points(request.cases(), "bfloat16")
    advance = out.progress("host time", len(points))
    results = []
    for point in points:
        try:
            times = host.measure_host(point, lab.device)
        except Exception as error:  # of whatever kind: the others are to be measured all the same
            out.print(f"no host time of {point}: {raised(error)}")
            continue
        results.append(times)
        out.write(host.host_row(times, facts))
        advance()
    out.print(host.host_table(results))


# --- what benchmarks of operators share
class Output:
    """The console, and a file of JSON lines."""

    def __init__(self, json_file: Path | None = None) -> None:
        try:
            from rich.console import Console
        except ImportError:
            raise MissingDependencyError(
                "rich", "plait bench", 'pip install "plait[cli]"'
            ) from None
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=200)  # a log has no width of its own
        self._file = json_file

    def print(self, what: Any) -> None:
        """Print a text as it is, or a table."""
        self._console.print(what, markup=False, highlight=False)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line to the file, if there is one."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def progress(self, text: str, total: int) -> Callable[[], object]:
        """What is called after each of `total` steps; tells tenths."""
        done = [0]

        def advance() -> None:
            done[0] += 1
            if done[0] * 10 // total > (done[0] - 1) * 10 // total:
                self.print(f"{text}: {done[0]} of {total}")

        return advance


def facts_of(lab: Lab, rounds: int, method: str) -> dict[str, Any]:
    """What each line of a result file says of how it was measured."""
    from plait.runtime.lab import gpu_clocks, versions

    return {
        "gpu": lab.info.name,
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["plait", *sys.argv[1:]]),
        "rounds": rounds,
        "method": method,
        "clocks": gpu_clocks(lab.device),
    }


def title_of(lab: Lab, what: str) -> str:
    """Of a table or plot: what, GPU, date and versions."""
    from plait.runtime.lab import versions

    texts = ", ".join(f"{name} {text}" for name, text in versions().items())
    today = datetime.now(timezone.utc).date().isoformat()
    return f"{what}, {lab.info.name}, {today}, {texts}"


__all__ = ["Output", "Request", "add_ops_command", "bench_ops", "facts_of", "title_of"]
