"""The shipped table of the H200: `impl="auto"` takes what was faster, at every measured call.

The result files are what the table was made from; times of entries are medians of some rounds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.cli.tune_overlap import obstacle
from plait.overlap.common import chooser
from plait.overlap.common.chooser import SHIPPED_TABLES, Sizes, decide, measurements
from plait.overlap.gemm_ar.launch import choose_algorithm
from plait.runtime.tuning_store import read_table
from plait.settings import override
from plait.symm.transports.base import LinkSpeed
from plait.symm.transports.link import Link
from tests.tiny.tree import ROOT

GPU = "NVIDIA H200"
RESULTS = [
    ROOT / f"benchmarks/results/overlap_{link}_h200_2026-12-01.jsonl"
    for link in ("paced360", "paced160", "pcie")
]
POWERS = [2**power for power in range(15)]


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path):
    chooser.forget_choices()
    with override(tuning_dir=str(tmp_path)):
        yield
    chooser.forget_choices()


def rows() -> list[dict]:
    lines = [line for path in RESULTS for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if not obstacle(row)]


def chosen(row: dict) -> str:
    link = Link.parse(row["link"])
    dtype = getattr(torch, row["dtype"])
    named = choose_algorithm(row["M"], row["tp"]) if row["benchmark"] == "gemm_ar" else None
    wanted = Sizes(row["M"], row["N"], row["K"], dtype, dtype.itemsize, named)
    speed = LinkSpeed(link.gb_s, link.latency_us)
    return decide(row["benchmark"], row["tp"], speed, GPU, wanted)[0]


def lost(row: dict, impl: str) -> float:
    """What the choice takes longer than the other, as a share; 0 within 5 us of short calls."""
    times = {"fused": row["fused_us"], "unfused": row["plait_unfused_us"]}
    best = min(times.values())
    over = times[impl] - best
    return 0.0 if best < 200 and over <= 5 else over / best


def test_the_table_holds_the_results() -> None:
    found = measurements(read_table(SHIPPED_TABLES / "nvidia-h200.json"))
    assert len(found) == len({_call(row) for row in rows()})
    assert {each.problem.operator for each in found} == {"ag_gemm", "gemm_rs", "gemm_ar"}


def _call(row: dict) -> tuple:
    link = Link.parse(row["link"])
    names = ("benchmark", "M", "N", "K", "dtype")
    return (*(row[name] for name in names), link.gb_s, link.latency_us)


def test_auto_takes_what_was_faster_at_every_measured_call() -> None:
    worst = max(rows(), key=lambda row: lost(row, chosen(row)))
    assert lost(worst, chosen(worst)) <= 0.03, (worst["command"], chosen(worst))


def test_between_powers_of_two_the_neighbours_decide_nearly_as_well(monkeypatch) -> None:
    """The rows in between, were they not in the table: at most 10 % over the faster one.

    Worst where the last wave of tiles has few: at M=1536 both neighbours are faster fused.
    """
    all_of_them = measurements

    def some(table):
        return [each for each in all_of_them(table) if each.problem.M in POWERS]

    monkeypatch.setattr(chooser, "measurements", some)
    between = [row for row in rows() if row["M"] not in POWERS and row["M"] > 100]
    assert len(between) > 15
    losses = {row["command"]: lost(row, chosen(row)) for row in between}
    worst = max(losses, key=lambda command: losses[command])
    assert losses[worst] <= 0.10, (worst, losses[worst])
    assert sum(loss > 0.05 for loss in losses.values()) <= 2


def test_many_rows_are_fused_and_few_are_not() -> None:
    for row in rows():
        if row["link"].startswith("paced") and row["M"] >= 2048:
            assert chosen(row) == "fused", row["command"]
        if row["benchmark"] != "gemm_ar" and 16 <= row["M"] <= 384 and "paced" in row["link"]:
            assert chosen(row) == "unfused", row["command"]
