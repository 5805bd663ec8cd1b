"""Compile many GEMM kernels at once, in processes that fill Triton's cache on disk.

A process has no GPU context: Triton is told the architecture, and tensors are on the meta device.
What it compiles is what a launch looks up later, as both go through `kernel.warmup`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch

from plait.ops.matmul.configs import Config
from plait.ops.matmul.problem import Problem, make_operands

_MAX_WORKERS = 32
CRASHED = "the compiler ended its process"


@dataclass(frozen=True)
class CompileJob:
    """All kernels of one problem with one config, on a GPU with so many SMs."""

    problem: Problem
    config: Config
    tf32: bool = False
    num_sms: int = 1

    @property
    def key(self) -> Hashable:
        """Equal for jobs that compile the same kernels: Triton knows sizes only by divisibility."""
        problem, config = self.problem, self.config
        sizes = (problem.M, problem.N, problem.K)
        kinds = tuple(0 if size == 1 else math.gcd(size, 16) for size in sizes)
        compiled = replace(config, splits=1, blocks_per_sm=1, split_tail=False)
        kernel = (problem.dtype, problem.layout, problem.scales, problem.fast_accum, self.tf32)
        # Strides of batches may need 64 bits; how fp8 is summed depends on K.
        exact = problem.batch > 0 or problem.dtype.itemsize == 1
        batch = exact and (problem.batch, *sizes)
        return kinds, compiled, self._split, kernel, batch

    @property
    def _split(self) -> str:
        """Which tiles are split: none, those of the last wave, or all."""
        problem, config = self.problem, self.config
        if config.splits == 1:
            return "none"
        if not config.split_tail:
            return "all"
        tiles = -(-problem.M // config.block_m) * -(-problem.N // config.block_n)
        tiles *= max(problem.batch, 1)
        blocks = self.num_sms * config.blocks_per_sm
        return "none" if tiles % blocks == 0 else "tail" if tiles > blocks else "all"


Results: TypeAlias = dict[Hashable, str]


def can_precompile(arch: str) -> bool:
    """Whether `precompile` knows this architecture."""
    return re.fullmatch(r"sm\d+", arch) is not None


def precompile(
    jobs: Mapping[Hashable, CompileJob],
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
    jobs: Mapping[Hashable, CompileJob],
    arch: str,
    num_workers: int,
    results: Results,
    remaining_s: Callable[[], float],
    on_done: Callable[[], object],
) -> None:
    """Fill in `results`; with one worker, the first job that a crash leaves undone is the cause."""
    keys: dict[Future[str], Hashable] = {}
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _use_arch, (arch,)) as pool:
        for key, job in jobs.items():
            try:
                keys[pool.submit(_compile, job)] = key
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


def _use_arch(arch: str) -> None:
    from triton.runtime import driver

    driver.set_active(_Driver(arch))  # pyright: ignore[reportArgumentType]


def _compile(job: CompileJob) -> str:
    if job.tf32:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        program = make_operands(job.problem, torch.device("meta")).program(job.config, job.num_sms)
        for launch in program.launches():
            launch.kernel.warmup(**launch.args, grid=(launch.grid,), **launch.options)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return lines[0]
    return ""


__all__ = ["CRASHED", "CompileJob", "can_precompile", "precompile"]
