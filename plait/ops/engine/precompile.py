"""Compiling the launches of recorded calls in worker processes.

A `KernelJob` is one kernel with its compile-time arguments, and with of the others only what Triton
specialises on; calls that differ in sizes alone give equal jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from plait.ops.engine.call import Call
from plait.runtime.launcher import build_launcher

_ALIGNMENT = 16  # bytes and divisor that Triton specialises on
_INT32 = 2**31


@dataclass(frozen=True)
class KernelJob:
    """One kernel of a module; `args` in order: names and values, or the dtype of a pointer."""

    module: str
    kernel: str
    args: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    def compile(self) -> Any:
        """Compile it for the GPU that Triton believes in; Triton's compiled kernel."""
        kernel = getattr(import_module(self.module), self.kernel)
        args = {name: _stand_in(value) for name, value in self.args}
        compiled = kernel.warmup(**args, grid=(1,), **dict(self.options))
        build_launcher(compiled)
        return compiled


@dataclass(frozen=True)
class _Pointer:
    dtype: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class _Function:
    """A device function as a compile-time argument; the object itself is not pickled."""

    module: str
    name: str


class _Unaligned:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 1


def kernel_jobs(call: Call) -> Iterable[KernelJob]:
    """What has to be compiled before the recorded call can run."""
    for step in call.steps:
        launch = step.launch
        function = launch.kernel.fn
        constants = {each.name for each in launch.kernel.params if each.is_constexpr}
        args = tuple(
            (name, _constant(value) if name in constants else _class_of(value))
            for name, value in launch.args.items()
        )
        options = tuple(sorted(launch.options.items()))
        yield KernelJob(function.__module__, function.__name__, args, options)


def _constant(value: Any) -> Any:
    function = getattr(value, "fn", None)
    if function is None:
        return value
    return _Function(function.__module__, function.__name__)


def _class_of(value: Any) -> Any:
    """A value that Triton compiles alike for."""
    if hasattr(value, "data_ptr"):
        return _Pointer(value.dtype, value.data_ptr() % _ALIGNMENT == 0)
    if type(value) is int and value != 1:
        small = _ALIGNMENT if value % _ALIGNMENT == 0 else _ALIGNMENT + 3
        return small if -_INT32 <= value < _INT32 else small + 2 * _INT32
    if type(value) is float:
        return 0.5
    return value


def _stand_in(value: Any) -> Any:
    if isinstance(value, _Function):
        return getattr(import_module(value.module), value.name)
    if not isinstance(value, _Pointer):
        return value
    if value.aligned:
        return torch.empty(0, dtype=value.dtype, device="meta")
    return _Unaligned(value.dtype)


__all__ = ["KernelJob", "kernel_jobs"]
