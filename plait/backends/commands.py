"""Commands a rank enqueues: what an operator's plan is made of.

A plan builds a list of these without touching a GPU; an executor runs the list.
`"main"` is the caller's stream, `"comm"` the group's one communication stream.
Docs: docs/design/foundation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

StreamName = Literal["main", "comm"]


@dataclass(frozen=True)
class Launch:
    """One Triton kernel launch: `kernel` is a `@triton.jit` function, `args` maps its parameter
    names (constexprs included) to values, `grid` is the number of blocks of a 1-D grid."""

    kernel: Any
    grid: int
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    stream: StreamName = "main"


@dataclass(frozen=True)
class Copy:
    """`dst.copy_(src)` by a copy engine: same shape and dtype, any strides, own or peer memory."""

    dst: torch.Tensor
    src: torch.Tensor
    stream: StreamName = "comm"


@dataclass(frozen=True)
class Signal:
    """A 4-byte copy-engine copy from this region's pinned mirror into one signal word.

    Ordered after every earlier command of its stream: whoever acquires the word also sees the data
    of the copies before it. The addresses are constant and the value advances on graph replay.
    """

    word: torch.Tensor
    mirror: torch.Tensor
    stream: StreamName = "comm"


@dataclass(frozen=True)
class StreamWait:
    """Everything enqueued on `stream` after this waits for all that `on` holds now."""

    stream: StreamName
    on: StreamName


@dataclass(frozen=True)
class Call:
    """Host-enqueued torch work on `main` between launches (a plain matmul, a reduction).

    `fn` takes no arguments and only enqueues; it must not wait for another rank.
    """

    fn: Any
    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()
    label: str = "torch"


Command: TypeAlias = Launch | Copy | Signal | StreamWait | Call


@dataclass
class Program:
    """A list of commands with the operator's name, as shown in timelines and errors."""

    operator: str
    commands: list[Command] = field(default_factory=list)
    members: tuple[int, ...] = ()  # the ranks that take part, where signals are exchanged

    def add(self, *commands: Command) -> Program:
        """Append commands and return self."""
        self.commands.extend(commands)
        return self

    def launches(self) -> list[Launch]:
        """The kernel launches, in order."""
        return [c for c in self.commands if isinstance(c, Launch)]


__all__ = ["Call", "Command", "Copy", "Launch", "Program", "Signal", "StreamName", "StreamWait"]
