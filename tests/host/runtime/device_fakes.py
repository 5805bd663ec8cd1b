"""An executor, its driver and bound launches that work on host memory and note what they are told.

Copies happen at once, so values can be compared; kernels and events are only noted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from plait.backends.base import Executor
from plait.backends.commands import Launch, Program
from plait.backends.nvidia.driver import Lane
from plait.symm.group import Group
from plait.symm.transports.emulated import EmulatedTransport
from plait.symm.transports.link import Link

MAIN = 70  # handle of the caller's stream
HANDLES = {"comm": 71, "peers": 72}


class FakeDriver:
    """The driver's functions on host memory."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fails_with = 0
        self.num_events = 0

    def enter_thread(self, device_index: int) -> None: ...

    def lane(self, raw: int) -> Lane:
        return Lane(raw, raw)

    def reaches(self, tensor: torch.Tensor) -> bool:
        return True

    def pointer(self, address: int) -> int:
        return address

    def event(self, owner: object) -> int:
        self.num_events += 1
        return self.num_events

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> tuple[int]:
        ctypes.memmove(dst, src, num_bytes)
        self.log.append(("copy", num_bytes, stream))
        return (self.fails_with,)

    def box(self, dst_pitch: int, src_pitch: int, width: int, height: int) -> dict[str, int]:
        return {"dst_pitch": dst_pitch, "src_pitch": src_pitch, "width": width, "height": height}

    def place(self, box: dict[str, int], dst: int, src: int) -> None:
        box.update(dst=dst, src=src)

    def copy_rows(self, box: dict[str, int], stream: int) -> tuple[int]:
        for row in range(box["height"]):
            dst, src = (box[end] + row * box[f"{end}_pitch"] for end in ("dst", "src"))
            ctypes.memmove(dst, src, box["width"])
        self.log.append(("rows", box["height"], box["width"], stream))
        return (0,)

    def record(self, event: int, stream: int) -> tuple[int]:
        self.log.append(("record", event, stream))
        return (0,)

    def wait(self, stream: int, event: int, flags: int) -> tuple[int]:
        self.log.append(("wait", event, stream))
        return (0,)

    def raise_for(self, error: int, function: str) -> None:
        if error:
            raise RuntimeError(f"{function}: {error}")


class FakeExecutor(Executor):
    """Prepares programs; the ordinary way only counts them."""

    def __init__(self) -> None:
        self.capturing, self.captured = False, []
        self.device, self.index, self.driver = torch.device("cpu"), 0, FakeDriver()
        self.ran: list[Program] = []
        self.num_transformed = 0

    @property
    def num_sms(self) -> int:
        return 4

    def transform(self, program: Program) -> Program:
        self.num_transformed += 1
        return program

    def run(self, program: Program) -> None:
        self.ran.append(program)

    def synchronize(self) -> None: ...

    def keep_if_captured(self, what: object) -> None:
        if self.capturing:
            self.captured.append(what)

    def is_current(self) -> bool:
        return True

    def current_raw_stream(self) -> int:
        return MAIN

    def stream(self, name: str) -> Any:
        return SimpleNamespace(cuda_stream=HANDLES[name], name=name)


LAUNCHES: list[tuple[str, int, dict[str, Any]]] = []  # (kernel, stream, addresses) of all FakeBound


@dataclass
class FakeBound:
    """A compiled kernel: descriptors are encoded as ("at", address)."""

    launch: Launch | None
    STREAM = 3
    compiled: str = "compiled"
    arguments: list[Any] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    encoders: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        launch, self.launch = self.launch, None  # which holds the first call's tensors
        assert launch is not None
        self.arguments = [launch.grid, 1, 1, None]
        for name, value in launch.args.items():
            base = getattr(value, "base", value)
            if isinstance(base, torch.Tensor):
                self.slots[name] = len(self.arguments)
                if base is not value:
                    self.encoders[name] = lambda address: ("at", address)
                value = ("at", base.data_ptr()) if base is not value else base.data_ptr()
            self.arguments.append(value)
        self.name = getattr(launch.kernel, "__name__", str(launch.kernel))

    def raw(self, *arguments: Any) -> None:
        addresses = {name: arguments[slot] for name, slot in self.slots.items()}
        LAUNCHES.append((self.name, arguments[3], addresses))


def fake_group(world_size: int, name: str) -> Group:
    """One rank of a group whose peers are host memory and whose executor is a FakeExecutor."""
    transport = EmulatedTransport(world_size, Link.parse("paced:360"), torch.device("cpu"))
    transport.executor = FakeExecutor()
    return Group(name, transport)


__all__ = ["HANDLES", "LAUNCHES", "MAIN", "FakeBound", "FakeDriver", "FakeExecutor", "fake_group"]
