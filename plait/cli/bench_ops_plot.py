"""ATen's time over plait's against the size, one line an operator, one panel a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.bench_ops_measure import Measured
from plait.cli.tune import geometric_mean

_COLORS = {"reduction": "tab:blue", "scan": "tab:green", "softmax": "tab:orange", "norm": "tab:red"}


def write_ratios(path: Path, results: Sequence[Measured], title: str) -> None:
    """Draw forced ratios into a PNG, PDF or SVG file; thick lines are means of families."""
    from matplotlib.figure import Figure

    timed = [each for each in results if each.ratio is not None]
    dtypes = list(dict.fromkeys(each.point.dtype for each in timed)) or ["no result"]
    figure = Figure(figsize=(5.5 * len(dtypes), 5), layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        here = [each for each in timed if each.point.dtype == dtype]
        for name in dict.fromkeys(each.point.name for each in here):
            line = [each for each in here if each.point.name == name]
            color = _COLORS[line[0].point.case.family]
            pairs = sorted((each.point.at.numel, each.ratio) for each in line)
            marker = "." if len(pairs) > 1 else "x"
            axes.plot(*zip(*pairs, strict=True), color=color, alpha=0.35, lw=0.8, marker=marker)
        for family, color in _COLORS.items():
            ratios: dict[int, list[float]] = {}
            for each in here:
                if each.point.case.family == family:
                    ratios.setdefault(each.point.at.numel, []).append(each.ratio or 0.0)
            means = sorted((size, geometric_mean(group)) for size, group in ratios.items())
            if means:
                axes.plot(*zip(*means, strict=True), color=color, lw=2.5, label=family)
        axes.axhline(1.0, color="0.3", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("elements")
        axes.set_title(dtype, fontsize=10)
        axes.grid(True, which="both", alpha=0.2)
    panels[0].set_ylabel("ATen's GPU time over plait's")
    panels[-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["write_ratios"]
