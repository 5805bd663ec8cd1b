"""Every exception a user of plait can meet, one class per kind of mistake.

A mistake in an argument reads `argument: expected ..., got .... What to do next.` and is raised
before any rank waits. Every exception keeps what it was built from as attributes, survives
pickling, and derives from `PlaitError`, so `except plait.errors.PlaitError` catches them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def describe(argument: str, expected: str, got: object, remedy: str = "") -> str:
    """The one message format: what is wrong with `argument`, and what to do about it."""
    message = f"{argument}: expected {expected}, got {got}."
    return f"{message} {remedy}" if remedy else message


def _restore(kind: type[PlaitError], args: tuple[Any, ...], fields: dict[str, Any]) -> PlaitError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class PlaitError(Exception):
    """Base of all exceptions that plait raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the finished message as its only argument.
        return _restore, (type(self), self.args, dict(self.__dict__))


class _Mistake(PlaitError):
    """An error made of the four parts of `describe`, kept as attributes of the same names."""

    def __init__(self, argument: str, expected: str, got: object, remedy: str = "") -> None:
        super().__init__(describe(argument, expected, got, remedy))
        self.argument = argument
        self.expected = expected
        self.got = str(got)
        self.remedy = remedy


class ArgumentError(_Mistake, ValueError):
    """An argument has a value that the function does not take."""


class ShapeError(ArgumentError):
    """A tensor has the wrong number of dimensions or the wrong size in one of them."""


class DtypeError(ArgumentError):
    """A tensor or a dtype argument has a dtype that does not fit."""


class DeviceError(ArgumentError):
    """A tensor lies on a device that the operator or the group does not use."""


class StrideError(ArgumentError):
    """A tensor is laid out in memory in a way that the operator cannot read or write."""


class RankCountError(ArgumentError):
    """A number of ranks, or a list with one entry per rank, does not fit the group."""


class GroupError(ArgumentError):
    """The group is closed or broken, or a tensor belongs to another group."""


class CapacityError(ArgumentError):
    """A buffer or the workspace is too small for what was asked."""


class UnsupportedError(_Mistake, NotImplementedError):
    """An implementation that was asked for by name cannot run this call; nothing else is tried."""


class SettingError(_Mistake, ValueError):
    """A `PLAIT_*` variable or a settings override cannot be used; `argument` is its name."""


class RanksDisagreeError(PlaitError, RuntimeError):
    """Ranks of one group made different calls. Every rank raises this, with all signatures.

    `signatures` maps each rank to what it called, such as `#12 ag_gemm x=[32, 64] bf16`.
    """

    def __init__(self, signatures: Mapping[int, str], remedy: str = "") -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(signatures.items())]
        remedy = remedy or (
            "Make every rank of the group call the same operators in the same order, "
            "with shapes that fit."
        )
        super().__init__("\n".join(["the ranks of one group disagree:", *lines, remedy]))
        self.signatures = dict(signatures)
        self.remedy = remedy


class PeerTimeoutError(PlaitError, RuntimeError):
    """A wait on a device passed its deadline; the group is broken from then on.

    `rank` waited inside `operator` for the word `signal` to be set by `peer`; it had reached
    `seen` where `expected` was due.
    """

    def __init__(
        self, rank: int, operator: str, signal: str, peer: int, expected: int, seen: int
    ) -> None:
        super().__init__(
            f"rank {rank} waited too long in {operator} for signal {signal!r} of rank {peer}: "
            f"expected epoch {expected}, seen {seen}. The outputs of this group are NaN: look at "
            f"what rank {peer} was doing, then close the group and make a new one; "
            "PLAIT_DEADLINE_S sets the limit."
        )
        self.rank = rank
        self.operator = operator
        self.signal = signal
        self.peer = peer
        self.expected = expected
        self.seen = seen


class DeadlockError(PlaitError, RuntimeError):
    """No virtual rank can go on.

    `waits` has one line per waiting actor: who waits for what. `cycle` names the actors that wait
    for each other, in order; it is empty if somebody waits for a word that nobody is left to set.
    """

    def __init__(self, waits: Sequence[str], cycle: Sequence[str] = ()) -> None:
        lines = ["deadlock: nobody can run", *(f"  {wait}" for wait in waits)]
        if cycle:
            lines.append("cycle: " + " -> ".join([*cycle, cycle[0]]))
        super().__init__("\n".join(lines))
        self.waits = tuple(waits)
        self.cycle = tuple(cycle)


class RaceError(PlaitError, RuntimeError):
    """The protocol checker found accesses that nothing orders; `reports` has one entry for each."""

    def __init__(self, reports: Sequence[object]) -> None:
        count = f"{len(reports)} race" + ("" if len(reports) == 1 else "s")
        super().__init__("\n".join([f"{count} found:", *(f"  {report}" for report in reports)]))
        self.reports = tuple(reports)


class WorldStoppedError(PlaitError, RuntimeError):
    """Somebody else raised `error`, so this rank's wait was ended.

    `rank` is who raised; a negative number if it was no rank but the world that runs them.
    """

    def __init__(self, rank: int, error: object) -> None:
        who = f"rank {rank}" if rank >= 0 else "the virtual world"
        super().__init__(f"stopped because {who} raised: {error}. That error comes first.")
        self.rank = rank
        self.error = str(error)


class MissingDependencyError(PlaitError, ImportError):
    """An optional package is needed and cannot be imported."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(f"{needed_for} needs the package {package}: {install}")
        self.package = package
        self.needed_for = needed_for
        self.install = install


__all__ = [
    "ArgumentError",
    "CapacityError",
    "DeadlockError",
    "DeviceError",
    "DtypeError",
    "GroupError",
    "MissingDependencyError",
    "PeerTimeoutError",
    "PlaitError",
    "RaceError",
    "RankCountError",
    "RanksDisagreeError",
    "SettingError",
    "ShapeError",
    "StrideError",
    "UnsupportedError",
    "WorldStoppedError",
    "describe",
]
