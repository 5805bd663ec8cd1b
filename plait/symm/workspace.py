"""The workspace of a group: two regions that all operators and layers share.

A call takes one region, in turn. Each region has its own epoch and words, so any mixture of
operators, eager calls and graph replays may use it; the second region is for speed only. Data
buffers grow when a call needs more, collectively, so only from sizes that all ranks know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from plait.errors import CapacityError
from plait.settings import settings
from plait.symm import signals
from plait.symm.transports.base import SymmetricBuffer, Transport

NUM_REGIONS = 2
BARRIER_REGION = NUM_REGIONS
_ALIGN_BYTES = 256


@dataclass
class Region:
    """One region as this rank sees it. `ctx` is what kernels get as `ctx_ptr`."""

    index: int
    rank: int
    words: tuple[torch.Tensor, ...]  # int32, per rank: this region's words
    mirror: torch.Tensor  # pinned int32[1]
    ctx: torch.Tensor  # int64
    buffer: SymmetricBuffer | None = None
    retired: list[SymmetricBuffer] = field(default_factory=list)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of data that a call may put into this region."""
        return 0 if self.buffer is None else self.buffer.nbytes

    def data(
        self, peer: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A contiguous tensor over part of `peer`'s region; bounds are checked."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if (
            offset_bytes < 0
            or offset_bytes + nbytes > self.capacity_bytes
            or offset_bytes % dtype.itemsize
        ):
            raise CapacityError(
                argument="offset_bytes",
                expected=f"an aligned range within the region's {self.capacity_bytes} bytes",
                got=f"{nbytes} bytes at {offset_bytes}",
                remedy="Reserve the region for the call's full size first.",
            )
        assert self.buffer is not None
        return self.buffer.peers[peer][offset_bytes : offset_bytes + nbytes].view(dtype).view(shape)

    def word(self, peer: int, word: int) -> torch.Tensor:
        """One word of `peer`'s region, as a tensor of one int32; bounds are checked."""
        if not 0 <= word < signals.REGION_WORDS:
            raise CapacityError(
                argument="word",
                expected=f"0 <= word < {signals.REGION_WORDS}",
                got=str(word),
                remedy="Use larger tiles or fewer chunks a call.",
            )
        return self.words[peer][word : word + 1]


class Workspace:
    """All symmetric memory of a group's operators."""

    def __init__(self, transport: Transport, status: torch.Tensor) -> None:
        self.transport = transport
        self._calls = 0
        num_words = signals.region_offset(NUM_REGIONS + 1)
        self._words = transport.allocate(num_words * 4, "signals", words=True)
        self.word_views = tuple(peer.view(torch.int32) for peer in self._words.peers)
        self._mirrors = transport.pinned(16 * (NUM_REGIONS + 1))
        self._status = status
        self.regions = [self._make_region(index) for index in range(NUM_REGIONS + 1)]

    def _make_region(self, index: int) -> Region:
        start = signals.region_offset(index)
        views = tuple(view[start : start + signals.REGION_WORDS] for view in self.word_views)
        mirror = self._mirrors[16 * index : 16 * index + 1]
        region = Region(index, self.transport.rank, views, mirror, torch.empty(0))
        region.ctx = self._context(region)
        return region

    def _context(self, region: Region) -> torch.Tensor:
        world_size = self.transport.world_size
        entries = [0] * (signals.CTX_WORDS + 2 * world_size)
        entries[signals.CTX_RANK] = self.transport.rank
        entries[signals.CTX_WORLD_SIZE] = world_size
        entries[signals.CTX_DEADLINE_NS] = int(settings().deadline_s * 1e9)
        entries[signals.CTX_STATUS] = self._status.data_ptr()
        entries[signals.CTX_MIRROR] = region.mirror.data_ptr()
        entries[signals.CTX_REGION] = signals.region_offset(region.index)
        entries[signals.CTX_WORDS : signals.CTX_WORDS + world_size] = self._words.addresses()
        if region.buffer is not None:
            entries[signals.CTX_WORDS + world_size :] = region.buffer.addresses()
        return torch.tensor(entries, dtype=torch.int64).to(self.transport.device)

    @property
    def capacity_bytes(self) -> int:
        """The most that one call may use; larger problems run in slices of M."""
        return settings().workspace_bytes // NUM_REGIONS // _ALIGN_BYTES * _ALIGN_BYTES

    def must_grow(self, nbytes: int) -> bool:
        """Whether `take(nbytes)` would allocate."""
        region = self.regions[self._calls % NUM_REGIONS]
        return region.capacity_bytes < nbytes <= self.capacity_bytes

    def take(self, nbytes: int) -> Region:
        """Collective when it must grow: the next region in turn, with room for `nbytes`.

        Every rank must call with the same `nbytes`, in the same order of calls.
        """
        if nbytes > self.capacity_bytes:
            raise CapacityError(
                argument="PLAIT_WORKSPACE_BYTES",
                expected=f"at least {nbytes * NUM_REGIONS} bytes for this call",
                got=f"{settings().workspace_bytes} bytes",
                remedy="Raise the setting, or let the operator run in slices.",
            )
        region = self.regions[self._calls % NUM_REGIONS]
        self._calls += 1
        if nbytes > region.capacity_bytes:
            self._grow(region, nbytes)
        return region

    def _grow(self, region: Region, nbytes: int) -> None:
        if _capturing(self.transport.device):
            raise CapacityError(
                argument="workspace",
                expected=f"{nbytes} bytes reserved before graph capture",
                got=f"{region.capacity_bytes} bytes",
                remedy="Call the operator once with the largest shapes before capturing.",
            )
        size = max(_round_up(nbytes), min(2 * region.capacity_bytes, self.capacity_bytes))
        self.transport.executor.synchronize()
        self.transport.exchange(None)  # no peer writes into the old buffer any more
        if region.buffer is not None:
            # A captured graph may still hold the old addresses, so the memory stays until close().
            if self.transport.device.type == "cuda":
                region.retired.append(region.buffer)
            else:
                self.transport.free(region.buffer)
        region.buffer = self.transport.allocate(size, f"region {region.index}")
        region.ctx = self._context(region)
        self.transport.exchange(None)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank, by use."""
        report = {"signals": self._words.nbytes}
        for region in self.regions[:NUM_REGIONS]:
            report[f"region {region.index}"] = region.capacity_bytes
            report["retired"] = report.get("retired", 0) + sum(
                buffer.nbytes for buffer in region.retired
            )
        return report


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


__all__ = ["BARRIER_REGION", "NUM_REGIONS", "Region", "Workspace"]
