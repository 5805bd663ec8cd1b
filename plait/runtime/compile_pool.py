"""Compile many kernels at once, in processes that fill Triton's cache on disk.

A process has no GPU context: Triton is told the architecture, and tensors are on the meta device.
What it compiles is what a launch looks up later, as both go through `kernel.warmup`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol, TypeAlias

_MAX_WORKERS = 32
CRASHED = "the compiler ended its process"


class Job(Protocol):
    """What a worker process gets, pickled."""

    def compile(self) -> Any:
        """Compile by `kernel.warmup`; what it raises is the job's complaint."""
        ...


Results: TypeAlias = dict[Hashable, str]


def can_precompile(arch: str) -> bool:
    """Whether `precompile` knows this architecture."""
    return re.fullmatch(r"sm\d+", arch) is not None


def precompile(
    jobs: Mapping[Any, Job],
    arch: str,
    *,
    remaining_s: Callable[[], float],
    on_done: Callable[[], object] = lambda: None,
    num_workers: int | None = None,
) -> Results:
    """What became of each job: "" when compiled, else the compiler's complaint.

    Jobs that `remaining_s()` left no time for are missing. A job that takes its process down is
    found by compiling one at a time what was not finished then.
    """
    wanted = num_workers or len(os.sched_getaffinity(0))
    num_workers = max(1, min(wanted, len(jobs), _MAX_WORKERS))
    results: Results = {}
    _run_pool(jobs, arch, num_workers, results, remaining_s, on_done)
    while remaining_s() > 0:
        suspects = {key: jobs[key] for key, text in results.items() if text == _UNFINISHED}
        if not suspects:
            break
        _run_pool(suspects, arch, 1, results, remaining_s, on_done)
    return {key: text for key, text in results.items() if text != _UNFINISHED}


_UNFINISHED = "unfinished"


def _run_pool(
    jobs: Mapping[Any, Job],
    arch: str,
    num_workers: int,
    results: Results,
    remaining_s: Callable[[], float],
    on_done: Callable[[], object],
) -> None:
    """Fill in `results`; with one worker, the first job that a crash leaves undone is the cause."""
    keys: dict[Future[str], Hashable] = {}
    with ProcessPoolExecutor(num_workers, get_context("spawn"), use_arch, (arch,)) as pool:
        for key, job in jobs.items():
            try:
                keys[pool.submit(compile_job, job)] = key
            except BrokenProcessPool:
                results[key] = _UNFINISHED
        pending = set(keys)
        broken: list[Hashable] = []
        while pending:
            done, pending = wait(pending, max(0.0, remaining_s()), FIRST_COMPLETED)
            if not done:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            for future in done:
                try:
                    results[keys[future]] = future.result()
                    on_done()
                except BrokenProcessPool:
                    results[keys[future]] = _UNFINISHED
                    broken.append(keys[future])
    if num_workers == 1 and broken:
        results[next(key for key in jobs if key in broken)] = CRASHED
        on_done()


class _Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        return self._target


def use_arch(arch: str) -> None:
    """Let this process, which has no GPU, compile for `arch` ("sm90")."""
    from triton.runtime import driver

    driver.set_active(_Driver(arch))  # pyright: ignore[reportArgumentType]


def compile_job(job: Job) -> str:
    """Compile; the first line of the compiler's complaint, or ""."""
    try:
        job.compile()
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return lines[0]
    return ""


__all__ = [
    "CRASHED",
    "Job",
    "Results",
    "can_precompile",
    "compile_job",
    "precompile",
    "use_arch",
]
