"""What runs programs: one executor a rank, and the question which one serves a device.

`Executor` is the only way operators reach hardware. Virtual ranks announce themselves through
`add_resolver`, so that operators without a group (`plait.matmul`) run on the calling rank's device.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import Any

import torch

from plait.backends.commands import Program


class Executor(abc.ABC):
    """Runs a rank's programs in order."""

    device: torch.device
    early_launches = True  # whether kernels of this rank may start before the one before has ended

    @property
    @abc.abstractmethod
    def num_sms(self) -> int:
        """Blocks of a persistent kernel that may be resident at once on this rank."""

    @abc.abstractmethod
    def run(self, program: Program) -> None:
        """Carry out a program.

        On a GPU the call returns when everything is enqueued, on virtual CPU ranks when the
        program has ended. A failing program raises; nothing of it is repeated.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all programs of this rank have ended."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """What a virtual rank's thread holds while it runs the rank's code."""
        return contextlib.nullcontext()


Resolver = Callable[[torch.device], "Executor | None"]
_resolvers: list[Resolver] = []


def add_resolver(resolver: Resolver) -> None:
    """Ask `resolver` first which executor serves a device; None says that it does not know."""
    _resolvers.insert(0, resolver)


def executor_for(device: torch.device) -> Executor:
    """The executor of the calling rank and thread for tensors on `device`.

    Raises DeviceError when nothing can run kernels there (a CPU tensor outside virtual ranks).
    """
    for resolver in _resolvers:
        found = resolver(device)
        if found is not None:
            return found
    if device.type == "cuda":
        from plait.backends.nvidia.executor import cuda_executor

        return cuda_executor(device)
    from plait.errors import DeviceError

    raise DeviceError(
        argument="device",
        expected="a GPU, or a CPU tensor inside plait.run_virtual",
        got=str(device),
        remedy="Run inside plait.run_virtual(fn, world_size), or choose impl='reference'.",
    )


__all__ = ["Executor", "Resolver", "add_resolver", "executor_for"]
