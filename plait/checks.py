"""Argument checks shared by public functions; each raises one class of `plait.errors`.

The first parameter is always the argument's name as the caller knows it. A check that passes costs
no allocation and reads no tensor data, so it is safe under `torch.compile` and graph capture.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from plait.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    RankCountError,
    ShapeError,
    StrideError,
)

T = TypeVar("T")


def check_tensor(argument: str, value: object) -> None:
    """`value` is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(argument, "a torch.Tensor", type(value).__name__, "Pass a tensor.")
    if value.layout is not torch.strided:
        raise ArgumentError(
            argument, "a strided tensor", value.layout, f"Pass {argument}.to_dense()."
        )


def check_one_of(argument: str, value: T, choices: Collection[T]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise ArgumentError(argument, f"one of {names}", repr(value), "Pass one of these.")


def check_dtype_in(argument: str, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> None:
    """`dtype`, of the tensor `argument` or that argument itself, is one of `allowed`."""
    if dtype not in allowed:
        names = ", ".join(str(each) for each in allowed)
        raise DtypeError(argument, f"dtype {names}", dtype, "Convert it to one of these.")


def check_same_dtype(argument: str, tensor: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """`tensor` has the dtype of `like`, which the caller knows as `other`."""
    if tensor.dtype != like.dtype:
        raise DtypeError(
            argument,
            f"{like.dtype} (the dtype of {other})",
            tensor.dtype,
            f"Pass {argument}.to({other}.dtype).",
        )


def check_device(argument: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    """`tensor` lies on `device`, the device of `owner` (`"group"`, `"x"`)."""
    if tensor.device != device:
        raise DeviceError(
            argument,
            f"{device} (the device of {owner})",
            tensor.device,
            f"Pass {argument}.to({owner}.device).",
        )


def check_same_device(argument: str, tensor: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """`tensor` lies on the device of `like`, which the caller knows as `other`."""
    check_device(argument, tensor, like.device, other)


def check_min_ndim(argument: str, tensor: torch.Tensor, min_ndim: int, meaning: str) -> None:
    """`tensor` has `min_ndim` or more dimensions; `meaning` spells them, such as `[..., K]`."""
    if tensor.dim() < min_ndim:
        raise ShapeError(
            argument,
            f"at least {min_ndim} dimensions {meaning}",
            f"shape {list(tensor.shape)}",
            "Add the missing dimensions with unsqueeze.",
        )


def check_shape(
    argument: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str | None],
    meaning: str,
    remedy: str,
) -> None:
    """`tensor` has `shape`; a name (`"N"`) or None in it leaves that size free.

    `meaning` says where the required sizes come from, such as `K of x`.
    """
    got = tensor.shape
    fits = len(got) == len(shape) and all(
        want is None or isinstance(want, str) or have == want
        for have, want in zip(got, shape, strict=True)
    )
    if not fits:
        spelled = ", ".join("*" if want is None else str(want) for want in shape)
        raise ShapeError(argument, f"shape [{spelled}] ({meaning})", list(got), remedy)


def check_divisible(argument: str, size: int, divisor: int, what: str, remedy: str) -> None:
    """`size`, described by `what` (`"size of dim 0"`), is a multiple of `divisor`."""
    if size % divisor:
        raise ShapeError(argument, f"a {what} divisible by {divisor}", size, remedy)


def check_last_dim_contiguous(argument: str, tensor: torch.Tensor) -> None:
    """Neighbours in the last dimension are neighbours in memory."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise StrideError(
            argument,
            "stride 1 in the last dimension",
            f"strides {list(tensor.stride())}",
            f"Pass {argument}.contiguous().",
        )


def check_contiguous(argument: str, tensor: torch.Tensor) -> None:
    """`tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise StrideError(
            argument,
            "a contiguous tensor",
            f"strides {list(tensor.stride())}",
            f"Pass {argument}.contiguous().",
        )


def normalize_dim(argument: str, dim: int, ndim: int) -> int:
    """`dim` counted from the front, for a tensor of `ndim` dimensions."""
    if not _is_size(dim) or not -ndim <= dim < ndim:
        raise ShapeError(
            argument,
            f"an integer from {-ndim} to {ndim - 1} (the tensor has {ndim} dimensions)",
            repr(dim),
            "Pass a dimension that the tensor has.",
        )
    return dim % ndim


def check_rank_list(argument: str, values: Sequence[int], world_size: int) -> tuple[int, ...]:
    """`values` holds one integer of 0 or more for each of `world_size` ranks; returned as a tuple.

    Ranks that pass different lists are found by the debug mode, not here.
    """
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        raise ArgumentError(
            argument,
            "a list of integers known to the host",
            type(values).__name__,
            "Pass a list, with the same values on every rank.",
        )
    if len(values) != world_size:
        raise RankCountError(
            argument,
            f"one entry per rank, {world_size} in all",
            f"{len(values)} entries {list(values)}",
            "Pass the same list on every rank, in rank order.",
        )
    for rank, value in enumerate(values):
        if not _is_size(value) or value < 0:
            raise ArgumentError(
                f"{argument}[{rank}]", "an integer, 0 or more", repr(value), "Pass a row count."
            )
    return tuple(values)


def _is_size(value: object) -> bool:
    # SymInt: sizes are symbolic while torch.compile traces with dynamic shapes.
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


__all__ = [
    "check_contiguous",
    "check_device",
    "check_divisible",
    "check_dtype_in",
    "check_last_dim_contiguous",
    "check_min_ndim",
    "check_one_of",
    "check_rank_list",
    "check_same_device",
    "check_same_dtype",
    "check_shape",
    "check_tensor",
    "normalize_dim",
]
