"""What the demo needs of plait's operators, so that tests can pass pure torch in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class RankGroup(Protocol):
    """The part of `plait.symm.Group` that the demo uses."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...


class Ops(Protocol):
    """The operators with the options that the demo uses; `rows_per_rank` is always given."""

    def ag_gemm(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        group: Any,
        activation: str | None = None,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """x [M_r, K], weight [N_r, K] or two of them: activation(gathered x @ weight.T + bias)."""
        ...

    def gemm_rs(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        group: Any,
        rows_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """x [M, K_r], weight [N, K_r]: own rows [M_r, N] of the sum over ranks, plus bias."""
        ...

    def all_gather(
        self, x: torch.Tensor, *, group: Any, rows_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """x [M_r, N]: the rows of all ranks [M, N]."""
        ...

    def last_run(self) -> Any:
        """`.impl` and `.reason` of the calling rank's last operator."""
        ...


@dataclass(frozen=True)
class Ran:
    """What one operator call did: its shapes on this rank and the implementation that ran."""

    operator: str
    shape: str
    implementation: str
    reason: str

    @classmethod
    def last(cls, ops: Ops, operator: str, shape: str) -> Ran:
        """Describe the calling rank's last operator call."""
        run = ops.last_run()
        return cls(operator, shape, str(run.impl), str(run.reason or ""))


def split_evenly(num: int, world_size: int) -> list[int]:
    """`num` rows over the ranks; the first ranks take one more: 10 over 4 is [3, 3, 2, 2]."""
    base, more = divmod(num, world_size)
    return [base + (rank < more) for rank in range(world_size)]


def shard_range(num: int, group: RankGroup) -> slice:
    """The slice of `num` features that this rank holds; sizes differ by at most one."""
    return slice(group.rank * num // group.world_size, (group.rank + 1) * num // group.world_size)


def own_rows(num: int, group: RankGroup) -> tuple[list[int], slice]:
    """Rows per rank of `num` token rows, and the slice of them that this rank holds."""
    rows = split_evenly(num, group.world_size)
    start = sum(rows[: group.rank])
    return rows, slice(start, start + rows[group.rank])


def dims(tensor: torch.Tensor) -> str:
    """`24x384` for a tensor of shape [24, 384]."""
    return "x".join(str(size) for size in tensor.shape)


__all__ = ["Ops", "Ran", "RankGroup", "dims", "own_rows", "shard_range", "split_evenly"]
