"""Commands a rank enqueues: what an operator's plan is made of.

A plan builds a list of these without touching a GPU; an executor runs the list.
`"main"` is the caller's stream, `"comm"` the group's one communication stream, `"peers"` the stream
of emulated peers (no operator enqueues there). Docs: docs/design/foundation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

StreamName = Literal["main", "comm", "peers"]


@dataclass(frozen=True)
class Launch:
    """One Triton kernel launch: `kernel` is a `@triton.jit` function, `args` maps its parameter
    names (constexprs included) to values, `grid` is the number of blocks of a 1-D grid.

    `early`: the kernel may start while the one before it on the stream still runs (programmatic
    dependent launch, sm_90 and up), and itself waits (`intrinsics.grid_wait`) before it reads.
    `max_registers`: of a thread, where several blocks must fit an SM.
    """

    kernel: Any
    grid: int
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    stream: StreamName = "main"
    early: bool = False
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Triton's options of the launch, as keyword arguments."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.early:
            options["launch_pdl"] = True
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


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


@dataclass(frozen=True, eq=False)  # identity: tensors do not compare to one bool
class Arrival:
    """One signal that a peer sets on this rank during a call, and the bytes before it.

    `word` is this rank's signal word. `dst` is where a peer's copy lands in this rank's region and
    `src` the same place in the peer's own memory; both None where a peer's kernel stores a tile.
    `after` is the word of a peer that this rank itself sets when it has sent the mirrored piece,
    None where the piece is ready when the call opens.
    """

    peer: int
    word: torch.Tensor
    nbytes: int
    dst: torch.Tensor | None = None
    src: torch.Tensor | None = None
    after: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What peers put into one region of this rank during a call, for emulated peers.

    Ranks with real peers never look at it, so it is described, not built: `build()` lists the
    arrivals in the order in which the link delivers them. `key` says all that decides their words,
    sizes and order within the group, `ctx` and `mirror` are those of the region.
    """

    ctx: torch.Tensor
    mirror: torch.Tensor
    key: tuple[Hashable, ...]
    build: Callable[[], list[Arrival]]


Step: TypeAlias = Command | Arrivals


@dataclass
class Program:
    """A list of commands with the operator's name, as shown in timelines and errors.

    `arrivals` are for executors with emulated peers; others ignore them. `derived` holds programs
    that an executor made of this one.
    """

    operator: str
    commands: list[Command] = field(default_factory=list)
    members: tuple[int, ...] = ()  # the ranks that take part, where signals are exchanged
    arrivals: list[Arrivals] = field(default_factory=list)
    derived: dict[str, Program] = field(default_factory=dict, repr=False, compare=False)

    def add(self, *steps: Step) -> Program:
        """Append commands and arrivals, and return self."""
        for step in steps:
            if isinstance(step, Arrivals):
                self.arrivals.append(step)
            else:
                self.commands.append(step)
        self.derived.clear()
        return self

    def launches(self) -> list[Launch]:
        """The kernel launches, in order."""
        return [c for c in self.commands if isinstance(c, Launch)]


__all__ = [
    "Arrival",
    "Arrivals",
    "Call",
    "Command",
    "Copy",
    "Launch",
    "Program",
    "Signal",
    "Step",
    "StreamName",
    "StreamWait",
]
