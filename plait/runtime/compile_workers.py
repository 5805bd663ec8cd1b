"""Worker processes that compile kernels while the program goes on.

They are started by a command, not by `multiprocessing`, which would run the program's main module
once more. A worker has no GPU context and fills Triton's cache on disk; it ends when its pipe does,
so it never keeps the program from ending.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from plait.runtime.compile_pool import CRASHED, Job

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from plait.runtime.compile_workers import work; work()"
)


class CompileWorkers:
    """`submit(job)` compiles it for `arch` ("sm90") in one of `num_workers` processes.

    `on_done(job, complaint)` is called from another thread; the complaint is "" if all went well.
    Processes start when there is something to do. After a fork the child needs workers of its own.
    """

    def __init__(self, arch: str, num_workers: int, on_done: Callable[[Job, str], object]) -> None:
        self._arch, self._num_workers, self._on_done = arch, num_workers, on_done
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Compile a job soon."""
        with self._lock:
            if len(self._threads) < self._num_workers:
                thread = threading.Thread(target=self._serve, name="plait-compile", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)

    def close(self) -> None:
        """Let the processes end when they have done what was submitted."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads = []

    def _serve(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if process is None:
                    process = self._start()
                complaint = _ask(process, job)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                ended = isinstance(error, (EOFError, BrokenPipeError))
                complaint = CRASHED if ended else f"{type(error).__name__}: {error}"
                _end(process)
                process = None
            self._on_done(job, complaint)
        _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _START]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _send(process, sys.path)
        _send(process, self._arch)
        return process


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(value))
    process.stdin.flush()


def _ask(process: subprocess.Popen[bytes], job: Job) -> str:
    assert process.stdout is not None
    _send(process, job)
    return pickle.load(process.stdout)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # what was not written yet finds nobody
    process.wait()


def work() -> None:
    """The worker's side: jobs come by stdin, complaints go to what was stdout."""
    from plait.runtime.compile_pool import compile_job, use_arch

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not come between
    use_arch(pickle.load(sys.stdin.buffer))
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(pickle.dumps(compile_job(job)))
        answers.flush()


__all__ = ["CompileWorkers", "work"]
