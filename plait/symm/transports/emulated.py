"""One live rank; its peers are memory of the same process.

For measurements with the whole GPU behind one rank: what peers send arrives at the speed of a
`Link`. Answers are not those of real ranks: what "arrives" is whatever lies in memory already.
docs/design/emulation.md says what is modelled and what is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from plait.backends.base import Executor
from plait.backends.commands import Program
from plait.device import device_info
from plait.errors import RankCountError, UnsupportedError
from plait.symm.signals import MAX_RANKS
from plait.symm.transports.base import LinkSpeed, SymmetricBuffer, Transport
from plait.symm.transports.link import Link

_made = itertools.count()


class RefusingExecutor(Executor):
    """On the CPU nobody plays the peers: programs are refused."""

    def __init__(self, device: torch.device, link: Link) -> None:
        self.device, self.link = device, link

    @property
    def num_sms(self) -> int:
        """As for one virtual rank."""
        return device_info(self.device).num_sms

    def run(self, program: Program) -> NoReturn:
        """Raises UnsupportedError, where a kernel would wait for ever for its peers."""
        raise UnsupportedError(
            argument="group",
            expected="emulated peers on a GPU",
            got=f"emulated peers over link {str(self.link)!r} on the CPU, for {program.operator}",
            remedy="Only a GPU's time is emulated: use plait.run_virtual on the CPU.",
        )

    def synchronize(self) -> None:
        """Nothing ever runs."""


class EmulatedTransport(Transport):
    """The live rank's view of itself and `world_size - 1` emulated peers."""

    symmetric = True
    one_process = True

    def __init__(self, world_size: int, link: Link, device: torch.device, rank: int = 0) -> None:
        self._speed = LinkSpeed(link.gb_s, link.latency_us)
        self.rank, self.world_size, self.link, self.device = rank, world_size, link, device
        self._buffers: list[SymmetricBuffer] = []
        self.executor: Executor = RefusingExecutor(device, link)
        if device.type == "cuda":
            from plait.symm.transports.emulated_executor import EmulatedExecutor

            self.executor = EmulatedExecutor(device, link, world_size, self.is_peer)

    def link_speed(self) -> LinkSpeed:
        """The link's own figures; over `pcie` 55 GB/s and 3 us.

        That is one way alone: copies both ways at once reach 41 GB/s each, measured on one H200.
        """
        return self._speed

    def is_peer(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of an emulated peer."""
        address = tensor.data_ptr()
        return any(
            view.data_ptr() <= address < view.data_ptr() + view.numel()
            for buffer in self._buffers
            for peer, view in enumerate(buffer.peers)
            if peer != self.rank
        )

    def allocate(self, nbytes: int, label: str, *, words: bool = False) -> SymmetricBuffer:
        """All ranks' memory at once: data as the link says, words always on the device."""
        pinned = self.link.kind == "pcie" and self.device.type == "cuda" and not words
        views = []
        for peer in range(self.world_size):
            if pinned and peer != self.rank:
                view = torch.empty(max(nbytes, 16), dtype=torch.uint8, pin_memory=True)
            else:
                view = torch.empty(max(nbytes, 16), dtype=torch.uint8, device=self.device)
            views.append(view.zero_() if words else view)
        buffer = SymmetricBuffer(views[self.rank], tuple(views))
        self._buffers.append(buffer)
        return buffer

    def free(self, buffer: SymmetricBuffer) -> None:
        """Forget every rank's part."""
        self._buffers = [each for each in self._buffers if each is not buffer]

    def exchange(self, value: Any) -> list[Any]:
        """Each peer answers what the live rank gave; nothing is copied."""
        return [value] * self.world_size

    def pinned(self, num_words: int) -> torch.Tensor:
        """Ordinary memory on the CPU, pinned memory beside a GPU."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def subgroup(self, ranks: Sequence[int], name: str) -> EmulatedTransport | None:
        """Some of the ranks; None without the live one."""
        if self.rank not in ranks:
            return None
        return EmulatedTransport(len(ranks), self.link, self.device, list(ranks).index(self.rank))

    def close(self) -> None:
        """Give up all ranks' memory."""
        self._buffers.clear()


def make_emulated_transport(
    world_size: int, link: str, device: torch.device | str | None
) -> tuple[str, EmulatedTransport]:
    """The name and transport of a new emulated group; see `Group.emulated`."""
    is_int = isinstance(world_size, int) and not isinstance(world_size, bool)
    if not is_int or not 1 <= world_size <= MAX_RANKS:
        raise RankCountError(
            argument="world_size",
            expected=f"an int from 1 to {MAX_RANKS}",
            got=repr(world_size),
            remedy="Choose the number of ranks, the live one included.",
        )
    parsed = Link.parse(link)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    device_info(chosen)  # raises DeviceError for a type that plait has no backend for
    name = f"emulated {world_size} over {parsed} #{next(_made)}"
    return name, EmulatedTransport(world_size, parsed, chosen)


__all__ = ["EmulatedTransport", "RefusingExecutor", "make_emulated_transport"]
