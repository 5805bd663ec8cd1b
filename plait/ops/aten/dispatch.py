"""The Python kernel in an ATen slot: gate, then plait's kernel or the original.

It stands below autograd, autocast, functorch, modes and tensor subclasses, so it sees plain tensors
of its own device, or numbers. Whatever plait does not take goes to the original as it came, before
anything is written; errors are ATen's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from plait.ops.aten import gate, report, spec
from plait.ops.aten.originals import Original
from plait.ops.engine import plans
from plait.ops.engine.call import Call, Declined, Number
from plait.ops.engine.signature import Schema, apart, signature_of_list

# Every reason that is no operator's own. The counts have one entry a reason.
OFF = "off in this thread"
INSIDE = "called by a kernel of plait"
NO_KERNEL = "plait has no kernel for it"
SUBCLASS = "a tensor subclass"
LAYOUT = "a tensor that is not strided"
OTHER_DEVICE = "a tensor on another device"
LAZY_VIEW = "a conjugated or negated view"
NUMBER = "a number in a tensor's place"

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def override(original: Original, device_type: str) -> Callable[..., Any]:
    """The function to register in the slot of `original`; calls on `device_type` reach it."""
    key, dispatch_key = original.key, original.dispatch_key
    state, running, watching = gate.STATE, gate.RUNNING, report.WATCHING
    selected, tell = gate.selected, report.tell
    aten = original.call
    server = Server(original, device_type)
    serve = server.serve

    def kernel(*args: Any, **kwargs: Any) -> Any:
        on = key in (selected() if state.open_blocks else state.everywhere)
        if not on or running.inside:
            if watching.listeners:
                tell(key, dispatch_key, INSIDE if on else OFF)
            return aten(*args, **kwargs)
        return serve(args, kwargs)

    return planned_entry(server, kernel) if dispatch_key == "CUDA" else kernel


class Server:
    """Serves the calls of one slot that are on: plait's operator, or the original."""

    def __init__(self, original: Original, device_type: str) -> None:
        self.original = original
        self.schema = Schema(original.overload)
        self.counter = report.Counter(original.key, original.dispatch_key)
        self.plans: dict[Any, Callable[..., Any]] = {}
        spec.caches.append(self.plans)
        self._device_type = device_type

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Any = None) -> Any:
        """One call; with a signature, the way of all calls of that signature is remembered."""
        original = self.original
        found = spec.find(original.key)
        call, function = None, original.call
        if found is None:
            reason = NO_KERNEL
        else:
            reason = _unusual(args, kwargs, self._device_type)
            if not reason and found.compute is not None:
                named = self.schema.bind(args, kwargs)
                call, reason = compute(found, self.schema, named)
            elif not reason:
                reason = found.supports(*args, **kwargs)
            if not reason:
                function = partial(_finish, call, self.schema) if call else _served(found.run)
        self.counter.count(reason)
        if signature is not None and (reason or call is not None):
            self._remember(signature, args, kwargs, call, reason)
        if report.WATCHING.timings:
            return self.counter.timed(reason, function, args, kwargs)
        return function(*args, **kwargs)

    def _remember(
        self, signature: Any, args: Any, kwargs: Any, call: Call | None, reason: str
    ) -> None:
        cell = self.counter.cell(reason)
        if reason:
            plan = plans.fallback(self.schema, self.original.call, cell)
        else:
            assert call is not None
            named = self.schema.bind(args, kwargs)
            plan = plans.build(self.schema, named, call, self.unplanned, cell)
        if plan is not None:
            if len(self.plans) >= plans.MAX_PLANS:
                self.plans.clear()
            self.plans[signature] = plan

    def unplanned(self, *args: Any) -> Any:
        """A call with all arguments in order, without its plan."""
        return self.serve(*self.schema.split(args))


def compute(found: spec.OpSpec, schema: Schema, named: dict[str, Any]) -> tuple[Call | None, str]:
    """The recorded call of an operator, or why it declines."""
    tensors = schema.tensors_of(named)
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        return None, NUMBER
    call = Call(tensors[0].device, schema.given(named))
    arguments = {
        each.name: Number(each.name, named[each.name])
        if each.name in found.runtime_numbers
        else named[each.name]
        for each in schema.inputs
    }
    assert found.compute is not None
    gate.RUNNING.inside = True
    try:
        found.compute(call, **arguments)
    except Declined as declined:
        return None, declined.reason
    finally:
        gate.RUNNING.inside = False
    return call, ""


def _finish(call: Call, schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run a recorded call; its results in the overload's form."""
    gate.RUNNING.inside = True  # an interpreted launch calls ATen, and would come back here
    try:
        call.run()
    finally:
        gate.RUNNING.inside = False
    return call.results[0] if schema.num_returns == 1 else tuple(call.results)


def planned_entry(server: Server, slow: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a GPU's slot: a known signature goes to its plan, all else to `slow`."""
    schema, key = server.schema, server.original.key
    found = spec.find(key)
    runtime = found.runtime_numbers if found else ()
    # Most kernels never see such views: PyTorch resolves them first, but not for all.
    lazy = any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{key}", each)
        for each in ("Conjugate", "Negative")
    )
    text = f"""
def _kernel({schema.parameters}):
    if (_KEY in (_selected() if _state.open_blocks else _state.everywhere) and not _running.inside
            and not _watching.listeners and not _watching.timings):
        try:
            _signature = {schema.signature(runtime, lazy)}
        except (AttributeError, TypeError, RuntimeError):  # a number, or a tensor without memory
            return _slow({schema.as_call})
        _plan = _find_plan(_signature)
        if _plan is not None:
            return _plan({schema.variables})
        return _miss(_signature, {schema.as_call})
    return _slow({schema.as_call})
"""

    def miss(signature: Any, *args: Any, **kwargs: Any) -> Any:
        return server.serve(args, kwargs, signature)

    space: dict[str, Any] = {
        "_KEY": key,
        "_DEFAULTS": [each.default for each in schema.arguments],
        "_selected": gate.selected,
        "_state": gate.STATE,
        "_running": gate.RUNNING,
        "_watching": report.WATCHING,
        "_apart": apart,
        "_signature_of_list": signature_of_list,
        "_default_dtype": torch.get_default_dtype,
        "_find_plan": server.plans.get,
        "_miss": miss,
        "_slow": slow,
    }
    exec(compile(text, f"<plait aten::{key}>", "exec"), space)
    return space["_kernel"]


def _served(run: Any) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
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


__all__ = ["INSIDE", "NO_KERNEL", "OFF", "Server", "compute", "override"]
