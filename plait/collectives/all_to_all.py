"""AllToAll: each rank's x cut along dim 0, one part for every rank, bitwise.

Parts go into slots of one size, so that a sender knows where its part belongs in the receiver's
region without knowing the other senders' parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.backends.commands import Copy, Program, StreamWait
from plait.checks import check_min_ndim, check_rank_list, check_tensor
from plait.collectives.calls import begin_call
from plait.collectives.push import (
    Chunks,
    await_rows,
    close_region,
    gather_bytes,
    gathered_view,
    open_region,
    push_tensors,
    slice_rows,
)
from plait.collectives.reference import all_to_all_reference
from plait.collectives.segments import Segments
from plait.errors import ArgumentError, ShapeError
from plait.settings import settings
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region


def all_to_all(
    x: torch.Tensor,
    *,
    group: Group,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    max_rows: int | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Send part p of `x` along dim 0 to rank p; return the parts from all ranks, in rank order.

    Args:
        x: [rows, ...], any dtype and strides; the same on every rank except for ragged rows.
        group: the ranks.
        input_splits: rows of x for each rank (0 allowed), known to the host; None: equal parts.
        output_splits: rows that come from each rank; give both lists or neither.
        max_rows: for ragged splits, the same number on every rank and at least any rank's largest
            part (a bound will do, memory grows with it). None: the ranks meet on the host in every
            call, forward and backward, to find it and to compare their splits. That costs a round
            trip and cannot be captured in a graph. With a number the splits are compared with
            PLAIT_DEBUG=1 only.
        impl: "fused" pushes through symmetric memory, "unfused" uses torch.distributed (or, where
            the ranks share memory, pushes as well), "reference" exchanges on the host; "auto" is
            the first that works.

    Returns:
        [sum(output_splits), ...], contiguous.

    Raises:
        ShapeError, DeviceError, RankCountError, GroupError, CapacityError, UnsupportedError: before
        any rank waits. PeerTimeoutError: a peer never came.

    The gradient of x is an all-to-all back, with the splits swapped.
    """
    check_tensor("x", x)
    check_min_ndim("x", x, 1, "[rows, ...]")
    if (input_splits is None) != (output_splits is None):
        raise ArgumentError(
            "input_splits",
            "both input_splits and output_splits, or neither",
            f"{input_splits} and {output_splits}",
            "Say also how many rows go to, or come from, each rank.",
        )
    return _AllToAll.apply(
        x, group.name, list(input_splits or []), list(output_splits or []), max_rows, impl
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: str,
        sends: list[int],
        receives: list[int],
        max_rows: int | None,
        impl: str,
    ) -> torch.Tensor:
        ctx.options = (group, receives, sends, max_rows, impl)
        return torch.ops.plait.all_to_all(x, group, sends, receives, max_rows, impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return torch.ops.plait.all_to_all(grad, *ctx.options), None, None, None, None, None


def _checked_splits(
    group: Group,
    num_rows: int,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    max_rows: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows sent to and received from each rank, after every check that needs no other rank."""
    world_size, rank = group.world_size, group.rank
    if not input_splits and not output_splits:
        if num_rows % world_size:
            raise ShapeError(
                argument="x",
                expected=f"a size along dim 0 that {world_size} ranks divide",
                got=str(num_rows),
                remedy="Pass input_splits and output_splits.",
            )
        equal = (num_rows // world_size,) * world_size
        return equal, equal
    sends = check_rank_list("input_splits", input_splits, world_size)
    receives = check_rank_list("output_splits", output_splits, world_size)
    if sum(sends) != num_rows:
        raise ShapeError(
            argument="input_splits",
            expected=f"a sum of {num_rows}, the size of x along dim 0",
            got=f"{list(sends)}, which add up to {sum(sends)}",
            remedy="Say for every row of x where it goes.",
        )
    if sends[rank] != receives[rank]:
        raise ShapeError(
            argument="output_splits",
            expected=f"{sends[rank]} for rank {rank}, the rows it keeps by input_splits",
            got=str(receives[rank]),
            remedy="Give output_splits[s] the rows that rank s has for this rank.",
        )
    largest = max(*sends, *receives)
    if max_rows is not None and max_rows < largest:
        raise ShapeError(
            argument="max_rows",
            expected=f"at least {largest}, the largest part of this rank",
            got=str(max_rows),
            remedy="Give every rank the same bound of all parts.",
        )
    return sends, receives


def _compare_splits(group: Group, sends: Sequence[int], receives: Sequence[int]) -> int:
    """Collective on the host: the largest part of any rank; ShapeError if they differ."""
    splits = group.transport.exchange((tuple(sends), tuple(receives)))
    for sender, (sent, _) in enumerate(splits):
        for receiver, (_, received) in enumerate(splits):
            if sent[receiver] != received[sender]:
                raise ShapeError(
                    argument="output_splits",
                    expected=f"{sent[receiver]} rows of rank {sender} on rank {receiver}",
                    got=str(received[sender]),
                    remedy="Give output_splits[s] the rows that rank s has for this rank.",
                )
    return max(max(sent) for sent, _ in splits)


def _exchange_rows(
    group: Group,
    x: torch.Tensor,
    sends: tuple[int, ...],
    receives: tuple[int, ...],
    max_rows: int,
    call: str,
) -> torch.Tensor:
    """The result through symmetric memory; no part of any rank has more than `max_rows` rows."""
    out = x.new_empty([sum(receives), *x.shape[1:]])
    features = math.prod(x.shape[1:])
    if features == 0 or max_rows == 0:
        return out
    row_bytes = features * x.element_size()
    parts = x.contiguous().view(-1, features).split(list(sends))
    places = out.view(-1, features).split(list(receives))
    slots = Segments.of((max_rows * group.world_size, features), 0, (max_rows,) * group.world_size)
    for piece in slots.slices(slice_rows(slots, row_bytes, group.workspace.capacity_bytes)):
        cut = slice(piece.first[0], piece.first[0] + piece.max_rows)
        region = group.take_region(gather_bytes(piece, row_bytes), call)
        program = _plan(group, region, [p[cut] for p in parts], [p[cut] for p in places], piece)
        group.run(program, f"{call} first={piece.first[0]} of {max_rows}")
    return out


def _plan(
    group: Group,
    region: Region,
    sends: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    slots: Segments,
) -> Program:
    """One slice, all [rows, features]: `sends[p]` go to rank p, `places[s]` take what s sends."""
    own = sends[group.rank]
    chunks = Chunks.of(slots.max_rows, own.shape[1] * own.element_size(), group.device)
    arrived = gathered_view(region, slots, own.shape[1], own.dtype)
    rows = tuple(place.shape[0] for place in places)
    table = Segments(1, rows, (0,) * len(rows), rows).table(group.device)
    program = Program("all_to_all", members=group.members)
    program.add(open_region(region, 1, signals.Operator.ALL_TO_ALL))
    program.add(*push_tensors(group, region, sends, rows, slots.max_rows, chunks))
    program.add(await_rows(region, arrived, table, chunks, signals.Operator.ALL_TO_ALL))
    program.add(StreamWait("main", on="comm"))
    for rank, place in enumerate(places):
        if rows[rank]:
            source = own if rank == group.rank else arrived[rank, : rows[rank]]
            program.add(Copy(place, source, "main"))
    return program.add(close_region(region))


# --- the operator
_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "all_to_all(Tensor x, str group, SymInt[] input_splits, SymInt[] output_splits, "
    "SymInt? max_rows, str impl) -> Tensor"
)


def _all_to_all(
    x: torch.Tensor,
    group: str,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    max_rows: int | None,
    impl: str,
) -> torch.Tensor:
    found = begin_call("all_to_all", group, x, impl)
    sends, receives = _checked_splits(found, x.shape[0], input_splits, output_splits, max_rows)
    ragged = bool(input_splits)
    # Ragged ranks have different rows: what must agree is only the rest.
    rows = f"ragged, max_rows={max_rows}" if ragged else x.shape[0]
    call = f"all_to_all [{rows}, {tuple(x.shape[1:])}] {x.dtype}"
    if impl == "reference":
        xs = found.exchange_tensor(call, x)
        return all_to_all_reference(xs, found.rank, found.transport.exchange(list(sends)))
    found.check()
    if not found.transport.symmetric:
        found.agree(call)
        return found.transport.all_to_all(x, sends, receives)
    if not ragged:
        max_rows = sends[0]
    elif max_rows is None or settings().debug:
        found.agree(call)
        largest = _compare_splits(found, sends, receives)
        max_rows = largest if max_rows is None else max_rows
    return _exchange_rows(found, x, sends, receives, max_rows, call)


for _key in ("CPU", "CUDA"):
    _library.impl("all_to_all", _all_to_all, _key)


@torch.library.register_fake("plait::all_to_all")
def _all_to_all_fake(
    x: torch.Tensor,
    group: str,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    max_rows: int | None,
    impl: str,
) -> torch.Tensor:
    rows = sum(output_splits) if output_splits else x.shape[0]
    return x.new_empty([rows, *x.shape[1:]])


__all__ = ["all_to_all"]
