"""The strides that ATen gives the result of an elementwise operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def elementwise_strides(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Strides of a new result of `operands`, which broadcast: the order of dims in memory is that
    of the first operands that tell, as in ATen's TensorIterator, and nothing is left between.

    Raises RuntimeError where the shapes do not broadcast.
    """
    shape = torch.broadcast_shapes(*(each.shape for each in operands))
    if all(each.shape == shape for each in operands):
        first = operands[0]
        if all(each.is_contiguous() for each in operands):
            return _contiguous(shape)
        if len(shape) == 4 and all(
            each.is_contiguous(memory_format=torch.channels_last) for each in operands
        ):
            _, channels, height, width = shape
            return (height * width * channels, 1, width * channels, channels)
        if all(each.stride() == first.stride() for each in operands) and _dense(first):
            return first.stride()
    strides = [_broadcast(each, shape) for each in operands]
    order = list(range(len(shape) - 1, -1, -1))  # closest first
    for start in range(1, len(order)):
        place = start
        for before in range(start - 1, -1, -1):
            found = _compare(order[before], order[place], shape, strides)
            if found > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif found < 0:
                break
    if order == list(range(len(shape) - 1, -1, -1)):
        return _contiguous(shape)
    result, step = [0] * len(shape), 1
    for dim in order:
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def _compare(a: int, b: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """1 if dim `a` is farther apart than `b`, -1 if closer, 0 if no operand tells."""
    for each in strides:
        if each[a] == 0 or each[b] == 0:
            continue
        if each[a] != each[b]:
            return 1 if each[a] > each[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def _broadcast(tensor: torch.Tensor, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - tensor.dim()
    found = [0] * missing
    for size, stride, wanted in zip(tensor.shape, tensor.stride(), shape[missing:], strict=True):
        found.append(stride if size == wanted else 0)
    return found


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    result, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


__all__ = ["elementwise_strides"]
