"""Runs the live rank's programs together with what its emulated peers do, on a CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from plait.backends.commands import Launch, Program
from plait.backends.nvidia.driver import Driver
from plait.backends.nvidia.executor import CudaExecutor
from plait.errors import CapacityError
from plait.symm.transports.emulation import EmulatedProgram, Emulation
from plait.symm.transports.link import Link

_MAX_LOADED = 4096


class DeviceTables:
    """The pacer's tables on a device, kept as long as the group: graphs hold their addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(self, key: tuple[Any, ...], build: Callable[[], list[list[int]]]) -> torch.Tensor:
        """The int64 tensor [4, entries] made of `build()` (one idle entry if that is empty).

        CapacityError during graph capture if the same call was never made before.
        """
        table = self._tables.get(key)
        if table is None:
            if torch.cuda.is_current_stream_capturing():
                raise CapacityError(
                    argument="link",
                    expected="a call whose peers were emulated before graph capture",
                    got="the first call of its shapes in this region, during capture",
                    remedy="Call the operator twice (once a region) before capturing.",
                )
            rows = torch.tensor(build() or [[0, 0, 0, 0]], dtype=torch.int64)
            table = self._tables[key] = rows.t().contiguous().to(self._device)
            torch.cuda.current_stream(self._device).synchronize()  # other streams read it as well
        return table


class EmulatedExecutor(CudaExecutor):
    """The live rank's streams, and a stream "peers" for what its peers do.

    Every program is rewritten by `Emulation` before it runs, and all of its kernels are loaded
    before the first is launched: the pacer waits for kernels that are launched after it.
    """

    def __init__(
        self,
        device: torch.device,
        link: Link,
        world_size: int,
        is_peer: Callable[[torch.Tensor], bool],
    ) -> None:
        super().__init__(device)
        self.emulation = Emulation(link, world_size, DeviceTables(device), is_peer)
        self._alone = False
        self._loaded: set[tuple[Hashable, ...]] = set()

    @property
    def num_sms(self) -> int:
        """All but the pacer's, so that every block that waits for it is resident beside it."""
        return max(1, super().num_sms - (self.emulation.world_size > 1))

    @property
    def driver(self) -> Driver | None:
        """None inside `communication_only`, whose programs are not those of other calls."""
        return None if self._alone else super().driver

    @contextlib.contextmanager
    def communication_only(self) -> Iterator[None]:
        """Calls inside run the transfers of their programs and compute nothing.

        What they return is undefined. For T_communication_alone, also as a captured graph.
        """
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def transform(self, program: Program) -> Program:
        """The program with its peers' part, made once a program."""
        if isinstance(program, EmulatedProgram):
            return program
        kind = "alone" if self._alone else "emulated"
        if kind not in program.derived:
            make = self.emulation.communication_alone if self._alone else self.emulation.emulate
            program.derived[kind] = make(program)
        return program.derived[kind]

    def run(self, program: Program) -> None:
        """Load what is not loaded, then enqueue."""
        program = self.transform(program)
        kinds = {_specialization(launch) for launch in program.launches()}
        if not kinds <= self._loaded:
            self.prepare(program)
            if len(self._loaded) > _MAX_LOADED:
                self._loaded.clear()
            self._loaded |= kinds
        super().run(program)


def _specialization(launch: Launch) -> tuple[Hashable, ...]:
    """At least as fine as what Triton compiles one kernel for."""
    args = tuple((name, _kind_of(value)) for name, value in launch.args.items())
    return (id(launch.kernel), launch.num_warps, launch.num_stages, args)


def _kind_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        return str(value.base.dtype), tuple(value.block_shape)
    if isinstance(value, (bool, int)):
        return value  # a compile-time value or a size: here they look alike
    return str(value)


__all__ = ["DeviceTables", "EmulatedExecutor"]
