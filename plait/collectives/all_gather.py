"""AllGather: every rank's rows, by copy-engine pushes into the peers' regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.backends.commands import Command, Copy, Program, Step, StreamWait
from plait.checks import check_min_ndim, check_tensor, normalize_dim
from plait.collectives import reduce_scatter as _backward  # noqa: F401 - registers what it calls
from plait.collectives.calls import begin_call
from plait.collectives.push import (
    Chunks,
    await_rows,
    close_region,
    gather_bytes,
    gathered_view,
    open_region,
    push_rows,
    slice_rows,
)
from plait.collectives.segments import Segments
from plait.collectives.sizes import gathered_sizes
from plait.symm import signals
from plait.symm.group import Group, world_size_of
from plait.symm.workspace import Region


def all_gather(
    x: torch.Tensor,
    *,
    group: Group,
    dim: int = 0,
    rows_per_rank: Sequence[int] | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Concatenate every rank's `x` along `dim`, in rank order, bitwise.

    Args:
        x: any dtype and strides, the same shape on every rank except along dim.
        group: the ranks.
        dim: any dim, also the last.
        rows_per_rank: every rank's size along dim where they differ (0 allowed).
        impl: "fused" pushes through symmetric memory, "unfused" uses torch.distributed (or, where
            the ranks share memory, pushes as well), "reference" exchanges on the host; "auto" is
            the first that works.

    Returns:
        x's shape with the sum of all sizes along dim, contiguous.

    Raises:
        ShapeError, DeviceError, RankCountError, GroupError, CapacityError, UnsupportedError: before
        any rank waits. PeerTimeoutError: a peer never came.

    The gradient of x is this rank's rows of the sum of the ranks' gradients (a reduce-scatter).
    """
    check_tensor("x", x)
    check_min_ndim("x", x, 1, "[..., dim, ...]")
    dim = normalize_dim("dim", dim, x.dim())
    return _AllGather.apply(x, group.name, group.world_size, dim, list(rows_per_rank or []), impl)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: str, world_size: int, dim: int, rows: list[int], impl: str
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.impl = group, dim, impl
        ctx.rows = rows or [x.shape[dim]] * world_size
        return torch.ops.plait.all_gather(x, group, dim, rows, impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad_x = torch.ops.plait.reduce_scatter(grad, ctx.group, ctx.dim, ctx.rows, None, ctx.impl)
        return grad_x, None, None, None, None, None


def gather_whole(
    group: Group, x: torch.Tensor, dim: int, sizes: tuple[int, ...], impl: str = "auto"
) -> torch.Tensor:
    """The concatenation along `dim` where rank r has `sizes[r]`, by whatever the group offers."""
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    call = f"all_gather into {shape} dim={dim} sizes={sizes} {x.dtype}"
    if impl == "reference":
        return torch.cat(group.exchange_tensor(call, x), dim=dim)
    if not group.transport.symmetric:
        group.check()
        group.agree(call)
        return group.transport.all_gather(x, dim, sizes)
    if dim == x.dim() - 1:
        # Rows must be contiguous: gather with the last dim in front.
        whole = gather_whole(group, x.movedim(-1, 0).unsqueeze(-1), 0, sizes)
        return whole.squeeze(-1).movedim(0, -1).contiguous()
    whole = x.new_empty(shape)
    if whole.numel() == 0:
        return whole
    segments = Segments.of(x.shape, dim, sizes)
    rows, flat = x.contiguous().view(-1, shape[-1]), whole.view(-1, shape[-1])
    row_bytes = shape[-1] * x.element_size()
    for part in segments.slices(slice_rows(segments, row_bytes, group.workspace.capacity_bytes)):
        region = group.take_region(gather_bytes(part, row_bytes), call)
        first = part.first[group.rank]
        own = rows[first : first + part.rows[group.rank]]
        program = Program("all_gather", members=group.members)
        program.add(
            *start_gather(group, region, own, part), *end_gather(group, region, own, part, flat)
        )
        group.run(program, f"{call} first={part.first}")
    return whole


def start_gather(group: Group, region: Region, x: torch.Tensor, segments: Segments) -> list[Step]:
    """Begin to gather one slice: own rows `x` [rows, F] go to every peer while `main` goes on."""
    chunks = Chunks.of(segments.max_rows, x.shape[1] * x.element_size(), group.device)
    prologue = open_region(region, 1, signals.Operator.ALL_GATHER)
    return [prologue, *push_rows(group, region, x, segments, chunks)]


def end_gather(
    group: Group, region: Region, x: torch.Tensor, segments: Segments, whole: torch.Tensor
) -> list[Step]:
    """Wait for the slice of `start_gather`, copy it into `whole` [M, F], close the region."""
    chunks = Chunks.of(segments.max_rows, x.shape[1] * x.element_size(), group.device)
    slots = gathered_view(region, segments, x.shape[1], x.dtype)
    table = segments.table(group.device)
    arrive = await_rows(region, slots, table, chunks, signals.Operator.ALL_GATHER)
    copies = collect_rows(group, region, x, segments, whole)
    return [arrive, StreamWait("main", on="comm"), *copies, close_region(region)]


def collect_rows(
    group: Group, region: Region, x: torch.Tensor, segments: Segments, whole: torch.Tensor
) -> list[Command]:
    """Copy every rank's rows of a slice that has arrived into their place in `whole` [M, F]."""
    gathered = gathered_view(region, segments, x.shape[1], x.dtype)
    commands: list[Command] = []
    if segments.uniform:  # a copy takes microseconds, whatever its size: of neighbours one
        rows = segments.max_rows
        places = whole.view(segments.world_size, rows, whole.shape[1])
        commands.append(Copy(places[group.rank], x, "main"))
        for peers in (slice(group.rank), slice(group.rank + 1, None)):
            if places[peers].shape[0]:
                commands.append(Copy(places[peers], gathered[peers, :rows], "main"))
        return commands
    for rank in range(segments.world_size):
        source = x if rank == group.rank else gathered[rank, : segments.rows[rank]]
        commands += [Copy(dst, src, "main") for dst, src in segments.pieces(whole, rank, source)]
    return commands


# --- the operator
_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "all_gather(Tensor x, str group, int dim, SymInt[] rows_per_rank, str impl) -> Tensor"
)


def _all_gather(
    x: torch.Tensor, group: str, dim: int, rows_per_rank: Sequence[int], impl: str
) -> torch.Tensor:
    found = begin_call("all_gather", group, x, impl)
    sizes = gathered_sizes(x.shape[dim], found.rank, found.world_size, rows_per_rank)
    return gather_whole(found, x, dim, sizes, impl)


for _key in ("CPU", "CUDA"):
    _library.impl("all_gather", _all_gather, _key)


@torch.library.register_fake("plait::all_gather")
def _all_gather_fake(
    x: torch.Tensor, group: str, dim: int, rows_per_rank: Sequence[int], impl: str
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = sum(rows_per_rank) if rows_per_rank else shape[dim] * world_size_of(group)
    return x.new_empty(shape)


__all__ = ["all_gather", "collect_rows", "end_gather", "gather_whole", "start_gather"]
