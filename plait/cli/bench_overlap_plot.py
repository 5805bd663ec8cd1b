"""Bars of an overlapped operator's times over the bound, one group a shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.bench_overlap_report import Result

_BARS = (
    ("communication", "communication alone", "tab:gray"),
    ("unfused", "unfused", "tab:orange"),
    ("fused", "overlapped", "tab:blue"),
)
_WIDTH = 0.8


def write_bars(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw times over max(best GEMM, communication) into a PNG, PDF or SVG file.

    The best GEMM has a bar as well; a mark shows where the model's greedy schedule would end. Wrong
    results are left out.
    """
    from matplotlib.figure import Figure

    shown = [each for each in results if not each.wrong]
    figure = Figure(figsize=(max(6.0, 1.1 * len(shown)), 5), layout="constrained")
    axes = figure.subplots()
    bounds = [max(each.gemm_us, each.us("communication")) for each in shown]
    series = [("best plain GEMM", "tab:green", [each.gemm_us for each in shown])]
    series += [(label, color, [each.us(name) for each in shown]) for name, label, color in _BARS]
    width = _WIDTH / len(series)
    for index, (label, color, times) in enumerate(series):
        places = [place - _WIDTH / 2 + (index + 0.5) * width for place in range(len(shown))]
        heights = [time / bound for time, bound in zip(times, bounds, strict=True)]
        axes.bar(places, heights, width, label=label, color=color)
    place = _WIDTH / 2 - width / 2
    greedy = [
        (index + place, each.prediction.bound_ratio)
        for index, each in enumerate(shown)
        if each.prediction is not None
    ]
    axes.scatter(*zip(*greedy, strict=True), marker="_", s=120, color="black", zorder=3,
                 label="greedy schedule (model)") if greedy else None  # fmt: skip
    axes.axhline(1.0, color="0.3", linewidth=1)
    axes.set_xticks(range(len(shown)), [each.problem.shape_text for each in shown], rotation=45,
                    ha="right")  # fmt: skip
    axes.set_ylabel("time over max(GEMM, communication)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["write_bars"]
