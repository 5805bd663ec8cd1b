"""Numbers in tensor slots, as PyTorch itself makes them.

`x + 1` reaches a kernel as a 0-d tensor that is marked as a wrapped number: it promotes by its
category alone. The dispatcher shows it to Python as `1`, and `call_boxed` takes tensors only.
No function makes such a tensor, but a saved operand of autograd is one, and `.data` keeps the mark:
the same object kind that ATen had been given, so nothing of promotion is imitated here.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch

from plait.errors import UnsupportedError

NUMBERS = frozenset((bool, int, float, complex))
_FORMATS = {
    bool: ("?", torch.bool),
    int: ("q", torch.int64),
    float: ("d", torch.float64),
    complex: ("dd", torch.complex128),
}
_LIMIT = 1024  # numbers kept; a schedule of learning rates makes new ones for ever
_kept: dict[tuple[type, bytes], torch.Tensor] = {}


def wrapped(value: Any, *, fresh: bool = False) -> Any:
    """The wrapped number of `value`, kept for the next time; with `fresh` one of its own.

    A number without one, such as 2**64, comes back as it is: ATen's own error follows.
    """
    kind = type(value)
    parts = (value.real, value.imag) if kind is complex else (value,)
    try:
        packed = struct.pack(_FORMATS[kind][0], *parts)
    except struct.error:
        return value
    # The bytes tell 0.0 from -0.0, and one NaN is found again: equality does neither.
    found = None if fresh else _kept.get((kind, packed))
    if found is None:
        found = _make(kind, packed)
        if not fresh:
            if len(_kept) >= _LIMIT:
                _kept.clear()
            _kept[kind, packed] = found
    return found


def _make(kind: type, packed: bytes) -> torch.Tensor:
    # frombuffer allocates nothing through the dispatcher: this runs inside overrides of `empty`'s
    # users, and inference tensors must not be kept for calls outside inference mode.
    with torch.inference_mode(False):
        memory = torch.frombuffer(bytearray(packed), dtype=_FORMATS[kind][1], count=1)
        made = _prototypes()[kind].data
        return made.set_(memory.untyped_storage(), 0, (), ())


@cache
def _prototypes() -> dict[type, torch.Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        found: dict[type, Any] = {
            type(value): getattr((x * value).grad_fn, "_saved_other", None)
            for value in (True, 1, 1.0, 1j)
        }
    half = torch.ones((), dtype=torch.float16)
    for kind, each in found.items():
        if each is None or (kind is float and torch.result_type(half, each.data) != half.dtype):
            raise UnsupportedError(
                "torch",
                "a version that keeps a number operand for backward as the number it is",
                torch.__version__,
                "plait overrides nothing of ATen here; its own functions work.",
            )
    return found


def prepare() -> None:
    """Make sure that wrapped numbers can be made; UnsupportedError if this torch has none.

    Call it outside of overrides: autograd must be at work.
    """
    _prototypes()


__all__ = ["NUMBERS", "prepare", "wrapped"]
