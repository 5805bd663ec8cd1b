"""Compiling what a list of calls needs, all at once, before the first is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.cli.bench_ops_measure import ask, jobs_of
from plait.cli.bench_ops_points import Point
from plait.ops.engine.precompile import KernelJob
from plait.runtime.compile_pool import can_precompile, precompile
from plait.runtime.lab import Lab


@dataclass(frozen=True)
class Compiled:
    """How many kernels were compiled in how many seconds, and what the compiler refused."""

    kernels: int
    wall_s: float
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.kernels} kernels compiled in {self.wall_s:.0f} s"
        return "; ".join((text, *self.failed[:5]))


def compile_points(
    points: Sequence[Point], lab: Lab, progress: Callable[[str, int], Callable[[], object]]
) -> Compiled:
    """Compile the kernels of all points in worker processes, which fill Triton's cache.

    `progress(text, total)` gives what is called after each step.
    """
    begin = time.perf_counter()
    if not can_precompile(lab.info.arch):
        return Compiled(0, 0.0)
    jobs: dict[KernelJob, KernelJob] = {}
    advance = progress("recording", len(points))
    for point in points:
        try:
            recorded = jobs_of(ask(point, lab.device))
        except Exception:  # measuring the point says so, with the reason
            recorded = []
        jobs.update((job, job) for job in recorded)
        advance()
    advance = progress("compiling", len(jobs))
    found = precompile(jobs, lab.info.arch, remaining_s=lambda: float("inf"), on_done=advance)
    failed = tuple(f"{job.kernel}: {found[job]}" for job in jobs if found.get(job))
    return Compiled(len(jobs), time.perf_counter() - begin, failed)


__all__ = ["Compiled", "compile_points"]
