"""`plait.warmup`: compile all that a function's calls of ATen need before they need it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from plait.device import device_info
from plait.ops.aten import compiling, spec
from plait.ops.engine.precompile import KernelJob
from plait.runtime.compile_pool import Job, can_precompile
from plait.runtime.compile_workers import CompileWorkers

_MAX_WORKERS = 32


@dataclass(frozen=True)
class Warmup:
    """`kernels`: how many were compiled (or found so) and loaded; `result`: the function's."""

    kernels: int
    result: Any


def warmup(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Warmup:
    """Call `fn(*args, **kwargs)` once, and compile every kernel of plait that later calls need.

    What is on is what is on around it: enable, or open a `use()` block, first. In this one call
    ATen serves what plait has no plan for yet, so `fn` does what it does, and only once; backward
    passes that it starts count, too. The kernels are compiled in processes, as many as there are
    cores, and loaded; a later call of the same classes (dtypes, ranks, divisibilities) compiles
    nothing. On the CPU there is nothing to compile.

    Raises:
        Whatever `fn` raises; Triton's error if a kernel does not compile.
    """
    spec.load_catalog()
    with compiling.collecting() as jobs:
        result = fn(*args, **kwargs)
    by_arch: dict[str, list[KernelJob]] = {}
    for job, index in jobs.items():
        by_arch.setdefault(device_info(f"cuda:{index}").arch, []).append(job)
    for arch, each in by_arch.items():
        if can_precompile(arch):
            _compile(arch, each)
    for job, index in jobs.items():
        with torch.cuda.device(index):
            job.compile()._init_handles()  # from Triton's cache; what was refused says why here
        compiling.compiled(device_info(f"cuda:{index}").arch, job)
    return Warmup(len(jobs), result)


def _compile(arch: str, jobs: list[KernelJob]) -> None:
    """Fill Triton's cache on disk; returns when all is done."""
    left = threading.Semaphore(0)

    def done(job: Job, complaint: str) -> None:
        del job, complaint
        left.release()

    workers = CompileWorkers(arch, min(len(jobs), _num_cores(), _MAX_WORKERS), done)
    for job in jobs:
        workers.submit(job)
    for _ in jobs:
        left.acquire()
    workers.close()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["Warmup", "warmup"]
