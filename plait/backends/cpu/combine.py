"""`tl.reduce` and `tl.associative_scan` of the interpreter, for any combine function.

Triton's interpreter calls a combine function of its own once an element; here it is called once a
level of a tree, on whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import ReduceOps, ScanOps, TensorHandle

_NUMPY_REDUCES = frozenset(
    (
        tl.standard._sum_combine,
        tl.standard._elementwise_max,
        tl.standard._elementwise_min,
    )
)
_NUMPY_SCANS = frozenset((tl.standard._sum_combine,))


class _Combine:
    """Gives Triton's own operations a combine function that compares equal to the original."""

    def __init__(self, original: Any, fn: Any) -> None:
        self.original, self.fn = original, fn

    def __eq__(self, other: object) -> bool:
        return self.original is other

    def __hash__(self) -> int:
        return hash(self.original)


def reduce(value: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """`tl.reduce`: neighbours are combined first, then pairs of neighbours, and so on."""
    axis, keep_dims = _plain(axis), _plain(keep_dims)
    original = getattr(combine_fn, "kernel", combine_fn)
    if original in _NUMPY_REDUCES and not _is_bf16(value):
        return ReduceOps(axis, _Combine(original, combine_fn), keep_dims).apply(value)
    single = not isinstance(value, (tuple, tl.tuple))
    values = [value] if single else list(value)
    arrays = [np.asarray(each.handle.data) for each in values]
    num_dims = arrays[0].ndim
    if axis is None:
        arrays, along = [each.reshape(-1) for each in arrays], 0
    else:
        along = axis % num_dims
    dtypes = [each.dtype for each in values]
    while arrays[0].shape[along] > 1:
        halves = [[_every_other(each, along, first) for each in arrays] for first in (0, 1)]
        arrays = _combined(combine_fn, halves[0], halves[1], dtypes)
    if keep_dims:
        shape = None if axis is not None else (1,) * num_dims
        results = [each if shape is None else each.reshape(shape) for each in arrays]
    else:
        results = [np.squeeze(each, along) for each in arrays]
    tensors = [_tensor(each, dtype) for each, dtype in zip(results, dtypes, strict=True)]
    return tensors[0] if single else tuple(tensors)


def scan(value: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """`tl.associative_scan`: with what lies 1, 2, 4, ... places before."""
    axis, reverse = _plain(axis), _plain(reverse)
    original = getattr(combine_fn, "kernel", combine_fn)
    if original in _NUMPY_SCANS and not _is_bf16(value):
        return ScanOps(axis, _Combine(original, combine_fn), reverse).apply(value)
    single = not isinstance(value, (tuple, tl.tuple))
    values = [value] if single else list(value)
    dtypes = [each.dtype for each in values]
    arrays = [np.asarray(each.handle.data) for each in values]
    along = axis % arrays[0].ndim
    if reverse:
        arrays = [np.flip(each, along) for each in arrays]
    size, step = arrays[0].shape[along], 1
    index = np.arange(size).reshape([-1 if dim == along else 1 for dim in range(arrays[0].ndim)])
    while step < size:
        before = [np.roll(each, step, along) for each in arrays]
        both = _combined(combine_fn, before, arrays, dtypes)
        arrays = [np.where(index >= step, new, old) for new, old in zip(both, arrays, strict=True)]
        step *= 2
    if reverse:
        arrays = [np.flip(each, along) for each in arrays]
    tensors = [_tensor(each, dtype) for each, dtype in zip(arrays, dtypes, strict=True)]
    return tensors[0] if single else tuple(tensors)


def _combined(
    combine_fn: Callable[..., Any],
    left: Sequence[np.ndarray],
    right: Sequence[np.ndarray],
    dtypes: Sequence[Any],
) -> list[np.ndarray]:
    operands = [
        _tensor(each, dtype)
        for side in (left, right)
        for each, dtype in zip(side, dtypes, strict=True)
    ]
    result = combine_fn(*operands)
    results = list(result) if isinstance(result, (tuple, tl.tuple)) else [result]
    return [
        np.require(np.broadcast_to(np.asarray(each.handle.data), left[0].shape), old.dtype, "W")
        for each, old in zip(results, left, strict=True)
    ]


def _every_other(array: np.ndarray, axis: int, first: int) -> np.ndarray:
    index = [slice(None)] * array.ndim
    index[axis] = slice(first, None, 2)
    return array[tuple(index)]


def _tensor(array: np.ndarray, dtype: Any) -> Any:
    array = np.ascontiguousarray(array).reshape(array.shape)
    scalar = dtype.scalar
    if array.ndim == 0:
        return tl.tensor(TensorHandle(array.reshape(1), scalar), scalar)
    return tl.tensor(TensorHandle(array, scalar), tl.block_type(scalar, list(array.shape)))


def _is_bf16(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "name", "") == "bf16"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


__all__ = ["reduce", "scan"]
