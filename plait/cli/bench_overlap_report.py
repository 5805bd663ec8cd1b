"""Results of `plait bench ag_gemm|gemm_rs|gemm_ar`: one line, table and summary.

Columns are defined in docs/design/model.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.model import metrics
from plait.model.predict import Prediction
from plait.model.problem import Problem
from plait.runtime.timing import Timing

GEMMS = ("torch_gemm", "plait_gemm")
TIMES = (*GEMMS, "communication", "unfused", "plait_unfused", "fused", "auto")


@dataclass(frozen=True)
class Result:
    """One problem: medians in microseconds by contestant, or what was `wrong` (nothing timed)."""

    problem: Problem
    dtype: str
    link: str
    wrong: str = ""
    times: Mapping[str, Timing] = field(default_factory=dict)
    prediction: Prediction | None = None
    config: Mapping[str, int] = field(default_factory=dict)
    auto_impl: str = ""
    sms_held: int = 0
    backward: bool = False

    def us(self, name: str) -> float:
        """Median of a contestant."""
        return self.times[name].median_us

    @property
    def gemm(self) -> str:
        """Which plain product is the best one."""
        return min(GEMMS, key=self.us)

    @property
    def gemm_us(self) -> float:
        """The best plain product."""
        return self.us(self.gemm)

    def metrics(self, name: str = "fused") -> dict[str, float]:
        """ECT, efficiency, hidden share, bound ratio and speedup of "fused" or "auto"."""
        time, gemm, comm = self.us(name), self.gemm_us, self.us("communication")
        return {
            "ect_us": metrics.ect(time, gemm),
            "overlap_efficiency": metrics.overlap_efficiency(time, gemm, comm),
            "hidden_share": metrics.hidden_share(time, gemm, comm),
            "bound_ratio": metrics.bound_ratio(time, gemm, comm),
            "speedup": metrics.speedup(self.us("unfused"), time),
        }


def row(result: Result, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line of a result file; None where nothing was measured or a metric means nothing."""
    problem = result.problem
    line: dict[str, Any] = {
        "benchmark": problem.operator,
        "pass": "backward" if result.backward else "forward",
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "tp": problem.world_size,
        "local_shape": list(problem.local_shape),
        "dtype": result.dtype,
        "link": result.link,
        "wrong": result.wrong or None,
    }
    for name in TIMES:
        timing = result.times.get(name)
        line[f"{name}_us"] = None if timing is None else timing.median_us
        line[f"{name}_spread"] = None if timing is None else timing.spread
    if not result.wrong:
        line["gemm"] = result.gemm
        line |= {key: _number(value) for key, value in result.metrics().items()}
        if "auto" in result.times:
            line["auto_impl"] = result.auto_impl
            line["auto_speedup"] = _number(result.metrics("auto")["speedup"])
    if result.prediction is not None:
        line["greedy"] = {
            "overlapped_us": result.prediction.overlapped_us,
            "bound_ratio": _number(result.prediction.bound_ratio),
            "overlap_efficiency": _number(result.prediction.efficiency),
            "plan": str(result.prediction.plan),
        }
    line["config"] = dict(result.config)
    line["sms_held_by_pacer"] = result.sms_held
    return {**line, **facts}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def result_table(results: Sequence[Result], title: str) -> Any:
    """A rich table with one line a problem."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("M N K")
    for name in ("gemm us", "comm us", "unfused us", "fused us", "auto us", "ECT us", "efficiency",
                 "hidden", "of bound", "greedy", "speedup", "spread"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("config")
    for each in results:
        if each.wrong:
            table.add_row(each.problem.shape_text, "WRONG", *[""] * 11, each.wrong)
            continue
        found = each.metrics()
        greedy = "" if each.prediction is None else f"{each.prediction.bound_ratio:.3f}"
        table.add_row(
            each.problem.shape_text,
            *(f"{time:.1f}" for time in (each.gemm_us, each.us("communication"))),
            *(f"{each.us(name):.1f}" for name in ("unfused", "fused", "auto")),
            f"{found['ect_us']:.1f}",
            *(f"{found[name]:.0%}" for name in ("overlap_efficiency", "hidden_share")),
            f"{found['bound_ratio']:.3f}",
            greedy,
            f"{found['speedup']:.3f}",
            f"{each.times['fused'].spread:.1%}",
            config_text(each.config),
        )
    return table


def config_text(config: Mapping[str, int]) -> str:
    """Such as `128x256x64 w8 s3 b131 c4`: tile, warps, stages, blocks, chunks of a shard."""
    if not config:
        return ""
    tile = "x".join(str(config.get(f"block_{name}", "?")) for name in "mnk")
    letters = {"num_warps": "w", "num_stages": "s", "blocks": "b", "num_chunks": "c"}
    parts = [f"{letter}{config[name]}" for name, letter in letters.items() if name in config]
    if config.get("slices", 1) > 1:
        parts.append(f"{config['slices']} slices")
    return " ".join([tile, *parts])


def summary(results: Sequence[Result]) -> Any:
    """A rich table: geometric means and the worst shape, for each M and for all."""
    from rich.table import Table

    table = Table(
        title="geometric means; worst by bound ratio and by speedup", title_justify="left"
    )
    for name in ("M", "shapes", "of bound", "worst", "worst shape", "speedup", "least",
                 "least shape", "auto speedup", "least auto"):  # fmt: skip
        table.add_column(name, justify="left" if "shape" in name[5:] else "right")
    groups: dict[str, list[Result]] = {}
    for each in results:
        if not each.wrong:
            groups.setdefault(str(each.problem.M), []).append(each)
    groups["all"] = [each for group in groups.values() for each in group]
    for name, group in groups.items():
        if group:
            table.add_row(name, str(len(group)), *_summary_cells(group))
    return table


def _summary_cells(group: Sequence[Result]) -> list[str]:
    ratios = [(each.metrics()["bound_ratio"], each.problem.shape_text) for each in group]
    speedups = [(each.metrics()["speedup"], each.problem.shape_text) for each in group]
    autos = [each.metrics("auto")["speedup"] for each in group]
    worst, least = max(ratios), min(speedups)
    return [
        f"{metrics.geometric_mean(ratio for ratio, _ in ratios):.3f}",
        f"{worst[0]:.3f}",
        worst[1],
        f"{metrics.geometric_mean(ratio for ratio, _ in speedups):.3f}",
        f"{least[0]:.3f}",
        least[1],
        f"{metrics.geometric_mean(autos):.3f}",
        f"{min(autos):.3f}",
    ]


__all__ = ["GEMMS", "TIMES", "Result", "config_text", "result_table", "row", "summary"]
