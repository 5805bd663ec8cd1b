"""Runs a function on plait's virtual ranks with counters and the race detector listening.

The only file of the demo that calls plait's operators and knows its observers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import plait
from plait.check.picture import save_png
from plait.check.statistics import Counters
from plait.check.timeline import TimelineRecorder
from plait.cli.demo.engine import EngineRun, Traffic
from plait.cli.demo.ops import Ops


class CountedOps(Ops):
    """plait's operators; adds up what each operator moved and waited, by its name.

    On the CPU an operator returns when its own launches and copies are done, so the difference of
    the calling rank's counters around a call belongs to that call.
    """

    def __init__(self) -> None:
        self.start(Counters())

    def start(self, counters: Counters) -> None:
        """Count from zero with `counters`, which listen to the next run."""
        self.counters = counters
        self.traffic: dict[str, Traffic] = {}

    @contextmanager
    def _counted(self, operator: str, rank: int) -> Iterator[None]:
        counts = self.counters.ranks[rank]
        bytes_before, waits_before = counts.bytes_moved, counts.waits
        yield
        so_far = self.traffic.get(operator, Traffic())
        self.traffic[operator] = Traffic(
            so_far.bytes_moved + counts.bytes_moved - bytes_before,
            so_far.waits + counts.waits - waits_before,
        )

    def ag_gemm(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        group: Any,
        activation: str | None = None,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """`plait.ag_gemm`."""
        with self._counted("ag_gemm", group.rank):
            return plait.ag_gemm(
                x, weight, bias, group=group, activation=activation, **_rows(rows_per_rank)
            )

    def gemm_rs(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        group: Any,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """`plait.gemm_rs`."""
        with self._counted("gemm_rs", group.rank):
            return plait.gemm_rs(x, weight, bias, group=group, **_rows(rows_per_rank))

    def all_gather(
        self, x: torch.Tensor, *, group: Any, rows_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """`plait.all_gather`."""
        with self._counted("all_gather", group.rank):
            return plait.all_gather(x, group=group, **_rows(rows_per_rank))

    def last_run(self) -> Any:
        """`plait.last_run`."""
        return plait.last_run()


class PlaitEngine:
    """`plait.run_virtual` with `ranks` ranks; schedules are drawn from `seed`."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks, self.seed = ranks, seed
        self._counted_ops = CountedOps()
        self.ops: Ops = self._counted_ops
        self.device: torch.device = plait.run_virtual(_device_of, ranks, seed)[0]

    def run(self, fn: Callable[[Any], Any]) -> EngineRun:
        """See Engine."""
        counters = Counters()
        self._counted_ops.start(counters)
        results = plait.run_virtual(fn, self.ranks, self.seed, observers=(counters,), check=True)
        if self.device.type != "cpu":  # observers see what the interpreter runs
            return EngineRun(results, None, None)
        total = counters.total()
        traffic = Traffic(total.bytes_moved, total.waits)
        return EngineRun(results, dict(self._counted_ops.traffic), traffic)

    def record(self, fn: Callable[[Any], Any], folder: Path, name: str) -> list[Path]:
        """See Engine."""
        recorder = TimelineRecorder()
        # The recorder hears what the interpreter runs, so this is on the CPU beside a GPU, too.
        plait.run_virtual(
            fn, self.ranks, self.seed, device="cpu", observers=(recorder,), check=True
        )
        paths = [folder / f"{name}.json"]
        recorder.save_json(paths[0])
        for operator in dict.fromkeys(span.operator for span in recorder.spans):
            paths.append(folder / f"{name}_{re.sub(r'[^A-Za-z0-9]+', '_', operator)}.png")
            save_png(recorder, paths[-1], operator=operator)
        return paths


def _device_of(group: Any) -> torch.device:
    return torch.device(group.device)


def _rows(rows_per_rank: Sequence[int] | None) -> dict[str, Any]:
    """The option `rows_per_rank` for an uneven split; equal splits need none."""
    if rows_per_rank is None or len(set(rows_per_rank)) == 1:
        return {}
    return {"rows_per_rank": list(rows_per_rank)}


__all__ = ["CountedOps", "PlaitEngine"]
