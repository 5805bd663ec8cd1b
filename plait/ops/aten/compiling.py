"""Calls that wait for their kernels: ATen serves them meanwhile.

`postponed(call)` says why a recorded call is not run by plait yet. With PLAIT_COMPILE=background
that is so until a worker process has compiled its kernels; within `collecting()` the kernels are
only noted, for `plait.warmup`. Such calls are never remembered: the next one asks again.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from plait.ops.aten import thread_state
from plait.ops.engine.call import Call
from plait.ops.engine.precompile import KernelJob, kernel_jobs
from plait.runtime.compile_pool import can_precompile
from plait.runtime.compile_workers import CompileWorkers
from plait.settings import settings

COMPILING = "its kernel is being compiled"
COLLECTED = "its kernel is noted for warm-up"
FAILED = "its kernel does not compile"
PASSING = frozenset((COMPILING, COLLECTED))  # reasons that hold for a while

_NUM_WORKERS = 2
_SLOT = "plait.aten.warmup"


class _Background:
    """What is compiled, under way and refused, by architecture; the workers of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.collectors = 0
        self.forget()

    def forget(self) -> None:
        """Start anew; a forked process has no workers."""
        self.pid = os.getpid()
        self.workers: dict[str, CompileWorkers] = {}
        self.compiled: set[tuple[str, KernelJob]] = set()
        self.waiting: set[tuple[str, KernelJob]] = set()
        self.refused: set[tuple[str, KernelJob]] = set()

    def ask(self, arch: str, jobs: set[KernelJob]) -> str:
        """Why a call that needs these has to wait, or ""."""
        asked = {(arch, job) for job in jobs}
        with self.lock:
            if self.pid != os.getpid():
                self.forget()
            if asked <= self.compiled:
                return ""
            if asked & self.refused:
                return FAILED
            new = asked - self.compiled - self.waiting
            self.waiting |= new
            if new and arch not in self.workers:
                self.workers[arch] = CompileWorkers(
                    arch, _NUM_WORKERS, lambda job, complaint: self.done(arch, job, complaint)
                )
        for _, job in new:
            self.workers[arch].submit(job)
        return COMPILING

    def done(self, arch: str, job: object, complaint: str) -> None:
        """A worker has compiled a kernel, or not."""
        assert isinstance(job, KernelJob)
        with self.lock:
            self.waiting.discard((arch, job))
            (self.refused if complaint else self.compiled).add((arch, job))
        if complaint:
            text = f"plait: {job.kernel} does not compile, ATen serves its calls: {complaint}"
            warnings.warn(text, stacklevel=2)


_background = _Background()


def _after_fork() -> None:
    _background.lock = threading.Lock()  # the parent's may have been held
    _background.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def postponed(call: Call) -> str:
    """Why ATen has to serve a call that plait's operator has accepted, or ""."""
    background = settings().compile == "background"
    if call.interpreted or not (_background.collectors or background):
        return ""
    arch = call.info.arch
    collected = thread_state.get(_SLOT) if _background.collectors else None
    if collected is not None:
        for job in kernel_jobs(call):
            collected.setdefault(job, call.device.index)
        return COLLECTED
    if background and can_precompile(arch):
        return _background.ask(arch, set(kernel_jobs(call)))
    return ""


def compiled(arch: str, job: KernelJob) -> None:
    """Let calls that need this kernel be served from now on, also with PLAIT_COMPILE=background."""
    with _background.lock:
        _background.compiled.add((arch, job))


@contextmanager
def collecting() -> Iterator[dict[KernelJob, int]]:
    """A block in which calls that would be planned are ATen's, and their kernels are noted.

    That holds for this thread and the backward passes it starts. The dict has the index of the
    device that a kernel is for.
    """
    found: dict[KernelJob, int] = {}
    before = thread_state.get(_SLOT)
    with _background.lock:
        _background.collectors += 1
    thread_state.put(_SLOT, found)
    try:
        yield found
    finally:
        thread_state.put(_SLOT, before)
        with _background.lock:
            _background.collectors -= 1


__all__ = [
    "COLLECTED",
    "COMPILING",
    "FAILED",
    "PASSING",
    "collecting",
    "compiled",
    "postponed",
]
