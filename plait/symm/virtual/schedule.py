"""Which actor runs next: the schedules under which a protocol is tried.

| name | what it makes likely |
|---|---|
| `random` | any interleaving |
| `late:R` | rank R runs only when nothing else can: a late rank |
| `waiter_first` | waiting kernels before the hosts and copies they wait for |
| `consumer_first` | hosts enqueue everything, then blocks of the newest launches run first |
| `copies_last` | data and signals arrive as late as they can |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import ArgumentError


@dataclass(frozen=True)
class Candidate:
    """An actor that could run: a rank's host code, a block or a copy."""

    rank: int
    kind: Literal["host", "block", "copy"]
    order: int  # position of its command in its stream; hosts: 0


class Schedule:
    """Chooses among candidates; the same seed gives the same run."""

    NAMES = ("random", "waiter_first", "consumer_first", "copies_last")

    def __init__(self, name: str = "random", seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.name = name
        self.late: int | None = None
        if name.startswith("late:") and name[5:].isdigit():
            self.late = int(name[5:])
        elif name not in self.NAMES:
            raise ArgumentError(
                argument="schedule",
                expected=f"one of {', '.join(self.NAMES)} or late:R",
                got=repr(name),
                remedy="Use 'random' unless you look for a special order.",
            )

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Index of the candidate to run."""
        if len(candidates) == 1:
            return 0
        best = [self._preference(candidate) for candidate in candidates]
        top = max(best)
        # One choice in eight ignores the preference, so that no order is excluded for ever.
        if self.late is None and self.rng.random() < 0.125:
            return self.rng.randrange(len(candidates))
        return self.rng.choice([index for index, value in enumerate(best) if value == top])

    def _preference(self, candidate: Candidate) -> int:
        if self.late is not None:
            return int(candidate.rank != self.late)
        if self.name == "waiter_first":
            return {"block": 2, "host": 1, "copy": 0}[candidate.kind]
        if self.name == "consumer_first":
            return 1 << 30 if candidate.kind == "host" else candidate.order
        if self.name == "copies_last":
            return {"block": 1, "host": 1, "copy": 0}[candidate.kind]
        return 0


__all__ = ["Candidate", "Schedule"]
