"""A roofline plot: rate over intensity, with the measured limits of the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.bench_gemm import Measured, Roofs
from plait.errors import MissingDependencyError


def check_plots() -> None:
    """Raise MissingDependencyError without matplotlib; before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingDependencyError("matplotlib", "--plot", "pip install matplotlib") from None


def write_roofline(path: Path, results: Sequence[Measured], roofs: Roofs, title: str) -> None:
    """Draw plait's and torch's rates below the roofs into a PNG, PDF or SVG file."""
    from matplotlib.figure import Figure

    points = [
        (each.problem.flops / each.problem.bytes_moved, each.tflops, each.baseline_tflops)
        for each in results
        if each.tflops and each.baseline_tflops
    ]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    ridge = roofs.tflops / roofs.tb_per_s
    intensities = [point[0] for point in points]
    left = min([ridge / 8, *intensities]) / 1.5
    right = max([ridge * 8, *intensities]) * 1.5
    axes.plot(
        [left, ridge, right],
        [left * roofs.tb_per_s, roofs.tflops, roofs.tflops],
        color="0.3",
        label=f"copy {roofs.tb_per_s:.2f} TB/s; {roofs.call} {roofs.tflops:.0f} TFLOP/s",
    )
    axes.scatter(
        intensities,
        [point[2] for point in points],
        s=42,
        facecolors="none",
        edgecolors="tab:orange",
        label=results[0].problem.baseline if results else "torch",
    )
    axes.scatter(intensities, [point[1] for point in points], s=14, color="tab:blue", label="plait")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("intensity, FLOP per byte of operands and result")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


__all__ = ["check_plots", "write_roofline"]
