"""What stands between the live rank and its emulated peers: a link's text, rate and latency."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from plait.errors import ArgumentError

LATENCY_US = 3.0  # from a peer's store to the signal being seen here, where the text says nothing
PCIE_GB_S = 55.0  # what the copy engine moves one way over PCIe 5.0 x16
_PACED = re.compile(r"paced:(?P<rate>[^@+]+)(@(?P<latency>[^@+]+))?(?P<traffic>\+traffic)?")


@dataclass(frozen=True)
class Link:
    """The link of an emulated group.

    `pcie`: peers' memory is pinned host memory, the copy engine is the link. `paced`: it is on the
    same GPU, and `bandwidth_gb_s` (10^9 bytes a second, one way) and `latency_us` are enforced;
    with `traffic` the bytes also move in the background.
    """

    kind: Literal["pcie", "paced"]
    bandwidth_gb_s: float | None = None
    traffic: bool = False
    latency_us: float = LATENCY_US

    @staticmethod
    def parse(text: str) -> Link:
        """From "pcie", "paced:360", "paced:360@5" (5 us of latency) or "paced:160+traffic";
        ArgumentError for any other text."""
        if text == "pcie":
            return Link("pcie")
        match = _PACED.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            bandwidth = _number(match["rate"])
            latency = LATENCY_US if match["latency"] is None else _number(match["latency"])
            if bandwidth and latency is not None:
                return Link("paced", bandwidth, match["traffic"] is not None, latency)
        raise ArgumentError(
            argument="link",
            expected="'pcie', or 'paced:' and GB/s above 0, then '@' and us of latency and "
            "'+traffic' if wanted",
            got=repr(text),
            remedy="Write for example 'paced:360', 'paced:360@5' or 'paced:160+traffic'.",
        )

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second, one way, at which signals are paced."""
        return PCIE_GB_S if self.bandwidth_gb_s is None else self.bandwidth_gb_s

    def __str__(self) -> str:
        if self.kind == "pcie":
            return "pcie"
        latency = "" if self.latency_us == LATENCY_US else f"@{self.latency_us:g}"
        return f"paced:{self.bandwidth_gb_s:g}{latency}" + ("+traffic" if self.traffic else "")


def _number(text: str) -> float | None:
    """A finite float from 0; None for other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


__all__ = ["LATENCY_US", "PCIE_GB_S", "Link"]
