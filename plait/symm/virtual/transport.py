"""Transport of virtual ranks: all memory is in one process, hosts meet through the baton."""

from __future__ import annotations

from typing import Any

import torch

from plait.backends.base import Executor
from plait.errors import RanksDisagreeError
from plait.symm.transports.base import SymmetricBuffer, Transport
from plait.symm.virtual.ranks import World


class VirtualTransport(Transport):
    """One virtual rank's view; `members` are the world ranks of the group, in group order."""

    symmetric = True

    def __init__(
        self, world: World, executor: Executor, members: tuple[int, ...], world_rank: int, name: str
    ) -> None:
        self.world, self.executor, self.members, self.name = world, executor, members, name
        self.rank, self.world_size, self.device = (
            members.index(world_rank),
            len(members),
            world.device,
        )
        self._buffers: list[SymmetricBuffer] = []

    def allocate(self, nbytes: int, label: str, *, words: bool = False) -> SymmetricBuffer:
        """Collective; the memory of data regions starts as 0xFF bytes (NaN), so that reading what
        nobody wrote shows."""
        local = torch.empty(max(nbytes, 16), dtype=torch.uint8, device=self.device)
        local.fill_(0 if words else 0xFF)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        buffer = SymmetricBuffer(local, tuple(self.exchange(local)))
        if self.world.virtual_device is not None:
            rank = self.members[self.rank]
            if words:
                self.world.virtual_device.add_signal_words(rank, local, self.members)
            else:
                self.world.virtual_device.add_region(f"{self.name}/{label}", rank, local)
        self._buffers.append(buffer)
        return buffer

    def free(self, buffer: SymmetricBuffer) -> None:
        """Forget the region; peers that still hold a view keep the memory alive."""
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            if self.world.virtual_device is not None:
                self.world.virtual_device.remove(buffer.local)

    def exchange(self, value: Any) -> list[Any]:
        """Through the world; the values are shared, not copied."""
        return self.world.exchange(self.name, self.members, value)

    def publish(self, sequence: int, signature: str) -> None:
        """Compare a call with those of the ranks that made theirs already; waits for nobody."""
        calls = self.world.calls.setdefault((self.name, sequence), {})
        calls[self.rank] = signature
        if len(set(calls.values())) > 1:
            raise RanksDisagreeError(calls)
        if len(calls) == self.world_size:
            del self.world.calls[self.name, sequence]

    def pinned(self, num_words: int) -> torch.Tensor:
        """Ordinary memory on the CPU, pinned memory beside a GPU."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def subgroup(self, ranks: tuple[int, ...], name: str) -> VirtualTransport | None:
        """Some ranks of this group, in the given order."""
        members = tuple(self.members[rank] for rank in ranks)
        world_rank = self.members[self.rank]
        if world_rank not in members:
            return None
        return VirtualTransport(self.world, self.executor, members, world_rank, name)

    def close(self) -> None:
        """Free every buffer that is left."""
        for buffer in list(self._buffers):
            self.free(buffer)


__all__ = ["VirtualTransport"]
