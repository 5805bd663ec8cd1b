"""The Python kernel in an ATen slot: gate, then plait's kernel or the original.

It stands below autograd, autocast, functorch, modes and tensor subclasses, so it sees plain tensors
of its own device, or numbers. Whatever plait does not take goes to the original as it came, before
anything is written; errors are ATen's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.ops.aten import gate, report, spec
from plait.ops.aten.originals import Original

# Every reason that is no operator's own. The counts have one entry a reason.
OFF = "off in this thread"
INSIDE = "called by a kernel of plait"
NO_KERNEL = "plait has no kernel for it"
SUBCLASS = "a tensor subclass"
LAYOUT = "a tensor that is not strided"
OTHER_DEVICE = "a tensor on another device"
LAZY_VIEW = "a conjugated or negated view"

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def override(original: Original, device_type: str) -> Callable[..., Any]:
    """The function to register in the slot of `original`; calls on `device_type` reach it."""
    key, dispatch_key = original.key, original.dispatch_key
    aten = original.call
    state, running, watching = gate.STATE, gate.RUNNING, report.WATCHING
    selected, find, tell = gate.selected, spec.find, report.tell
    counter = report.Counter(key, dispatch_key)
    count = counter.count

    def kernel(*args: Any, **kwargs: Any) -> Any:
        on = key in (selected() if state.open_blocks else state.everywhere)
        if not on or running.inside:
            if watching.listeners:
                tell(key, dispatch_key, INSIDE if on else OFF)
            return aten(*args, **kwargs)
        found = find(key)
        if found is None:
            reason, function = NO_KERNEL, aten
        else:
            reason = _unusual(args, kwargs, device_type) or found.supports(*args, **kwargs)
            function = aten if reason else _served(found.run)
        count(reason)
        if watching.timings:
            return counter.timed(reason, function, args, kwargs)
        return function(*args, **kwargs)

    return kernel


def _served(run: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # An interpreted launch calls ATen, and would come back here without end.
        gate.RUNNING.inside = True
        try:
            return run(*args, **kwargs)
        finally:
            gate.RUNNING.inside = False

    return guarded


def _unusual(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> str:
    """Why no operator of plait takes these operands, or ""."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            reason = _unusual_tensor(each, device_type)
        elif isinstance(each, (list, tuple)):
            reason = _unusual(tuple(each), {}, device_type) if each else ""
        else:
            continue
        if reason:
            return reason
    return ""


def _unusual_tensor(tensor: torch.Tensor, device_type: str) -> str:
    if type(tensor) not in _PLAIN:
        return SUBCLASS
    if tensor.layout is not torch.strided:
        return LAYOUT
    if tensor.device.type != device_type:
        return OTHER_DEVICE
    if tensor.is_conj() or tensor.is_neg():
        return LAZY_VIEW
    return ""


__all__ = ["INSIDE", "NO_KERNEL", "OFF", "override"]
