"""The reduction engine: a reduction as data, and a call of it as one or two launches.

Method: docs/design/operator_core.md says how calls become launches; kernels are in
plait/ops/reduction/reduce_kernels.py, names of what they do in combine_kernels.py there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.ops.engine.call import Call, Pointer
from plait.ops.engine.dims import next_power_of_2
from plait.ops.reduction.layout import Layout, reduction_layout, result_strides_of
from plait.ops.reduction.tiles import choose

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
NUMBERS = FLOATS | INTEGERS
REAL = NUMBERS | {torch.bool}

_MAX_DIMS = 64  # ATen refuses more

UNUSUAL_DTYPE = "a dtype that this reduction does not take"
REFUSED = "arguments that ATen may refuse"
MANY_DIMS = "dims that one stride does not describe, too many of them"
EMPTY = "a reduction of no elements"
TWO_STRIDES = "two results of different strides"


@dataclass(frozen=True)
class Reduction:
    """A reduction as data; the words are those of combine_kernels.py.

    Attributes:
        combine: how two accumulators become one.
        load: what an element is before it is combined.
        finish: what an accumulator is turned into.
        needs_elements: whether there is no result of no elements.
        ordered: whether the elements' indices matter.
        double_on_cpu: whether ATen's CPU kernel adds fp32 numbers in fp64.
    """

    combine: str
    load: str = "value"
    finish: str = "value"
    needs_elements: bool = False
    ordered: bool = False
    double_on_cpu: bool = False

    @property
    def components(self) -> int:
        """Tensors of an accumulator."""
        if self.combine == "moments":
            return 3
        return 2 if self.combine in ("minmax", "argmax", "argmin", "logsumexp") else 1


@dataclass(frozen=True)
class Operand:
    """What is reduced: sizes and strides of a view of `tensor`, which dims; `other` a factor."""

    tensor: Tensor
    sizes: Sequence[int]
    strides: Sequence[int]
    dims: tuple[int, ...]
    other: Tensor | None = None


def reduced_dims(call: Call, ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """`dim` of ATen as indices in order; None and no dims mean all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    given = [dim] if isinstance(dim, int) else list(dim)
    if any(not -max(ndim, 1) <= each < max(ndim, 1) for each in given):
        call.decline(REFUSED)
    found = sorted({each % max(ndim, 1) for each in given})
    if len(found) < len(given):
        call.decline(REFUSED)
    return tuple(found) if ndim else ()


def reduce(
    call: Call,
    operand: Tensor | Operand,
    dims: tuple[int, ...],
    keepdim: bool,
    reduction: Reduction,
    dtypes: Sequence[torch.dtype],
    *,
    through: torch.dtype | None = None,
    parameter: float = 0.0,
) -> None:
    """Record the call of a reduction.

    Args:
        operand: what is reduced over `dims`.
        dtypes: of the results, in their order.
        through: the dtype that elements are converted to before they are accumulated.
        parameter: the correction of a variance, the exponent of a norm.
    """
    if isinstance(operand, Tensor):
        operand = Operand(operand, operand.shape, operand.stride(), dims)
    sizes, ndim = operand.sizes, len(operand.sizes)
    if ndim > _MAX_DIMS:
        call.decline(REFUSED)
    shape = [1 if d in dims else n for d, n in enumerate(sizes) if keepdim or d not in dims]
    results = [call.result(shape, dtype) for dtype in dtypes]
    if any(each.stride() != results[0].stride() for each in results):
        call.decline(TWO_STRIDES)
    strides = result_strides_of(results[0], ndim, dims)
    if not results[0].numel():
        return
    layout = reduction_layout(sizes, operand.strides, dims, strides, ordered=reduction.ordered)
    if layout is None:
        call.decline(MANY_DIMS)
    if reduction.needs_elements and not layout.reduced:
        call.decline(EMPTY)
    _Recorder(call, operand, layout, reduction, through, parameter).record(results)


class _Recorder:
    """Turns a reduction of known layout into launches."""

    def __init__(
        self,
        call: Call,
        operand: Operand,
        layout: Layout,
        reduction: Reduction,
        through: torch.dtype | None,
        parameter: float,
    ) -> None:
        self.call, self.operand, self.layout, self.reduction = call, operand, layout, reduction
        dtype = operand.tensor.dtype
        self.through = through or dtype
        self.acc = _accumulator(reduction, dtype, self.through, layout.reduced)
        if reduction.double_on_cpu and call.device.type == "cpu" and dtype is torch.float32:
            self.acc = torch.float64
        self.index = torch.int64 if layout.wide else torch.int32
        whole = reduction.combine in ("moments", "logsumexp")
        weight = sum(each.itemsize for each in self._components()) // 4
        self.tiles = choose(
            layout,
            dtype.itemsize,
            weight=self.acc.itemsize // 4 if whole else weight,
            whole=whole,
            num_sms=call.info.num_sms,
            interpreted=call.interpreted,
        )
        self.common: dict[str, Any] = {
            "num_results": layout.num_results,
            "count": layout.reduced,
            "splits": self.tiles.shares,
            "COMBINE": reduction.combine,
            "FINISH": reduction.finish,
            "P": parameter,
            "ACC": _triton_dtype(self.acc),
            "INDEX": _triton_dtype(self.index),
            "NUM_K": len(layout.kept),
            "WIDE": layout.wide,
            # The second launch starts while the first one ends.
            "EARLY": self.tiles.shares > 1 and _starts_early(call.info.arch),
        }

    def _components(self) -> list[torch.dtype]:
        """Dtypes of an accumulator."""
        last = self.index if self.reduction.ordered else self.acc
        return [self.acc, last, self.acc][: self.reduction.components]

    def record(self, results: Sequence[Tensor]) -> None:
        """One launch, or two by way of partial results."""
        if self.tiles.shares == 1:
            self._reduce(_written(results), split=False)
            return
        size = self.tiles.shares * self.layout.num_results
        partials = [self.call.empty((size,), dtype) for dtype in self._components()]
        partials = [*partials, *[None] * (3 - len(partials))]
        self._reduce(partials, split=True)
        self._finish(partials, _written(results))

    def _reduce(self, targets: Sequence[Any], *, split: bool) -> None:
        from plait.ops.reduction.reduce_kernels import reduce_kernel

        layout, tiles, reduction, operand = self.layout, self.tiles, self.reduction, self.operand
        first, second, third = targets
        other = operand.other
        pad = reduction.combine == "sum" and reduction.load != "power"
        args = {
            **self.common,
            **layout.arguments(),
            "x_ptr": _read(operand.tensor),
            "y_ptr": None if other is None else _read(other),
            "y_stride": 0 if other is None else other.stride(0),
            "first_ptr": first,
            "second_ptr": second,
            "third_ptr": third,
            "num_outer": layout.num_outer,
            "inner": layout.inner.size,
            "num_tiles": tiles.num_tiles(layout),
            "inner_tiles": tiles.inner_tiles(layout),
            "LOAD": reduction.load,
            "THROUGH": _triton_dtype(self.through),
            "NUM_O": len(layout.outer),
            "BLOCK_K": tiles.block_k,
            "BLOCK_O": tiles.block_o,
            "BLOCK_I": tiles.block_i,
            "SPLIT": split,
            "PAD": pad,
            "ONE": tiles.shares == 1 and tiles.num_tiles(layout) == 1,
            "STAGES": tiles.stages,
            "UNROLL": tiles.unroll,
        }
        grid = tiles.k_blocks(layout) * tiles.shares
        self.call.launch(reduce_kernel, grid, args, num_warps=tiles.num_warps)

    def _finish(self, partials: Sequence[Any], targets: Sequence[Any]) -> None:
        from plait.ops.reduction.reduce_kernels import partials_kernel

        layout = self.layout
        block_s = next_power_of_2(self.tiles.shares)
        block_k = min(next_power_of_2(layout.num_results), max(1024 // block_s, 1))
        args = {
            **self.common,
            **layout.result_arguments(),
            "a_ptr": partials[0],
            "b_ptr": partials[1],
            "c_ptr": partials[2],
            "first_ptr": targets[0],
            "second_ptr": targets[1],
            "BLOCK_K": block_k,
            "BLOCK_S": block_s,
        }
        blocks = -(-layout.num_results // block_k)
        self.call.launch(partials_kernel, blocks, args, early=args["EARLY"])


def _accumulator(
    reduction: Reduction, dtype: torch.dtype, through: torch.dtype, reduced: int
) -> torch.dtype:
    """fp32, fp64 where it is asked for, int64; int32 where that is enough."""
    counts = reduction.load == "nonzero"
    if through.is_floating_point and not counts:
        return torch.float64 if torch.float64 in (dtype, through) else torch.float32
    bits = dtype.itemsize * 8
    if counts or torch.bool in (dtype, through):
        bits = 1
    elif dtype.is_floating_point:
        return torch.int64
    if reduction.combine == "sum":
        return torch.int32 if reduced << bits < 2**31 else torch.int64
    if reduction.combine == "prod":
        return torch.int32 if bits == 1 else torch.int64
    return torch.int32 if bits <= 32 else torch.int64


def _starts_early(arch: str) -> bool:
    return arch.startswith("sm") and int(arch[2:]) >= 90


def _read(tensor: Tensor) -> Tensor | Pointer:
    """A bool is a byte that is not 0."""
    return Pointer(tensor, torch.uint8) if tensor.dtype is torch.bool else tensor


def _written(results: Sequence[Tensor]) -> list[Any]:
    return [*[_read(each) for each in results], *[None] * (3 - len(results))]


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    names = {torch.bool: "int1"}
    return getattr(tl, names.get(dtype, str(dtype).removeprefix("torch.")))


__all__ = [
    "FLOATS",
    "INTEGERS",
    "NUMBERS",
    "REAL",
    "REFUSED",
    "UNUSUAL_DTYPE",
    "Operand",
    "Reduction",
    "reduce",
    "reduced_dims",
]
