"""A transport: whose memory is where, and how hosts meet. One interface, one conformance test."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from plait.backends.base import Executor


@dataclass(frozen=True, eq=False)  # identity: tensors do not compare to one bool
class SymmetricBuffer:
    """The same allocation on every rank.

    `local` is this rank's uint8 memory; `peers[p]` views rank p's (peers[rank] is local), and its
    address is valid in this rank's kernels and copies.
    """

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return self.local.numel()

    def addresses(self) -> list[int]:
        """Each rank's address, as this rank's kernels use it."""
        return [peer.data_ptr() for peer in self.peers]


class LinkSpeed(NamedTuple):
    """What a rank sends through: 10^9 bytes a second, one way, to all peers together; and the time
    from the last byte to its signal."""

    gb_s: float
    latency_us: float


class Transport(abc.ABC):
    """Memory and meetings of one rank's view of a group."""

    rank: int
    world_size: int
    device: torch.device
    executor: Executor
    symmetric: bool  # whether `allocate` works: fused operators need it
    one_process: bool = False  # no other process has a rank that must decide alike

    @abc.abstractmethod
    def allocate(self, nbytes: int, label: str, *, words: bool = False) -> SymmetricBuffer:
        """Collective: `nbytes` of zeroed (`words`) or uninitialized memory on every rank."""

    @abc.abstractmethod
    def free(self, buffer: SymmetricBuffer) -> None:
        """Local: give up this rank's part."""

    @abc.abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Collective on the host: every rank's `value`, in rank order. Tensors are allowed."""

    @abc.abstractmethod
    def pinned(self, num_words: int) -> torch.Tensor:
        """Zeroed int32 memory that both host and kernels reach at one address."""

    @abc.abstractmethod
    def subgroup(self, ranks: tuple[int, ...], name: str) -> Transport | None:
        """Collective over this group: the transport of some of its ranks, None outside."""

    @abc.abstractmethod
    def close(self) -> None:
        """Local: release what is left. Needs no peer."""

    def link_speed(self) -> LinkSpeed | None:
        """The link between the ranks; None (unknown) leaves `impl="auto"` at the fused kernel.

        The same on every rank. A transport of several processes that answers must also see to it
        that ranks have equal shares of N (AG+GEMM) or K, by which "auto" decides as well.
        """
        return None

    # --- collectives: of transports that are not symmetric; the others run plait's own kernels
    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's x, concatenated along `dim` (>= 0) where rank r has `sizes[r]`; bitwise."""
        raise NotImplementedError(f"all_gather of {type(self).__name__}")

    def reduce_scatter(
        self,
        x: torch.Tensor,
        dim: int,
        sizes: Sequence[int],
        reduce_dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """This rank's `sizes[rank]` slices along `dim` of the sum of every rank's x.

        Partial sums travel in `reduce_dtype`, are summed in fp32 (fp64 if they are fp64) in rank
        order, and rounded once, to `out_dtype`.
        """
        raise NotImplementedError(f"reduce_scatter of {type(self).__name__}")

    def all_reduce(
        self, x: torch.Tensor, reduce_dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum of every rank's x on every rank, rounded as by `reduce_scatter`.

        `out_dtype` defaults to the dtype of x.
        """
        raise NotImplementedError(f"all_reduce of {type(self).__name__}")

    def all_to_all(
        self, x: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """Give rank p the next `input_splits[p]` rows (dim 0) of x, get `output_splits[p]` rows.

        Returns the rows from all ranks in rank order; bitwise.
        """
        raise NotImplementedError(f"all_to_all of {type(self).__name__}")


__all__ = ["LinkSpeed", "SymmetricBuffer", "Transport"]
