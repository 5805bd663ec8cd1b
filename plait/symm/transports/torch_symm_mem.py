"""Ranks on GPUs, one process each: memory through PyTorch's symmetric memory.

plait signals through words of its own: the signal pad that PyTorch allocates beside every buffer is
small and shared with everybody else who uses it. Several processes on one GPU need
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in their environment.

PyTorch numbers the allocations of all groups of a process together: the ranks of a group must have
allocated equally often before, also in other groups, or `allocate` ends in a timeout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from plait.backends.nvidia.executor import CudaExecutor
from plait.symm.transports.base import SymmetricBuffer, Transport
from plait.symm.transports.hosts import Hosts


class TorchSymmMemTransport(Transport):
    """One process's GPU memory, mapped into its peers and theirs into its own."""

    symmetric = True

    def __init__(self, hosts: Hosts, device: torch.device) -> None:
        self.hosts, self.device = hosts, device
        self.rank, self.world_size = hosts.rank, hosts.world_size
        self.executor = CudaExecutor(device)
        # By address: views of peers' memory hold nothing alive, the handle does.
        self._buffers: dict[int, tuple[SymmetricBuffer, Any]] = {}
        # PyTorch finds who meets, and their store, by the name of a process group.
        self._group_name: Any = hosts.name
        self._group = dist.ProcessGroup(hosts.store, self.rank, self.world_size)
        _register_process_group(self._group_name, self._group)

    def allocate(self, nbytes: int, label: str, *, words: bool = False) -> SymmetricBuffer:
        """Collective; blocks the host and cannot be captured."""
        nbytes = max(nbytes, 16)
        with torch.cuda.device(self.device):
            # Not symm_mem.empty: that cuts tensors out of a pool, at offsets that may differ from
            # rank to rank and that get_buffer leaves to the caller.
            local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device)
            if words:
                # Before any peer, which can write once the rendezvous is over.
                local.zero_()
                torch.cuda.current_stream().synchronize()
            handle = _SymmetricMemory.rendezvous(local, self._group_name)
            views = [
                handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(self.world_size)
            ]
        own, given = views[self.rank].data_ptr(), local.data_ptr()
        assert own == given, f"{label}: rank {self.rank} is mapped at {own}, allocated at {given}"
        views[self.rank] = local
        buffer = SymmetricBuffer(local, tuple(views))
        self._buffers[given] = buffer, handle
        return buffer

    def free(self, buffer: SymmetricBuffer) -> None:
        """Unmap when the last tensor over it is gone; peers that map it keep the memory."""
        self._buffers.pop(buffer.local.data_ptr(), None)

    def exchange(self, value: Any) -> list[Any]:
        """Through gloo; values are pickled, tensors arrive as copies on this rank's device."""
        return self.hosts.exchange(value, self.device)

    def pinned(self, num_words: int) -> torch.Tensor:
        """Pinned host memory, which kernels reach at the same address."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def subgroup(self, ranks: tuple[int, ...], name: str) -> TorchSymmMemTransport | None:
        """GPUs of some ranks, in the given order, with memory and a stream of their own."""
        hosts = self.hosts.subgroup(ranks)
        return None if hosts is None else TorchSymmMemTransport(hosts, self.device)

    def close(self) -> None:
        """Let own work end (its waits have deadlines), then give up all memory."""
        if self._buffers:
            self.executor.synchronize()
        self._buffers.clear()
        if self._group is not None:
            _unregister_process_group(self._group_name)
        self._group = None
        self.hosts.close()


__all__ = ["TorchSymmMemTransport"]
