"""ReduceScatter: each rank gets its rows of the sum over ranks, the same bits on every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.checks import check_dtype_in, check_min_ndim, check_tensor, normalize_dim
from plait.collectives import all_gather as _backward  # noqa: F401 - registers what it calls
from plait.collectives.calls import begin_call
from plait.collectives.reference import reduce_scatter_reference
from plait.collectives.sizes import inferred_share, scattered_sizes
from plait.collectives.sums import SUM_DTYPES, sum_over_ranks
from plait.symm import signals
from plait.symm.group import Group


def reduce_scatter(
    x: torch.Tensor,
    *,
    group: Group,
    dim: int = 0,
    rows_per_rank: Sequence[int] | None = None,
    reduce_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """This rank's share along `dim` of the sum of every rank's `x`.

    Args:
        x: the same shape on every rank, fp32, bf16 or fp16, any strides.
        group: the ranks.
        dim: the dim that is shared out; any, also the last.
        rows_per_rank: every rank's size along dim (0 allowed); default equal shares.
        reduce_dtype: dtype in which x travels: fp32, bf16 or fp16, default that of x.
        out_dtype: fp32, bf16 or fp16, default that of x.
        impl: "fused" pushes through symmetric memory, "unfused" uses torch.distributed (or, where
            the ranks share memory, pushes as well), "reference" exchanges on the host and takes any
            dtype; "auto" is the first that works.

    Returns:
        x's shape with this rank's size along dim, contiguous. Every rank's x, the own one too, is
        rounded to reduce_dtype, added in fp32 in rank order and rounded once to out_dtype.

    Raises:
        ShapeError, DtypeError, DeviceError, RankCountError, GroupError, CapacityError,
        UnsupportedError: before any rank waits. PeerTimeoutError: a peer never came.

    The gradient of x is the ranks' gradients gathered, in the dtype of x.
    """
    check_tensor("x", x)
    check_min_ndim("x", x, 1, "[..., dim, ...]")
    dim = normalize_dim("dim", dim, x.dim())
    return _ReduceScatter.apply(
        x, group.name, dim, list(rows_per_rank or []), reduce_dtype, out_dtype, impl
    )


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: str,
        dim: int,
        rows: list[int],
        reduce_dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
        impl: str,
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.rows, ctx.impl, ctx.dtype = group, dim, rows, impl, x.dtype
        return torch.ops.plait.reduce_scatter(x, group, dim, rows, reduce_dtype, impl, out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        whole = torch.ops.plait.all_gather(
            grad.to(ctx.dtype), ctx.group, ctx.dim, ctx.rows, ctx.impl
        )
        return whole, None, None, None, None, None, None


def reduce_scatter_partials(
    group: Group,
    partial: torch.Tensor,
    dim: int,
    sizes: tuple[int, ...],
    impl: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's `sizes[rank]` rows along `dim` of the sum of all `partial`, by whatever the group
    offers. Partials travel as they are; `out_dtype` defaults to theirs."""
    out_dtype = out_dtype or partial.dtype
    call = f"reduce_scatter {tuple(partial.shape)} dim={dim} sizes={sizes} {partial.dtype}"
    if impl == "reference":
        parts = group.exchange_tensor(call, partial)
        return reduce_scatter_reference(
            parts, group.rank, sizes, dim, out_dtype=out_dtype
        ).contiguous()
    if not group.transport.symmetric:
        group.check()
        group.agree(call)
        return group.transport.reduce_scatter(partial, dim, sizes, partial.dtype, out_dtype)
    shape = list(partial.shape)
    shape[dim] = sizes[group.rank]
    out = partial.new_empty(shape, dtype=out_dtype)
    if partial.numel():
        parts = _contiguous_parts(partial, dim, sizes)
        sum_over_ranks(group, parts, out.view(-1, 1), signals.Operator.REDUCE_SCATTER, call)
    return out


def _contiguous_parts(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Each rank's share of x as [elements, 1]: views if they are contiguous, else a packed copy."""
    parts = x.split(list(sizes), dim=dim)
    if all(part.is_contiguous() for part in parts):
        return [part.view(-1, 1) for part in parts]
    packed = x.new_empty(x.numel(), 1).split([part.numel() for part in parts])
    for target, part in zip(packed, parts, strict=True):
        target.view(part.shape).copy_(part)
    return list(packed)


# --- the operator
_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "reduce_scatter(Tensor x, str group, int dim, SymInt[] rows_per_rank, "
    "ScalarType? reduce_dtype, str impl, ScalarType? out_dtype=None) -> Tensor"
)


def _reduce_scatter(
    x: torch.Tensor,
    group: str,
    dim: int,
    rows_per_rank: Sequence[int],
    reduce_dtype: torch.dtype | None,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    found = begin_call("reduce_scatter", group, x, impl)
    reduce_dtype, out_dtype = reduce_dtype or x.dtype, out_dtype or x.dtype
    if impl != "reference":
        for argument, dtype in (
            ("x", x.dtype),
            ("reduce_dtype", reduce_dtype),
            ("out_dtype", out_dtype),
        ):
            check_dtype_in(argument, dtype, SUM_DTYPES)
    sizes = scattered_sizes(x.shape[dim], found.world_size, rows_per_rank)
    return reduce_scatter_partials(found, x.to(reduce_dtype), dim, sizes, impl, out_dtype)


for _key in ("CPU", "CUDA"):
    _library.impl("reduce_scatter", _reduce_scatter, _key)


@torch.library.register_fake("plait::reduce_scatter")
def _reduce_scatter_fake(
    x: torch.Tensor,
    group: str,
    dim: int,
    rows_per_rank: Sequence[int],
    reduce_dtype: torch.dtype | None,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = inferred_share(shape[dim], group, rows_per_rank)
    return x.new_empty(shape, dtype=out_dtype or x.dtype)


__all__ = ["reduce_scatter", "reduce_scatter_partials"]
