"""What the race detector reports, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from plait.errors import RaceError
from plait.symm.virtual.observe import HOST_SITE, Site

RaceKind = Literal[
    "write-write race",
    "write-read race (stale read possible)",
    "read-write race (overwritten while needed)",
    "plain store to a peer's signal word",
]
UNKNOWN_SITE = Site("a line no longer in the history", 0)


@dataclass(frozen=True)
class Access:
    """One side of a race: `block` is None for the copy engine, `kernel` then the copy's name."""

    rank: int
    block: int | None
    kernel: str
    site: Site
    write: bool
    async_proxy: bool = False

    def __str__(self) -> str:
        verb = "writes" if self.write else "reads"
        if self.block is None:
            return f"rank {self.rank} copy engine {verb} ({self.kernel})"
        where = self.site.file if self.site == UNKNOWN_SITE else _short(self.site)
        proxy = " through a descriptor (async proxy)" if self.async_proxy else ""
        return f"rank {self.rank} {self.kernel}[{self.block}] {verb} at {where}{proxy}"


@dataclass(frozen=True)
class Race:
    """Two accesses of the same byte that nothing orders; `first` happened first in this schedule.

    `first` is None for a plain store to a peer's signal word, which is wrong whatever else happens.
    `owner_rank` is the rank whose memory `region` is, `offset_bytes` counts from its beginning.
    """

    kind: RaceKind
    region: str
    owner_rank: int
    offset_bytes: int
    first: Access | None
    second: Access

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Races with equal keys are one mistake in the source: kind, region and both lines."""
        return (self.kind, self.region, _line(self.first), _line(self.second))

    def __str__(self) -> str:
        first = self.first or "(readers acquire this word; a plain store publishes nothing)"
        return (
            f"{self.kind}: {self.region} of rank {self.owner_rank}, byte {self.offset_bytes}\n"
            f"  first:  {first}\n"
            f"  second: {self.second}"
        )


def raise_if_races(races: list[Race]) -> None:
    """Raise `RaceError` with all `races`, if there are any."""
    if races:
        raise RaceError(races)


def _short(site: Site) -> str:
    # Every operator has a kernels.py: the folder says which one.
    return f"{'/'.join(PurePath(site.file).parts[-2:])}:{site.line}"


def _line(access: Access | None) -> str:
    if access is None:
        return ""
    return access.kernel if access.site == HOST_SITE else str(access.site)


__all__ = ["UNKNOWN_SITE", "Access", "Race", "RaceKind", "raise_if_races"]
