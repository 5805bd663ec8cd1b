"""The class of a call: what its speed depends on, coarsely, read from shapes and strides alone.

dtype    of the main operand, the largest tensor that is read
layout   its dims in memory order, outermost first: k a kept dim, r a reduced (or scanned, or
         normalised) one, neighbours of a kind written once. kr: rows of neighbours; rk: columns;
         r: everything; rkr: what a batch norm reads. "" where no class describes the operand
size     log2 of its elements
row      log2 of the elements that are reduced together
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.ops.engine.signature import Schema

UNALIGNED = "~"
_ALIGNMENT = 16  # bytes of the widest load


@dataclass(frozen=True)
class CallClass:
    """One call's place in the win table; fields as at the top of the file."""

    dtype: str
    layout: str
    size: float
    row: float


def classify(schema: Schema, named: Mapping[str, Any]) -> CallClass:
    """The class of a call with these arguments of the overload."""
    outs = {each.name: None for each in schema.outs}
    tensors = [
        each for each in schema.tensors_of({**named, **outs}) if isinstance(each, torch.Tensor)
    ]
    main = max(tensors, key=torch.Tensor.numel, default=None)
    if main is None or not main.numel():
        return CallClass("" if main is None else dtype_name(main.dtype), "", 0.0, 0.0)
    dims = _reduced_dims(named, main)
    row = math.prod(main.shape[dim] for dim in dims)
    if "group" in named:
        row = max(row // named["group"], 1)
    size = math.log2(main.numel())
    return CallClass(_dtypes(named, main), _layout(main, dims), size, math.log2(row))


def _dtypes(named: Mapping[str, Any], main: torch.Tensor) -> str:
    found = dtype_name(main.dtype)
    wanted = torch.float32 if named.get("half_to_float") else None
    wanted = wanted or named.get("dtype") or named.get("input_dtype")
    if isinstance(wanted, torch.dtype) and wanted != main.dtype:
        return f"{found}->{dtype_name(wanted)}"
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As the table writes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _reduced_dims(named: Mapping[str, Any], main: torch.Tensor) -> tuple[int, ...]:
    """The dims of `main` along which the operator works, by the names of its arguments."""
    everything = tuple(range(main.dim()))
    if "normalized_shape" in named:
        return everything[max(main.dim() - len(named["normalized_shape"]), 0) :]
    if "group" in named:  # of channels: what one group holds lies together
        return everything[1:]
    if "running_mean" in named or "ignore_index" in named:
        channel = min(1, main.dim() - 1)
        channels = (channel,) if "ignore_index" in named else ()
        return channels or tuple(dim for dim in everything if dim != channel)
    if named.get("reduction") == 0:
        return ()
    dim = named.get("dim")
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return everything
    listed = [dim] if isinstance(dim, int) else dim
    dims = {each % main.dim() for each in listed} if everything else set()
    if "g" in named or "saved_g" in named:  # a weight norm names the dim that it keeps
        return tuple(each for each in everything if each not in dims)
    return tuple(sorted(dims))


def _layout(main: torch.Tensor, dims: Sequence[int]) -> str:
    sizes, strides = main.shape, main.stride()
    order = sorted(
        (dim for dim in range(main.dim()) if sizes[dim] > 1), key=lambda dim: -strides[dim]
    )
    if not order:
        return "r" if dims or not main.dim() else "k"
    if strides[order[-1]] != 1:
        return ""  # nothing lies side by side, or elements are repeated
    letters = ["r" if dim in dims else "k" for dim in order]
    kept = [now for before, now in zip(["", *letters], letters, strict=False) if now != before]
    starts = [
        strides[dim] * main.itemsize
        for index, dim in enumerate(order[:-1])
        if letters[index] != letters[index + 1]  # else two dims that are one to a kernel, mostly
        or strides[dim] != strides[order[index + 1]] * sizes[order[index + 1]]
    ]
    aligned = not any(each % _ALIGNMENT for each in (*starts, main.data_ptr()))
    return "".join(kept) + ("" if aligned else UNALIGNED)


__all__ = ["UNALIGNED", "CallClass", "classify", "dtype_name"]
