"""What the function of an operator works with: results, scratch memory and launches of one call.

An operator's `compute(call, **arguments)` is written once for all its overloads. It looks at
shapes, strides, dtypes and numbers, asks `call` for its results, and launches; what it decides must
depend on nothing else, because on a GPU the recorded launches are repeated for every later call of
the same signature with other addresses alone (plait/ops/engine/plans.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from plait.backends.commands import Launch
from plait.device import DeviceInfo, device_info
from plait.runtime.launcher import BoundLaunch

# Why a result of the caller's is ATen's to fill, or to refuse.
SHARED = "a result that shares memory with another operand"
OTHER_SHAPE = "a result of another shape"
OTHER_DTYPE = "a result of another dtype"
OVERLAPS_ITSELF = "a result that overlaps itself"
RESULT_REASONS = frozenset((SHARED, OTHER_SHAPE, OTHER_DTYPE, OVERLAPS_ITSELF))


class Declined(Exception):
    """`reason` says why plait leaves a call to ATen; a constant text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Number:
    """A number that may differ from call to call of one plan: argument `name`, `value` in this one.

    Only a launch may take it; what an operator decides must not depend on the value. A kernel's
    parameter that gets an integer so is one of its `do_not_specialize`.
    """

    name: str
    value: bool | int | float | complex


@dataclass(frozen=True)
class Pointer:
    """A tensor as a kernel's pointer of another dtype, or `offset` elements (of that dtype) on."""

    tensor: torch.Tensor
    dtype: torch.dtype | None = None
    offset: int = 0


@dataclass(frozen=True)
class Step:
    """A recorded launch: arguments as the operator gave them."""

    launch: Launch
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Given:
    """Where results go: tensors of an out overload, or the operand that is overwritten."""

    tensors: tuple[torch.Tensor, ...] = ()
    inplace: bool = False
    apart: bool = True  # no two of them, and none of them and an operand, share a storage


class Call:
    """One call of an operator on `device`. Launches are recorded, and run when all is decided."""

    def __init__(self, device: torch.device, given: Given | None = None) -> None:
        self.device = device
        self.given = given or Given()
        self.results: list[torch.Tensor | None] = []
        self.scratch: list[torch.Tensor] = []
        self.steps: list[Step] = []
        self._bound: list[BoundLaunch] | None = None

    @property
    def info(self) -> DeviceInfo:
        """What the device can do."""
        return device_info(self.device)

    @property
    def interpreted(self) -> bool:
        """Whether launches run under the interpreter, where few large blocks are fast."""
        return self.device.type == "cpu"

    def decline(self, reason: str) -> NoReturn:
        """Leave the call to ATen; nothing has been written yet."""
        raise Declined(reason)

    def result(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The next result: a new tensor (contiguous unless `strides` are given), or what the
        overload writes into, with strides of its own, if it has this shape and dtype.

        Results are asked for in the order in which they are returned.
        """
        index = len(self.results)
        if index < len(self.given.tensors):
            out = self.given.tensors[index]
            if not self.given.apart:
                self.decline(SHARED)
            if out.shape != torch.Size(shape):
                self.decline(OTHER_SHAPE)
            if out.dtype != dtype:
                self.decline(OTHER_DTYPE)
            if _may_overlap_itself(out):
                self.decline(OVERLAPS_ITSELF)
        else:
            out = self._new(shape, dtype, strides)
        self.results.append(out)
        return out

    def no_result(self) -> None:
        """The next result is None: a gradient that nobody asked for."""
        self.results.append(None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous scratch memory of this call alone."""
        out = self._new(shape, dtype, None)
        self.scratch.append(out)
        return out

    def launch(
        self,
        kernel: Any,
        grid: int,
        args: Mapping[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        early: bool = False,
    ) -> None:
        """Launch a kernel over `grid` blocks, none if it is 0, after those before it; `early` as in
        `Launch`.

        Tensors among `args` are arguments of the operator, results and scratch themselves, or
        `Pointer`s to them: no views. Other values are part of the plan, but for `Number`s.
        """
        if grid == 0:
            return
        plain = {name: _plain(value) for name, value in args.items()}
        launch = Launch(kernel, grid, plain, num_warps, num_stages, early=early)
        self.steps.append(Step(launch, dict(args)))

    def run(self) -> None:
        """Run what was recorded."""
        if self.interpreted:
            from plait.backends.cpu.interpreter import interpret

            for step in self.steps:
                interpret(step.launch)
            return
        with torch.cuda.device(self.device):
            for each in self.bound():
                each.launch_as_bound()

    def bound(self) -> list[BoundLaunch]:
        """The launches in order, compiled; the device is the current one."""
        if self._bound is None:
            self._bound = [BoundLaunch(step.launch) for step in self.steps]
        return self._bound

    def _new(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None
    ) -> torch.Tensor:
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=self.device)


def _plain(value: Any) -> Any:
    """A launch argument as Triton takes it."""
    if isinstance(value, Number):
        return value.value
    if isinstance(value, Pointer):
        return _Address(value)
    return value


class _Address:
    """A pointer argument with a dtype of its own; Triton asks for no more of a tensor."""

    def __init__(self, pointer: Pointer) -> None:
        self.tensor = pointer.tensor  # kept alive
        self.dtype = pointer.dtype or pointer.tensor.dtype
        self._offset = pointer.offset * self.dtype.itemsize

    def data_ptr(self) -> int:
        """The address in bytes."""
        return self.tensor.data_ptr() + self._offset


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two of its elements may share memory: ATen has the words for that."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


__all__ = ["RESULT_REASONS", "Call", "Declined", "Given", "Number", "Pointer", "Step"]
