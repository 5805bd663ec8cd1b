"""What the demo asks of a set of ranks, so that tests can run it on threads and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from plait.cli.demo.ops import Ops


@dataclass(frozen=True)
class Traffic:
    """Bytes that went to another rank and waits in kernels, of all ranks together."""

    bytes_moved: int = 0
    waits: int = 0


@dataclass(frozen=True)
class EngineRun:
    """Results of all ranks in rank order, and what was observed; None: cannot be observed there.

    `traffic` is by operator as the demo called it; `total` has the backward passes as well.
    """

    results: list[Any]
    traffic: dict[str, Traffic] | None
    total: Traffic | None


class Engine(Protocol):
    """A set of ranks. `ops` are their operators, `device` is where the ranks compute."""

    ops: Ops
    device: torch.device

    def run(self, fn: Callable[[Any], Any]) -> EngineRun:
        """Run `fn(group)` on every rank; a race or a deadlock raises."""
        ...

    def record(self, fn: Callable[[Any], Any], folder: Path, name: str) -> list[Path]:
        """Run `fn` and write its timeline into `folder`: Perfetto JSON, a PNG an operator."""
        ...


__all__ = ["Engine", "EngineRun", "Traffic"]
