"""The scan engine: a scan as data, and a call of it as one or two launches.

Kernels are in plait/ops/scan/scan_kernels.py, names of what they combine in combine_kernels.py
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.ops.engine.call import Call, Pointer
from plait.ops.norm.rows import row_layout
from plait.ops.scan import tiles

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
NUMBERS = FLOATS | INTEGERS
REAL = NUMBERS | {torch.bool}

UNUSUAL_DTYPE = "a dtype that this scan does not take"
NARROWING = "a conversion of floats to these integers"
WRONG_DIM = "a dim that the tensor does not have"
MANY_DIMS = "rows that more than four strides number"
TWO_STRIDES = "two results of different strides"


@dataclass(frozen=True)
class Scan:
    """A scan as data.

    Attributes:
        combine: how two accumulators become one, a word of combine_kernels.py.
        double_on_cpu: whether ATen's CPU kernel accumulates fp32 numbers in fp64.
    """

    combine: str
    double_on_cpu: bool = False

    @property
    def indexed(self) -> bool:
        """Whether the second result is the index of the first."""
        return self.combine in ("max", "min")

    def accumulator(self, call: Call, through: torch.dtype) -> torch.dtype:
        """Of values that were converted to `through`: fp64 for fp64, fp32 for other floats; for
        integers what keeps their bits, since sums and products wrap alike."""
        if through is torch.float32 and self.double_on_cpu and call.device.type == "cpu":
            return torch.float64
        if through in FLOATS:
            return torch.float64 if through is torch.float64 else torch.float32
        return torch.int64 if through is torch.int64 else torch.int32

    def components(self, accumulator: torch.dtype, size: int) -> tuple[torch.dtype, ...]:
        """The dtypes of an accumulator's tensors for rows of `size` elements."""
        if self.indexed:
            return accumulator, torch.int32 if size < 2**31 else torch.int64
        return (accumulator,) * (2 if self.combine == "logsumexp" else 1)


def scan(call: Call, x: Tensor, dim: int, what: Scan, through: torch.dtype) -> None:
    """Record the call of a scan of `x` along `dim`, by way of dtype `through`, which is also that
    of the result; `through` and the dtype of `x` are in REAL."""
    ndim = max(x.dim(), 1)
    if not -ndim <= dim < ndim:
        call.decline(WRONG_DIM)
    if x.dtype in FLOATS and through not in FLOATS | {torch.int64}:
        call.decline(NARROWING)
    out = call.result(x.shape, through)
    indices = call.result(x.shape, torch.int64) if what.indexed else None
    if indices is not None and indices.stride() != out.stride():
        call.decline(TWO_STRIDES)
    if not x.numel():
        return
    layout = row_layout([x, out], dim)
    if layout is None:
        call.decline(MANY_DIMS)
    accumulator = what.accumulator(call, through)
    components = what.components(accumulator, layout.size)
    found = tiles.cut(
        layout,
        min(x.element_size(), out.element_size()),
        weight=sum(each.itemsize for each in components) // 4,
        num_sms=call.info.num_sms,
        interpreted=call.interpreted,
    )
    tile = found.tile
    both: dict[str, Any] = {
        "x_ptr": _read(x),
        "size": layout.size,
        "chunk": found.chunk,
        "row_blocks": tile.grid,
        **layout.sizes(),
        **layout.places("x", 0),
        **tile.constants(layout),
        "COMBINE": what.combine,
        "THROUGH": _triton_dtype(through),
        "ACC": _triton_dtype(accumulator),
        "INDEX": _triton_dtype(components[-1]) if what.indexed else None,
        "SERIAL": found.serial,
        "CHUNKS": 0 if found.chunks == 1 else tiles.next_power_of_2(found.chunks),
    }
    totals = _totals(call, both, found, components, layout.num_rows)
    _scan(call, both, found, out, indices, totals, layout.places("out", 1))


def _totals(
    call: Call,
    both: dict[str, Any],
    found: tiles.Cut,
    components: Sequence[torch.dtype],
    num_rows: int,
) -> dict[str, Any]:
    """Launch arguments `first_ptr` and `second_ptr`: totals of all chunks but the last."""
    from plait.ops.scan.scan_kernels import totals_kernel

    before = found.chunks - 1
    totals: list[Any] = [call.empty((before, num_rows), each) for each in components if before]
    totals += [None] * (2 - len(totals))
    args = {"first_ptr": totals[0], "second_ptr": totals[1]}
    grid = found.tile.grid * before
    call.launch(totals_kernel, grid, {**both, **args}, num_warps=found.tile.num_warps)
    return args


def _scan(
    call: Call,
    both: dict[str, Any],
    found: tiles.Cut,
    out: Tensor,
    indices: Tensor | None,
    totals: dict[str, Any],
    places: dict[str, int],
) -> None:
    from plait.ops.scan.scan_kernels import scan_kernel

    args = {
        **both,
        **totals,
        **places,
        "out_ptr": _read(out),
        "index_ptr": indices,
        "WHOLE": found.tile.whole,
        "INPLACE": call.given.inplace,
    }
    grid = found.tile.grid * found.chunks
    call.launch(scan_kernel, grid, args, num_warps=found.tile.num_warps)


def _read(tensor: Tensor) -> Tensor | Pointer:
    """A bool is a byte that is not 0."""
    return Pointer(tensor, torch.uint8) if tensor.dtype is torch.bool else tensor


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    names = {torch.bool: "int1"}
    return getattr(tl, names.get(dtype, str(dtype).removeprefix("torch.")))


__all__ = [
    "FLOATS",
    "INTEGERS",
    "MANY_DIMS",
    "NARROWING",
    "NUMBERS",
    "REAL",
    "TWO_STRIDES",
    "UNUSUAL_DTYPE",
    "WRONG_DIM",
    "Scan",
    "scan",
]
