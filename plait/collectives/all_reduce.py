"""AllReduce: the sum over ranks on every rank, the same bits everywhere and on every run.

One-shot: each rank pushes its whole tensor to all peers and adds; one round of waits. Two-shot:
reduce-scatter, then all-gather of the flattened tensor; 2 / world_size of the traffic in two
rounds. Both add in rank order, so they give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.checks import check_dtype_in, check_one_of, check_tensor
from plait.collectives.all_gather import gather_whole
from plait.collectives.calls import begin_call
from plait.collectives.reduce_scatter import reduce_scatter_partials
from plait.collectives.reference import all_reduce_reference
from plait.collectives.segments import padded_rows
from plait.collectives.sums import SUM_DTYPES, sum_over_ranks
from plait.symm import signals
from plait.symm.group import Group

ALGORITHMS = ("auto", "one_shot", "two_shot")

# More bytes out of a rank than two-shot sends cost as much as its second round of launches and
# waits: 10 us at 360 GB/s. An estimate from link rate and launch costs, not a measurement.
_ONE_SHOT_EXTRA_BYTES = 4 << 20
_SHARE_ELEMENTS = 128  # shares start at multiples, so that kernels and copies see aligned addresses


def all_reduce(
    x: torch.Tensor,
    *,
    group: Group,
    reduce_dtype: torch.dtype | None = None,
    impl: str = "auto",
    algorithm: str = "auto",
) -> torch.Tensor:
    """The sum of every rank's `x`, on every rank.

    Args:
        x: the same shape on every rank, fp32, bf16 or fp16, any dims (none, or empty) and strides.
        group: the ranks.
        reduce_dtype: dtype in which x travels: fp32, bf16 or fp16, default that of x.
        impl: "fused" pushes through symmetric memory, "unfused" uses torch.distributed (or, where
            the ranks share memory, pushes as well), "reference" exchanges on the host and takes any
            dtype; "auto" is the first that works.
        algorithm: "one_shot", "two_shot", or "auto" for the faster one; the bits are the same.

    Returns:
        A new contiguous tensor like x. Every rank's x is rounded to reduce_dtype, added in fp32 in
        rank order and rounded once.

    Raises:
        DtypeError, DeviceError, GroupError, CapacityError, UnsupportedError: before any rank waits.
        PeerTimeoutError: a peer never came.

    The gradient of x is the all-reduced gradient.
    """
    check_tensor("x", x)
    return _AllReduce.apply(x, group.name, reduce_dtype, algorithm, impl)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: str,
        reduce_dtype: torch.dtype | None,
        algorithm: str,
        impl: str,
    ) -> torch.Tensor:
        ctx.options = (group, reduce_dtype, algorithm, impl)
        return torch.ops.plait.all_reduce(x, group, reduce_dtype, algorithm, impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return torch.ops.plait.all_reduce(grad, *ctx.options), None, None, None, None


def choose_algorithm(
    num_elements: int, itemsize: int, world_size: int, capacity_bytes: int, algorithm: str = "auto"
) -> str:
    """ "one_shot" or "two_shot": `algorithm`, or from sizes that are the same on every rank."""
    if algorithm != "auto":
        return algorithm
    if world_size * padded_rows(num_elements) * itemsize > capacity_bytes:
        return "two_shot"
    one_shot_bytes = (world_size - 1) * num_elements * itemsize
    extra_bytes = one_shot_bytes - 2 * one_shot_bytes // world_size
    return "one_shot" if extra_bytes <= _ONE_SHOT_EXTRA_BYTES else "two_shot"


def share_sizes(num_elements: int, world_size: int) -> tuple[int, ...]:
    """Elements of each rank's share: as equal as alignment allows, the last ranks fewer or none."""
    share = -(-num_elements // world_size)
    if share > _SHARE_ELEMENTS:
        share = -(-share // _SHARE_ELEMENTS) * _SHARE_ELEMENTS
    return tuple(min(share, max(0, num_elements - rank * share)) for rank in range(world_size))


def _reduce(
    group: Group, x: torch.Tensor, reduce_dtype: torch.dtype, algorithm: str
) -> torch.Tensor:
    """The sum through symmetric memory; x is not empty."""
    flat = x.to(reduce_dtype).contiguous().view(-1, 1)
    num_elements = flat.shape[0]
    capacity_bytes = group.workspace.capacity_bytes
    chosen = choose_algorithm(
        num_elements, flat.element_size(), group.world_size, capacity_bytes, algorithm
    )
    if chosen == "two_shot":
        sizes = share_sizes(num_elements, group.world_size)
        share = reduce_scatter_partials(group, flat, 0, sizes, out_dtype=x.dtype)
        return gather_whole(group, share, 0, sizes).view(x.shape)
    out = x.new_empty(x.shape)
    call = f"all_reduce {tuple(x.shape)} {reduce_dtype}"
    parts = [flat] * group.world_size
    sum_over_ranks(group, parts, out.view(-1, 1), signals.Operator.ALL_REDUCE, call)
    return out


# --- the operator
_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "all_reduce(Tensor x, str group, ScalarType? reduce_dtype, str algorithm, str impl) -> Tensor"
)


def _all_reduce(
    x: torch.Tensor, group: str, reduce_dtype: torch.dtype | None, algorithm: str, impl: str
) -> torch.Tensor:
    check_one_of("algorithm", algorithm, ALGORITHMS)
    found = begin_call("all_reduce", group, x, impl, f"algorithm={algorithm!r}")
    reduce_dtype = reduce_dtype or x.dtype
    call = f"all_reduce {tuple(x.shape)} {reduce_dtype}"
    if impl == "reference":
        return all_reduce_reference(found.exchange_tensor(call, x), reduce_dtype).contiguous()
    check_dtype_in("x", x.dtype, SUM_DTYPES)
    check_dtype_in("reduce_dtype", reduce_dtype, SUM_DTYPES)
    if not found.transport.symmetric:
        found.check()
        found.agree(call)
        return found.transport.all_reduce(x, reduce_dtype)
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return _reduce(found, x, reduce_dtype, algorithm)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _key)


@torch.library.register_fake("plait::all_reduce")
def _all_reduce_fake(
    x: torch.Tensor, group: str, reduce_dtype: torch.dtype | None, algorithm: str, impl: str
) -> torch.Tensor:
    return x.new_empty(x.shape)


__all__ = ["all_reduce", "choose_algorithm", "share_sizes"]
