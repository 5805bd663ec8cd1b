"""Ranks as threads and operators as plain torch, in place of plait's engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from plait.cli.demo.engine import EngineRun, Traffic


@dataclass
class FakeGroup:
    """One rank; `exchange` gives every rank the values of all."""

    rank: int
    world_size: int
    slots: list[Any]
    barrier: threading.Barrier
    device: torch.device = field(default_factory=lambda: torch.empty(0).device)

    def exchange(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait(timeout=60)
        values = list(self.slots)
        self.barrier.wait(timeout=60)
        return values


class _Gather(torch.autograd.Function):
    """Rows of all ranks; the gradient is summed over the ranks and cut into rows again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: FakeGroup) -> torch.Tensor:
        parts = group.exchange(x.detach())
        ctx.group, ctx.rows = group, [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(ctx.group, grads[0]).split(ctx.rows)[ctx.group.rank], None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: FakeGroup, rows: Sequence[int]) -> torch.Tensor:
        ctx.group = group
        return _sum(group, x.detach()).split(list(rows))[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(ctx.group.exchange(grads[0])), None, None


def _sum(group: FakeGroup, x: torch.Tensor) -> torch.Tensor:
    """In fp32 and rank order, rounded once more, as plait adds its partials."""
    total = torch.stack([part.float() for part in group.exchange(x)]).sum(0)
    return total.to(x.dtype)


@dataclass(frozen=True)
class FakeRun:
    operator: str
    impl: str = "fake"
    reason: str = ""


class FakeOps:
    """The operators by their definition; `wrong` names one that gives a wrong result."""

    def __init__(self, wrong: str | None) -> None:
        self.wrong = wrong
        self.local = threading.local()

    def _done(self, operator: str, result: torch.Tensor) -> torch.Tensor:
        self.local.run = FakeRun(operator)
        return result * 1.001 if operator == self.wrong else result

    def last_run(self) -> FakeRun:
        return self.local.run

    def ag_gemm(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        group: FakeGroup,
        activation: str | None = None,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        rows = group.exchange(len(x))
        assert list(rows_per_rank or [len(x)] * group.world_size) == rows
        gathered = _Gather.apply(x, group)
        if activation == "swiglu":
            gate, up = weight
            result = F.silu(F.linear(gathered, gate)) * F.linear(gathered, up)
        else:
            assert activation == "gelu"
            result = F.gelu(F.linear(gathered, weight, bias))
        return self._done("ag_gemm", result)

    def gemm_rs(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        group: FakeGroup,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        rows = rows_per_rank or [len(x) // group.world_size] * group.world_size
        result = _Scatter.apply(F.linear(x, weight), group, rows)
        return self._done("gemm_rs", result if bias is None else result + bias)

    def all_gather(
        self, x: torch.Tensor, *, group: FakeGroup, rows_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        result = _Gather.apply(x, group)
        assert rows_per_rank is None or sum(rows_per_rank) == len(result)
        return self._done("all_gather", result)


class FakeEngine:
    """Runs `fn(group)` in one thread a rank and reports made-up traffic."""

    def __init__(self, world_size: int, wrong: str | None = None) -> None:
        self.world_size = world_size
        self.ops = FakeOps(wrong)
        self.device = torch.empty(0).device

    def groups(self) -> list[FakeGroup]:
        slots: list[Any] = [None] * self.world_size
        barrier = threading.Barrier(self.world_size)
        return [FakeGroup(rank, self.world_size, slots, barrier) for rank in range(self.world_size)]

    def run(self, fn: Callable[[Any], Any]) -> EngineRun:
        def body(group: FakeGroup) -> Any:
            try:
                return fn(group)
            except BaseException:
                group.barrier.abort()  # ends the other ranks' waits
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            results = list(pool.map(body, self.groups()))
        names = ("ag_gemm", "gemm_rs", "all_gather")
        return EngineRun(results, {name: Traffic(2048, 7) for name in names}, Traffic(6144, 21))

    def record(self, fn: Callable[[Any], Any], folder: Path, name: str) -> list[Path]:
        self.run(fn)
        return [folder / f"{name}.json"]


__all__ = ["FakeEngine"]
