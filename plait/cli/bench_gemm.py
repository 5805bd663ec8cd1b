"""What `plait bench gemm` measures: plait against torch's call, and the device's roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import plait
from plait.cli.tune import RATIO_TITLE, geometric_mean
from plait.ops.matmul.configs import Config
from plait.ops.matmul.fused import chosen_config
from plait.ops.matmul.problem import Operands, Problem, make_operands
from plait.ops.matmul.tuned import config_dict, config_text
from plait.runtime.lab import Lab
from plait.runtime.timing import host_us

ROOF_SIZE = 8192  # M, N and K of the product that stands for the tensor cores' rate
COPY_BYTES = 1 << 30
HOST_CALLS = 200
HOST_TURNS = 5
Impl = Literal["tuned", "default"]


@dataclass(frozen=True)
class Roofs:
    """Measured limits: `tflops` of a large product by torch, `tb_per_s` of a copy (both ways)."""

    tflops: float
    tb_per_s: float
    call: str

    def attainable_tflops(self, problem: Problem) -> float:
        """The lower of the two roofs at the problem's intensity."""
        return min(self.tflops, self.tb_per_s * problem.flops / problem.bytes_moved)


@dataclass(frozen=True)
class Host:
    """Microseconds of host time of one call, by `plait.matmul` and by torch.

    `planned`: plait found a plan of an earlier call; it makes two launches where K is split.
    """

    plait_us: float
    baseline_us: float
    planned: bool


@dataclass(frozen=True)
class Measured:
    """One problem's result; times are medians, spreads half the distance between quartiles.

    The times are None if the result is wrong: nothing was timed.
    """

    problem: Problem
    config: Config
    source: str
    error: float
    plait_us: float | None = None
    plait_spread: float | None = None
    baseline_us: float | None = None
    baseline_spread: float | None = None
    host: Host | None = None

    @property
    def ratio(self) -> float | None:
        """torch's time over plait's: above 1 plait is faster."""
        if self.plait_us is None or self.baseline_us is None:
            return None
        return self.baseline_us / self.plait_us

    @property
    def tflops(self) -> float | None:
        """plait's rate."""
        return None if self.plait_us is None else self.problem.flops / self.plait_us / 1e6

    @property
    def baseline_tflops(self) -> float | None:
        """torch's rate."""
        return None if self.baseline_us is None else self.problem.flops / self.baseline_us / 1e6


def measure_roofs(lab: Lab, problem: Problem, rounds: int) -> Roofs:
    """Roofs for the dtype and scales of `problem`."""
    large = replace(problem, M=ROOF_SIZE, N=ROOF_SIZE, K=ROOF_SIZE, batch=0, layout="nk")
    operands = make_operands(large, lab.device)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=lab.device)
    target = torch.empty_like(source)
    times = lab.times({"gemm": operands.baseline, "copy": lambda: target.copy_(source)}, rounds)
    return Roofs(
        tflops=large.flops / times["gemm"].median_us / 1e6,
        tb_per_s=2 * COPY_BYTES / times["copy"].median_us / 1e6,
        call=f"{large.baseline} {large.shape_text}",
    )


def measure(
    problem: Problem, lab: Lab, *, impl: Impl, rounds: int, with_host: bool = False
) -> Measured:
    """Check the product, then time it, interleaved with torch's call; then, if asked, the host."""
    operands = make_operands(problem, lab.device)
    use_tables = impl == "tuned"
    config, source = chosen_config(operands.product(), lab.info, use_tables=use_tables)
    program = operands.program(config, lab.info.num_sms)
    operands.baseline()
    error = operands.error_of(lambda: lab.run(program))
    if not error <= problem.error_limit:
        return Measured(problem, config, source, error)
    contestants = {"plait": lambda: lab.run(program), "baseline": operands.baseline}
    times = lab.times(contestants, rounds)
    plait_times, baseline = times["plait"], times["baseline"]
    return Measured(
        problem,
        config,
        source,
        error,
        plait_times.median_us,
        plait_times.spread,
        baseline.median_us,
        baseline.spread,
        measure_host(operands) if with_host else None,
    )


def measure_host(operands: Operands) -> Host:
    """Host time of both sides' calls, each allocating its result, in turns.

    Each is the best of `HOST_TURNS` averages over `HOST_CALLS` calls that only enqueue.
    """
    product, problem = operands.product(), operands.problem
    transposed = product.weights[0].mT  # torch pays for no view
    scales: dict[str, Any] = {}
    if operands.scaling is not None:
        scales = {"x_scale": operands.scaling.x, "weight_scale": operands.scaling.weight}
        scales["fast_accum"] = problem.fast_accum

    def ours() -> object:
        return plait.matmul(product.x, product.weights[0], impl="fused", **scales)

    def theirs() -> object:
        return torch.matmul(product.x, transposed)

    calls = {"plait": ours, "torch": theirs if not scales else operands.baseline}
    for _ in range(2):
        ours()  # plans, then finds its plan
    record = plait.last_run()
    turns = [
        {name: host_us(call, HOST_CALLS, repeats=1) for name, call in calls.items()}
        for _ in range(HOST_TURNS)
    ]
    best = {name: min(turn[name] for turn in turns) for name in calls}
    planned = record is not None and record.detail == "planned"
    return Host(best["plait"], best["torch"], planned)


def row(measured: Measured, roofs: Roofs, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of a result file: sizes, both times and spreads, and how they were measured."""
    problem = measured.problem
    roof = roofs.attainable_tflops(problem)
    return {
        "benchmark": "gemm",
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "batch": problem.batch,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "precision": problem.precision,
        "scales": problem.scales,
        "layout": problem.layout,
        "plait_us": measured.plait_us,
        "plait_spread": measured.plait_spread,
        "baseline": problem.baseline,
        "baseline_us": measured.baseline_us,
        "baseline_spread": measured.baseline_spread,
        "ratio": measured.ratio,
        "tflops": measured.tflops,
        "roof_tflops": roof,
        "roof_share": None if measured.tflops is None else measured.tflops / roof,
        "host_us": measured.host and measured.host.plait_us,
        "host_baseline_us": measured.host and measured.host.baseline_us,
        "host_planned": measured.host and measured.host.planned,
        "error": measured.error if measured.error < float("inf") else "not finite",
        "config": config_dict(measured.config),
        "source": measured.source,
        **facts,
    }


def result_table(results: Sequence[Measured], roofs: Roofs, title: str) -> Any:
    """A rich table with one line a problem."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("shape")
    table.add_column("dtype")
    for name in ("plait us", "torch us", "torch/plait", "TFLOP/s", "of roof"):
        table.add_column(name, justify="right")
    with_host = any(each.host is not None for each in results)
    if with_host:
        table.add_column("host us, plait/torch", justify="right")
    table.add_column("config")
    table.add_column("source")
    for each in results:
        dtype = str(each.problem.dtype).removeprefix("torch.")
        cells = ["WRONG", "", f"{each.error:.1e}", "", ""]
        if each.plait_us and each.baseline_us and each.tflops:
            share = each.tflops / roofs.attainable_tflops(each.problem)
            cells = [
                f"{each.plait_us:.1f}",
                f"{each.baseline_us:.1f}",
                f"{each.baseline_us / each.plait_us:.3f}",
                f"{each.tflops:.1f}",
                f"{share:.0%}",
            ]
        if with_host:
            cells.append(_host_text(each.host))
        table.add_row(each.problem.shape_text, dtype, *cells, config_text(each.config), each.source)
    return table


def _host_text(host: Host | None) -> str:
    if host is None:
        return ""
    text = f"{host.plait_us:.1f}/{host.baseline_us:.1f}"
    return text if host.planned else f"{text}, no plan"


def means(results: Sequence[Measured]) -> Any:
    """A rich table: geometric mean and worst ratio for each M and for all."""
    from rich.table import Table

    table = Table(title=RATIO_TITLE, title_justify="left")
    for name in ("M", "shapes", "geometric mean", "worst"):
        table.add_column(name, justify="right")
    table.add_column("worst shape")
    groups: dict[str, list[tuple[float, str]]] = {}
    for each in results:
        if each.ratio is not None:
            pair = (each.ratio, each.problem.shape_text)
            groups.setdefault(str(each.problem.M), []).append(pair)
    groups["all"] = [pair for group in groups.values() for pair in group]
    for name, group in groups.items():
        if group:
            mean = geometric_mean([ratio for ratio, _ in group])
            worst, shape = min(group)
            table.add_row(name, str(len(group)), f"{mean:.3f}", f"{worst:.3f}", shape)
    return table


__all__ = [
    "Host",
    "Measured",
    "Roofs",
    "means",
    "measure",
    "measure_host",
    "measure_roofs",
    "result_table",
    "row",
]
