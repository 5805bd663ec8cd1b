"""Runs programs on a CUDA device: Triton launches, copy-engine copies and events.

`CudaExecutor.run` goes through torch and Triton's own launcher. Calls that repeat are prepared
(plait/runtime/prepared.py) and enqueue the same commands with far less host time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from plait.backends.base import Executor
from plait.backends.commands import Call, Copy, Launch, Program, Signal, StreamName, StreamWait
from plait.backends.nvidia.driver import Driver, find_driver
from plait.device import device_info


class CudaExecutor(Executor):
    """One rank's streams: `main` is the caller's current stream, the others are its own.

    With `own_main` (virtual ranks) the rank also has a main stream, current inside `scope()`.
    A subclass may override `transform`, which every program passes once before it runs.
    """

    def __init__(self, device: torch.device, *, own_main: bool = False) -> None:
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._streams = {"comm": _own_stream(self)}
        self._main = torch.cuda.Stream(device) if own_main else None
        self._captured: dict[int, object] = {}

    def keep_if_captured(self, what: object) -> None:
        """Keep what a graph that is being captured goes on using: contexts, tables, plans.

        Caches of these are bounded and regions get new contexts as they grow, but graphs hold
        addresses.
        """
        if torch.cuda.is_current_stream_capturing():
            self._captured[id(what)] = what

    def transform(self, program: Program) -> Program:
        """What is run instead of `program`: the same for equal programs, as graphs replay it."""
        return program

    @property
    def driver(self) -> Driver | None:
        """What prepared programs enqueue with; None where programs are not to be prepared."""
        return find_driver() if self._main is None else None

    def stream(self, name: StreamName) -> torch.cuda.Stream:
        """A stream by name; those other than `main` and `comm` are made at first use."""
        if name == "main":
            return torch.cuda.current_stream(self.device)
        if name not in self._streams:
            self._streams[name] = _own_stream(self)
        return self._streams[name]

    def current_raw_stream(self) -> int:
        """Handle of what `main` is now."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def is_current(self) -> bool:
        """Whether this executor's device is the current one."""
        return torch.cuda.current_device() == self.index

    @property
    def num_sms(self) -> int:
        """SMs of the device."""
        return device_info(self.device).num_sms

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The rank's main stream is current; work enqueued before comes first, and after, later."""
        if self._main is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self._main.wait_stream(outer)
        with torch.cuda.stream(self._main):
            yield
        outer.wait_stream(self._main)

    def prepare(self, program: Program) -> None:
        """Compile and load every kernel of a program, without launching anything."""
        program = self.transform(program)
        with torch.cuda.device(self.device):
            for launch in program.launches():
                compiled = launch.kernel.warmup(
                    **launch.args, grid=(launch.grid,), **launch.options
                )
                compiled._init_handles()

    def run(self, program: Program) -> None:
        """Enqueue a program; the streams keep its order."""
        program = self.transform(program)
        for launch in program.launches():
            for value in launch.args.values():
                # Contexts and tables; other tensors are the caller's, or lie in the graph's pool.
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    self.keep_if_captured(value)
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device):
            for command in program.commands:
                if isinstance(command, StreamWait):
                    self.stream(command.stream).wait_stream(self.stream(command.on))
                    continue
                name: StreamName = getattr(command, "stream", "main")
                stream = main if name == "main" else self.stream(name)
                if stream is main:
                    self._run_one(command)
                else:
                    with torch.cuda.stream(stream):
                        self._run_one(command)

    def _run_one(self, command: Launch | Copy | Signal | Call) -> None:
        if isinstance(command, Launch):
            command.kernel[(command.grid,)](**command.args, **command.options)
        elif isinstance(command, Copy):
            command.dst.detach().copy_(command.src.detach(), non_blocking=True)
        elif isinstance(command, Signal):
            command.word.copy_(command.mirror, non_blocking=True)
        else:
            with torch.no_grad():
                command.fn()

    def synchronize(self) -> None:
        """Wait for all streams of this rank."""
        torch.cuda.current_stream(self.device).synchronize()
        for stream in self._streams.values():
            stream.synchronize()


# Streams of executors that are gone, by device: memory may still be marked as used by them, so
# they are never destroyed but serve the next executor.
_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def _own_stream(executor: CudaExecutor) -> torch.cuda.Stream:
    """A stream that no caller can have.

    torch hands out the same 32 streams of a priority in turn, also to callers and for graph
    capture: one of those could be ours as well, and what must run beside `main` would wait behind
    it. The driver makes new ones; without its bindings the high priority, for which callers rarely
    ask, has to do.
    """
    device = executor.device
    idle = _idle_streams.setdefault(device, [])
    if idle:
        stream = idle.pop()
    else:
        driver = find_driver()
        with torch.cuda.device(device):
            if driver is None:
                stream = torch.cuda.Stream(device, priority=-1)
            else:
                stream = torch.cuda.ExternalStream(driver.new_stream(executor.index), device)
    weakref.finalize(executor, idle.append, stream).atexit = False
    return stream


_executors: dict[torch.device, CudaExecutor] = {}


def cuda_executor(device: torch.device) -> CudaExecutor:
    """The executor of operators without a group; one a device."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _executors:
        _executors[device] = CudaExecutor(device)
    return _executors[device]


__all__ = ["CudaExecutor", "cuda_executor"]
