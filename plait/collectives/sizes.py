"""Sizes that all ranks must agree on, from one rank's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.checks import check_rank_list
from plait.errors import ShapeError
from plait.symm.group import world_size_of


def gathered_sizes(
    size: int, rank: int, world_size: int, rows_per_rank: Sequence[int]
) -> tuple[int, ...]:
    """Each rank's size along the gathered dim: `rows_per_rank`, or `size` everywhere if empty.

    Raises RankCountError for a wrong list and ShapeError if the own entry is not `size`.
    """
    if not rows_per_rank:
        return (size,) * world_size
    sizes = check_rank_list("rows_per_rank", rows_per_rank, world_size)
    if sizes[rank] != size:
        raise ShapeError(
            argument="rows_per_rank",
            expected=f"{size} for rank {rank}, the size of its x along the gathered dim",
            got=str(sizes[rank]),
            remedy="Give every rank the same list of all ranks' sizes.",
        )
    return sizes


def scattered_sizes(size: int, world_size: int, rows_per_rank: Sequence[int]) -> tuple[int, ...]:
    """Each rank's size along the scattered dim of `size`: `rows_per_rank`, or equal shares.

    Raises RankCountError for a wrong list, ShapeError if it does not add up or nothing divides.
    """
    if not rows_per_rank:
        if size % world_size:
            raise ShapeError(
                argument="x",
                expected=f"a size along the scattered dim that {world_size} ranks divide",
                got=str(size),
                remedy="Pass rows_per_rank with each rank's share.",
            )
        return (size // world_size,) * world_size
    sizes = check_rank_list("rows_per_rank", rows_per_rank, world_size)
    if sum(sizes) != size:
        raise ShapeError(
            argument="rows_per_rank",
            expected=f"a sum of {size}, the size of x along the scattered dim",
            got=f"{list(sizes)}, which add up to {sum(sizes)}",
            remedy="Give each rank's share of the rows.",
        )
    return sizes


def inferred_share(size: int, group: str, rows_per_rank: Sequence[int]) -> int:
    """A rank's size along a scattered dim of `size` during shape inference.

    One graph serves all ranks: where their shares differ, the size is known only when it runs.
    """
    if not rows_per_rank:
        return size // world_size_of(group)
    first = rows_per_rank[0]
    if all(rows == first for rows in rows_per_rank):
        return first
    return torch.library.get_ctx().new_dynamic_size()


__all__ = ["gathered_sizes", "inferred_share", "scattered_sizes"]
