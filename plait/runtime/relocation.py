"""Where a program's addresses come from: a tensor that each call brings, or one that stays.

Pure bookkeeping for prepared programs (plait/runtime/prepared.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from plait.backends.commands import Call, Command, Copy, Launch, Program, Signal, StreamWait


class CannotPrepareError(Exception):
    """Why a program can only run the ordinary way. Never seen by users."""


class Place(NamedTuple):
    """An address: `offset` bytes behind the tensor of role number `role`, or (None) behind 0."""

    role: int | None
    offset: int

    def address(self, bases: Sequence[int]) -> int:
        """The address in a call whose roles begin at `bases`."""
        return self.offset if self.role is None else bases[self.role] + self.offset


class Roles:
    """The tensors of one call that later calls bring anew, by name.

    Roles are told apart by the bytes they span, so these must not overlap: two weights in one
    storage are two roles, but a call with one tensor in two roles cannot be prepared.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names = list(tensors)
        self._spans = [_span(tensor) for tensor in tensors.values()]
        spans = sorted(span for span in self._spans if span[0] < span[1])
        for (_, end), (begin, _) in itertools.pairwise(spans):
            if begin < end:
                raise CannotPrepareError("two arguments share memory")

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor of the program begins."""
        address = tensor.data_ptr()
        for role, (begin, end) in enumerate(self._spans):
            if begin <= address < end:
                return Place(role, address - begin)
        return Place(None, address)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.place(tensor).role is not None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one of a tensor; empty without elements."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * tensor.element_size()


# --- copies
class Rows(NamedTuple):
    """A copy of `height` rows of `width` bytes, each a pitch behind the one before."""

    width: int
    height: int
    dst_pitch: int
    src_pitch: int


def as_rows(dst: torch.Tensor, src: torch.Tensor) -> Rows | None:
    """The copy of src to dst as rows (one row: both contiguous); None if it is none."""
    if dst.dtype != src.dtype or dst.shape != src.shape:
        return None
    if any(each.is_conj() or each.is_neg() for each in (dst, src)):
        return None
    size = dst.element_size()
    if dst.is_contiguous() and src.is_contiguous():
        nbytes = dst.numel() * size
        return Rows(nbytes, 1, nbytes, nbytes)
    there, here = _matrix(dst), _matrix(src)
    if there is None or here is None:
        return None
    if there[0] == 1 and here[0] > 1:
        there = (*here[:2], here[1])  # contiguous: its rows are as long as the other's
    elif here[0] == 1 and there[0] > 1:
        here = (*there[:2], there[1])
    if here[:2] != there[:2]:
        return None
    return Rows(here[1] * size, here[0], there[2] * size, here[2] * size)


def _matrix(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(rows, elements a row, elements from row to row) of a tensor of contiguous rows."""
    dims: list[tuple[int, int]] = []  # from the innermost; neighbours in memory are one dim
    pairs = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    for count, stride in reversed(pairs):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * count, dims[-1][1])
        else:
            dims.append((count, stride))
    if not dims:
        return 1, 1, 1
    if dims[0][1] != 1:
        return None
    width = dims[0][0]
    if len(dims) == 1:
        return 1, width, width
    if len(dims) > 2 or dims[1][1] < width:
        return None
    return dims[1][0], width, dims[1][1]


# --- streams
def joined(program: Program, roles: Roles) -> list[tuple[str, Any]]:
    """Pairs (role, stream) where `main` ends without having waited for the role's last use there.

    Overlapped calls end with such a wait, so for them the list is empty.
    """
    done: Counter[str] = Counter()  # commands so far, by stream
    seen: dict[str, Counter[str]] = {}  # by stream: what it has waited for, of each other stream
    last: dict[tuple[int, str], int] = {}
    for command in program.commands:
        if isinstance(command, StreamWait):
            waits = seen.setdefault(command.stream, Counter())
            waits |= seen.get(command.on, Counter())
            waits[command.on] = max(waits[command.on], done[command.on])
            seen[command.stream] = waits
            continue
        stream = getattr(command, "stream", "main")
        done[stream] += 1
        for tensor in _tensors(command):
            role = roles.place(tensor).role
            if role is not None and stream != "main":
                last[role, stream] = done[stream]
    main = seen.get("main", Counter())
    return [
        (roles.names[role], stream)
        for (role, stream), count in last.items()
        if main[stream] < count
    ]


def _tensors(command: Command) -> list[torch.Tensor]:
    if isinstance(command, Launch):
        values = [getattr(value, "base", value) for value in command.args.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]
    if isinstance(command, Copy):
        return [command.dst, command.src]
    if isinstance(command, Signal):
        return [command.word, command.mirror]
    if isinstance(command, Call):
        return [*command.reads, *command.writes]
    return []


__all__ = ["CannotPrepareError", "Place", "Roles", "Rows", "as_rows", "joined"]
