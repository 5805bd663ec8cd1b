"""`plait tune ops`: measures where plait's operators are faster than ATen's, for default mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from plait.cli.bench_ops import Output
    from plait.cli.bench_ops_points import Point
    from plait.ops.aten.wins import WinTable
    from plait.runtime.lab import Lab

_SIZES = "10-26:4"
_DTYPES = "bf16,fp32"


def add_ops_command(app: typer.Typer) -> None:
    """Give the app the command."""
    import typer

    @app.command("ops")
    def ops(
        names: list[str] | None = typer.Argument(
            None, metavar="[NAMES]", help="Cases or patterns.", show_default=False
        ),
        family: list[str] | None = typer.Option(None, help="Also these: reduction, scan, ..."),
        dtype: str = typer.Option(_DTYPES, help="With commas; fp16 follows bf16 unless measured."),
        sizes: str = typer.Option(_SIZES, help="Exponents of two: 10,16 or 10-26:2."),
        iters: int = typer.Option(5, min=1, help="Timed rounds."),
        out: Path | None = typer.Option(None, help="The table; by default the user's own."),
    ) -> None:
        """Find the calls that plait serves faster than ATen, for plait.enable() without names.

        Compiles all kernels in parallel, checks each result, times both sides interleaved, and
        writes the table after each operator. What the table held of other operators stays.
        """
        request = Request((*(names or ()), *(family or ())), dtype, sizes)
        tune_ops(request, rounds=iters, out=out)


@dataclass(frozen=True)
class Request:
    """What to measure, as on the command line."""

    names: tuple[str, ...] = ()
    dtype: str = _DTYPES
    sizes: str = _SIZES

    def points(self) -> list[Point]:
        """The calls of the grid, operator by operator."""
        from plait.cli.bench_ops_cases import find_cases
        from plait.cli.bench_ops_points import grid, read_dtypes, read_sizes

        return grid(find_cases(self.names), read_dtypes(self.dtype), read_sizes(self.sizes))


def tune_ops(request: Request, *, rounds: int = 5, out: Path | None = None) -> None:
    """Measure and write; exits with 1 if a result is wrong, or if nothing was measured."""
    from plait.cli.bench_ops import METHOD, Output, facts_of
    from plait.cli.bench_ops_compile import compile_points
    from plait.ops.aten import wins
    from plait.runtime.lab import gpu_lab

    points = request.points()
    lab = gpu_lab()
    path = out or wins.user_wins_path(lab.info.name)
    output = Output()
    known = wins.read_wins(path)
    output.print(str(compile_points(points, lab, output.progress)))
    measured = facts_of(lab, rounds, METHOD)
    found = wins.WinTable(measured=measured)
    wrong = _measure_all(points, lab, rounds, output, known, found, path)
    for line in _summary(found):
        output.print(line)
    count = sum(len(rule.ratios) for rule in found.rules)
    output.print(f"{count} of {len(points)} calls for {lab.info.name}: {path}")
    for line in wrong:
        output.print(f"WRONG: {line}")
    if wrong or not count:
        raise SystemExit(1)


def _measure_all(
    points: Sequence[Point],
    lab: Lab,
    rounds: int,
    output: Output,
    known: WinTable,
    found: WinTable,
    path: Path,
) -> list[str]:
    """Fill `found`; what is wrong, and why calls have no rule, is printed once a reason."""
    from plait.cli.bench_ops_measure import measure
    from plait.ops.aten import wins

    wrong: list[str] = []
    reasons: dict[str, list[str]] = {}
    advance = output.progress("measuring", len(points))
    for index, point in enumerate(points):
        each = measure(point, lab, rounds)
        if each.wrong:
            wrong.append(f"{point}: {each.wrong}")
        elif each.asked is not None and each.ratio is not None:
            # What may be noise is no win: a table that takes a slower call does harm.
            spread = max(each.times[name].spread for name in ("plait", "aten"))
            ratio = round(each.ratio * (1 - spread), 3)
            found.add(each.asked.operator, each.asked.call, ratio)
        else:
            reason = each.reason or "several kernels of plait"
            reasons.setdefault(f"{point.case.name}: {reason}", []).append(str(point))
        following = points[index + 1].case if index + 1 < len(points) else None
        if following is not point.case and found.rules:
            wins.write_wins(path, known.merged(found), lab.info.name)
        advance()
    for reason, examples in reasons.items():
        output.print(f"no rule for {len(examples)} calls of {reason}; first {examples[0]}")
    return wrong


def _summary(found: WinTable) -> list[str]:
    """For each operator and dtype: how many calls win, and the geometric mean of all."""
    from plait.cli.tune import geometric_mean

    groups: dict[tuple[str, str], list[float]] = {}
    for rule in found.rules:
        groups.setdefault((rule.operator, rule.dtype), []).extend(rule.ratios.values())
    lines = [
        "operator                     dtype      calls  faster  ATen/plait: mean  worst   best"
    ]
    for (operator, dtype), ratios in groups.items():
        faster = sum(ratio > 1 for ratio in ratios)
        lines.append(
            f"{operator:<28} {dtype:<10} {len(ratios):>5}  {faster:>6}  "
            f"{geometric_mean(ratios):>16.3f}  {min(ratios):.3f}  {max(ratios):.3f}"
        )
    return lines


__all__ = ["Request", "add_ops_command", "tune_ops"]
