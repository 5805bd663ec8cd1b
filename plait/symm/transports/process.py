"""Groups over torch.distributed: one process a rank.

Ranks on GPUs share memory (`torch_symm_mem.py`). Ranks on the CPU share none: their operators run
unfused, over the collectives here, which give the same bits as plait's kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from plait.backends.base import Executor
from plait.backends.commands import Program
from plait.errors import (
    DeviceError,
    GroupError,
    RankCountError,
    RanksDisagreeError,
    UnsupportedError,
)
from plait.settings import settings
from plait.symm.group import Group
from plait.symm.signals import MAX_RANKS
from plait.symm.transports.base import SymmetricBuffer, Transport
from plait.symm.transports.hosts import Hosts

_REMEDY = "Use impl='unfused' (or 'auto'), or ranks on GPUs or in plait.run_virtual."


class ProcessExecutor(Executor):
    """A CPU process outside virtual ranks: it enqueues nothing and runs no kernel."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    def num_sms(self) -> int:
        """PLAIT_CPU_BLOCKS, as for virtual ranks."""
        return settings().cpu_blocks

    def run(self, program: Program) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            argument="group",
            expected="ranks that can run kernels",
            got=f"a group of CPU processes, for the program of {program.operator}",
            remedy=_REMEDY,
        )

    def synchronize(self) -> None:
        """Nothing is ever pending."""


class ProcessTransport(Transport):
    """CPU processes: they meet and move data through gloo and share no memory.

    The collectives take and return ordinary tensors of any dtype and strides, never alias their
    input, and are not differentiable. Ranks must agree on dtypes and on the sizes that each passes.
    """

    symmetric = False

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.rank, self.world_size = hosts.rank, hosts.world_size
        self.device = torch.device("cpu")
        self.executor = ProcessExecutor()

    def allocate(self, nbytes: int, label: str, *, words: bool = False) -> SymmetricBuffer:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            argument="group",
            expected="ranks that share memory",
            got=f"a group of CPU processes, for {nbytes} bytes of {label}",
            remedy=_REMEDY,
        )

    def free(self, buffer: SymmetricBuffer) -> None:
        """Nothing to do: `allocate` gives no buffers."""

    def exchange(self, value: Any) -> list[Any]:
        """Through gloo; values are pickled, tensors arrive as copies."""
        return self.hosts.exchange(value, self.device)

    def pinned(self, num_words: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(num_words, dtype=torch.int32)

    def subgroup(self, ranks: tuple[int, ...], name: str) -> ProcessTransport | None:
        """Processes of some ranks, in the given order."""
        hosts = self.hosts.subgroup(ranks)
        return None if hosts is None else ProcessTransport(hosts)

    def close(self) -> None:
        """Give up the connections to the peers."""
        self.hosts.close()

    # --- collectives
    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's x, concatenated along `dim` (>= 0) where rank r has `sizes[r]`; bitwise."""
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        counts = [math.prod(shape) * x.element_size() for shape in shapes]
        received = self.hosts.all_gather_bytes(_as_bytes(x), counts)
        parts = [piece.view(x.dtype).view(s) for piece, s in zip(received, shapes, strict=True)]
        return torch.cat(parts, dim=dim)

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
        pieces = x.detach().to(reduce_dtype).split(list(sizes), dim)
        own = pieces[self.rank]
        counts = [own.numel() * own.element_size()] * self.world_size
        received = self.hosts.all_to_all_bytes([_as_bytes(piece) for piece in pieces], counts)
        return _ordered_sum([part.view(reduce_dtype) for part in received], out_dtype).view(
            own.shape
        )

    def all_reduce(
        self, x: torch.Tensor, reduce_dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The sum of every rank's x on every rank, rounded as by `reduce_scatter`.

        `out_dtype` defaults to the dtype of x.
        """
        flat = x.detach().reshape(-1)
        share = -(-flat.numel() // self.world_size)
        starts = [min(share * rank, flat.numel()) for rank in range(self.world_size + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(starts)]
        own = self.reduce_scatter(flat, 0, sizes, reduce_dtype, out_dtype or x.dtype)
        return self.all_gather(own, 0, sizes).view(x.shape)

    def all_to_all(
        self, x: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """Give rank p the next `input_splits[p]` rows (dim 0) of x, get `output_splits[p]` rows.

        Returns the rows from all ranks in rank order; bitwise.
        """
        pieces = x.split(list(input_splits), 0)
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        counts = [rows * row_bytes for rows in output_splits]
        received = self.hosts.all_to_all_bytes([_as_bytes(piece) for piece in pieces], counts)
        return torch.cat(received).view(x.dtype).view(sum(output_splits), *x.shape[1:])


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    # Bytes, because gloo refuses some dtypes (int16, uint16, fp8).
    plain = x.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _ordered_sum(parts: Sequence[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    dtype = parts[0].dtype
    if dtype.is_floating_point or dtype.is_complex:
        dtype = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part.to(dtype)
    return total.to(out_dtype)


# --- the group
def make_process_group(process_group: Any, device: torch.device | str | None) -> Group:
    """Collective: a Group over a torch.distributed process group (None: all processes).

    `device` is this rank's GPU or "cpu". None means the current GPU if the process group uses
    NCCL, else the CPU: ranks on GPUs whose process group is gloo name their device.

    Raises GroupError without an initialized process group that has this rank, RankCountError for
    too many ranks, DeviceError for a device type without a transport, RanksDisagreeError on every
    rank if some are on GPUs and some are not.
    """
    global_ranks = _global_ranks(process_group)
    chosen = _choose_device(process_group, device)
    hosts = Hosts(global_ranks)
    kinds = hosts.exchange(chosen.type, torch.device("cpu"))
    if len(set(kinds)) > 1:
        hosts.close()
        raise RanksDisagreeError(
            {rank: f"from_process_group device={kind}" for rank, kind in enumerate(kinds)},
            "Give every rank a GPU, or every rank 'cpu'.",
        )
    if chosen.type == "cuda":
        from plait.symm.transports.torch_symm_mem import TorchSymmMemTransport

        return Group(hosts.name, TorchSymmMemTransport(hosts, chosen))
    return Group(hosts.name, ProcessTransport(hosts))


def _global_ranks(process_group: Any) -> tuple[int, ...]:
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupError(
            argument="process_group",
            expected="an initialized torch.distributed",
            got="none",
            remedy="Call torch.distributed.init_process_group first, or use plait.run_virtual.",
        )
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            argument="process_group",
            expected="a process group that has this rank",
            got=f"one without rank {dist.get_rank()}",
            remedy="Call from_process_group on the members only.",
        )
    ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    if len(ranks) > MAX_RANKS:
        raise RankCountError(
            argument="process_group",
            expected=f"at most {MAX_RANKS} ranks",
            got=str(len(ranks)),
            remedy="Make a process group of fewer ranks.",
        )
    return ranks


def _choose_device(process_group: Any, device: torch.device | str | None) -> torch.device:
    if device is None:
        uses_nccl = "nccl" in str(dist.get_backend_config(process_group))
        device = "cuda" if uses_nccl and torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise DeviceError("device", "a GPU or 'cpu'", chosen, "Pass this rank's device.")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


__all__ = ["ProcessExecutor", "ProcessTransport", "make_process_group"]
