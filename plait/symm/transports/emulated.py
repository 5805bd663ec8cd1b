"""One live rank; its peers are memory of the same process.

For measurements with the whole GPU behind one rank: what is sent goes somewhere real, at the speed
of a `Link`. Answers are not those of real ranks, because every peer repeats the live one. The
pacer, which signals for the peers at the link's speed, is not there yet: operators raise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from plait.backends.base import Executor
from plait.backends.commands import Program
from plait.device import device_info
from plait.errors import ArgumentError, RankCountError, UnsupportedError
from plait.symm.signals import MAX_RANKS
from plait.symm.transports.base import SymmetricBuffer, Transport

_made = itertools.count()


@dataclass(frozen=True)
class Link:
    """What stands between the live rank and its peers.

    `pcie`: peers' memory is pinned host memory, the copy engine is the link. `paced`: it is on the
    same GPU, and `bandwidth_gb_s` (10^9 bytes a second, one way) is enforced; with `traffic`
    copies in the background move the bytes as well.
    """

    kind: Literal["pcie", "paced"]
    bandwidth_gb_s: float | None = None
    traffic: bool = False

    @staticmethod
    def parse(text: str) -> Link:
        """From "pcie", "paced:360" or "paced:160+traffic"; ArgumentError for any other text."""
        if text == "pcie":
            return Link("pcie")
        kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        number = rest.removesuffix("+traffic")
        bandwidth = _positive(number) if kind == "paced" else None
        if bandwidth is None:
            raise ArgumentError(
                argument="link",
                expected="'pcie', or 'paced:' and GB/s above 0, with or without '+traffic'",
                got=repr(text),
                remedy="Write for example 'paced:360' or 'paced:160+traffic'.",
            )
        return Link("paced", bandwidth, number != rest)

    def __str__(self) -> str:
        if self.kind == "pcie":
            return "pcie"
        return f"paced:{self.bandwidth_gb_s:g}" + ("+traffic" if self.traffic else "")


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


class EmulatedExecutor(Executor):
    """The live rank's device. Without the pacer nobody signals back, so programs are refused."""

    def __init__(self, device: torch.device, link: Link) -> None:
        self.device, self.link = device, link

    @property
    def num_sms(self) -> int:
        """All of the device: the live rank shares it with nobody."""
        return device_info(self.device).num_sms

    def run(self, program: Program) -> NoReturn:
        """Raises UnsupportedError, where a kernel would wait for ever for its peers."""
        raise UnsupportedError(
            argument="group",
            expected="ranks that can run operators",
            got=f"emulated peers over link {str(self.link)!r}, for {program.operator}",
            remedy="The pacer that answers for emulated peers is not part of this release: "
            "use plait.run_virtual or real ranks.",
        )

    def synchronize(self) -> None:
        """Wait for what the caller itself has enqueued."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class EmulatedTransport(Transport):
    """The live rank's view of itself and `world_size - 1` emulated peers."""

    symmetric = True

    def __init__(self, world_size: int, link: Link, device: torch.device, rank: int = 0) -> None:
        self.rank, self.world_size, self.link, self.device = rank, world_size, link, device
        self.executor = EmulatedExecutor(device, link)
        self._buffers: list[SymmetricBuffer] = []

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


__all__ = ["EmulatedExecutor", "EmulatedTransport", "Link", "make_emulated_transport"]
