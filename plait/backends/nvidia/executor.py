"""Runs programs on a CUDA device: Triton launches, copy-engine copies and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from plait.backends.base import Executor
from plait.backends.commands import Call, Copy, Launch, Program, Signal, StreamWait
from plait.device import device_info


class CudaExecutor(Executor):
    """One rank's streams: `main` is the caller's current stream, `comm` one of its own.

    With `own_main` (virtual ranks) the rank also has a main stream, current inside `scope()`.
    """

    def __init__(self, device: torch.device, *, own_main: bool = False) -> None:
        self.device = device
        self._comm = torch.cuda.Stream(device)
        self._main = torch.cuda.Stream(device) if own_main else None

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
        with torch.cuda.device(self.device):
            for launch in program.launches():
                compiled = launch.kernel.warmup(
                    **launch.args,
                    grid=(launch.grid,),
                    num_warps=launch.num_warps,
                    num_stages=launch.num_stages,
                )
                compiled._init_handles()

    def run(self, program: Program) -> None:
        """Enqueue a program; the streams keep its order."""
        main = torch.cuda.current_stream(self.device)
        streams = {"main": main, "comm": self._comm}
        with torch.cuda.device(self.device):
            for command in program.commands:
                if isinstance(command, StreamWait):
                    streams[command.stream].wait_stream(streams[command.on])
                    continue
                stream = streams[getattr(command, "stream", "main")]
                if stream is main:
                    self._run_one(command)
                else:
                    with torch.cuda.stream(stream):
                        self._run_one(command)

    def _run_one(self, command: Launch | Copy | Signal | Call) -> None:
        if isinstance(command, Launch):
            command.kernel[(command.grid,)](
                **command.args, num_warps=command.num_warps, num_stages=command.num_stages
            )
        elif isinstance(command, Copy):
            command.dst.detach().copy_(command.src.detach(), non_blocking=True)
        elif isinstance(command, Signal):
            command.word.copy_(command.mirror, non_blocking=True)
        else:
            with torch.no_grad():
                command.fn()

    def synchronize(self) -> None:
        """Wait for both streams of this rank."""
        torch.cuda.current_stream(self.device).synchronize()
        self._comm.synchronize()


_executors: dict[torch.device, CudaExecutor] = {}


def cuda_executor(device: torch.device) -> CudaExecutor:
    """The executor of operators without a group; one a device."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _executors:
        _executors[device] = CudaExecutor(device)
    return _executors[device]


__all__ = ["CudaExecutor", "cuda_executor"]
