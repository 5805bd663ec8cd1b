"""Rows, tables and means of measured operator calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plait.cli.bench_ops_measure import Measured
from plait.cli.tune import RATIO_TITLE, geometric_mean

LOSS = 0.97


def row(measured: Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of a result file."""
    point, times = measured.point, measured.times
    found: dict[str, Any] = {
        "benchmark": "ops",
        "name": point.name,
        "case": point.case.name,
        "family": point.case.family,
        "layout": point.at.layout,
        "rows": point.at.rows,
        "row": point.at.row,
        "dtype": point.dtype,
    }
    for name in ("plait", "aten", "flaggems", "default"):
        if name in times:
            found[f"{name}_us"] = round(times[name].median_us, 3)
            found[f"{name}_spread"] = round(times[name].spread, 4)
    return {
        **found,
        "ratio": measured.ratio,
        "chosen": measured.chosen,
        "default_ratio": measured.default_ratio,
        "keys": list(measured.keys),
        "reason": measured.reason,
        "wrong": measured.wrong,
        "flaggems": measured.flaggems,
        **facts,
    }


def result_table(results: Sequence[Measured], title: str) -> Any:
    """A rich table with one line a call."""
    from rich.table import Table

    flaggems = any("flaggems" in each.times or each.flaggems for each in results)
    table = Table(title=title, title_justify="left")
    for name in ("call", "dtype", "shape"):
        table.add_column(name)
    for name in ("plait us", "ATen us", "ATen/plait", "by default"):
        table.add_column(name, justify="right")
    if flaggems:
        table.add_column("ATen/FlagGems", justify="right")
    table.add_column("note")
    for each in results:
        point = each.point
        cells = [_us(each.us("plait")), _us(each.us("aten")), _ratio(each.ratio)]
        default = _ratio(each.default_ratio)
        cells.append(f"{each.chosen} {default}" if default else "")
        if flaggems:
            cells.append(_ratio(each.over("flaggems")))
        note = f"WRONG: {each.wrong}" if each.wrong else each.reason or each.flaggems
        table.add_row(point.name, point.dtype, str(point.at), *cells, note)
    return table


def means(results: Sequence[Measured]) -> Any:
    """A rich table: geometric means and the worst, by family, dtype, size and for all."""
    from rich.table import Table

    table = Table(title=RATIO_TITLE.replace("torch", "ATen"), title_justify="left")
    table.add_column("of")
    for name in ("calls", "forced", "worst", "by default", "worst "):
        table.add_column(name, justify="right")
    table.add_column("worst call")
    table.add_column("ATen/FlagGems", justify="right")
    timed = [each for each in results if each.ratio is not None]
    for name, group in _groups(timed):
        ratios = [each.ratio or 0.0 for each in group]
        defaults = [each.default_ratio or 0.0 for each in group]
        others = [ratio for each in group if (ratio := each.over("flaggems"))]
        worst = min(group, key=lambda each: each.ratio or 0.0)
        table.add_row(
            name,
            str(len(group)),
            f"{geometric_mean(ratios):.3f}",
            f"{min(ratios):.3f}",
            f"{geometric_mean(defaults):.3f}",
            f"{min(defaults):.3f}",
            str(worst.point),
            f"{geometric_mean(others):.3f} of {len(others)}" if others else "",
        )
    return table


def _groups(timed: Sequence[Measured]) -> Iterable[tuple[str, list[Measured]]]:
    by: tuple[Callable[[Measured], str], ...] = (
        lambda each: each.point.case.family,
        lambda each: each.point.dtype,
        lambda each: f"2^{each.point.at.numel.bit_length() - 1}",
        lambda each: "all",
    )
    for name_of in by:
        groups: dict[str, list[Measured]] = {}
        for each in timed:
            groups.setdefault(name_of(each), []).append(each)
        yield from groups.items()


def losses(results: Sequence[Measured]) -> list[str]:
    """A line for each call where plait is slower than ATen, the worst first."""
    lost = [each for each in results if each.ratio is not None and each.ratio < LOSS]
    lost.sort(key=lambda each: each.ratio or 0.0)
    return [
        f"{each.ratio:.3f}  {each.us('plait'):9.2f} us, ATen {each.us('aten'):9.2f}  {each.point}"
        f"{'' if each.chosen == 'aten' else f'  and {each.chosen} by default'}"
        for each in lost
    ]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


__all__ = ["LOSS", "losses", "means", "result_table", "row"]
