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

from plait.ops.aten import compiling, gate, report, spec, wins
from plait.ops.aten.classes import classify
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

_PASSING = compiling.PASSING | {wins.ASKED}  # what is not remembered

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def override(original: Original, device_type: str) -> Callable[..., Any]:
    """The function to register in the slot of `original`; calls on `device_type` reach it."""
    key, dispatch_key = original.key, original.dispatch_key
    state, running, watching = gate.STATE, gate.RUNNING, report.WATCHING
    selected, tell = gate.selected, report.tell
    if_faster = gate.IF_FASTER + key
    aten = original.call
    server = Server(original, device_type)
    serve = server.serve

    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = selected() if state.open_blocks else state.everywhere
        forced = key in chosen
        on = forced or if_faster in chosen
        if not on or running.inside:
            if watching.listeners:
                tell(key, dispatch_key, INSIDE if on else OFF)
            return aten(*args, **kwargs)
        return serve(args, kwargs, if_faster=not forced)

    return planned_entry(server, kernel) if dispatch_key == "CUDA" else kernel


class Server:
    """Serves the calls of one slot that are on: plait's operator, or the original."""

    def __init__(self, original: Original, device_type: str) -> None:
        self.original = original
        self.schema = Schema(original.overload)
        self.counter = report.Counter(original.key, original.dispatch_key)
        self.plans: dict[Any, Callable[..., Any]] = {}
        self.plans_if_faster: dict[Any, Callable[..., Any]] = {}
        spec.caches += (self.plans, self.plans_if_faster)
        self._device_type = device_type

    def serve(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Any = None,
        *,
        if_faster: bool = False,
    ) -> Any:
        """One call; with a signature, the way of all calls of that signature is remembered.

        With `if_faster` plait serves only what its kernels are known to be faster at.
        """
        original = self.original
        found, version = spec.find(original.key), spec.version()
        call, function = None, original.call
        named: dict[str, Any] = {}
        if found is None:
            reason = NO_KERNEL
        else:
            reason = _unusual(args, kwargs, self._device_type)
            if not reason and found.compute is not None:
                named = self.schema.bind(args, kwargs)
                reason = self._slower(found, named) if if_faster else ""
                if not reason:
                    call, reason = compute(found, self.schema, named)
                if call is not None and (reason := compiling.postponed(call)):
                    call = None
            elif not reason:
                named = self.schema.bind(args, kwargs)
                reason = self._slower(found, named) if if_faster else ""
                reason = reason or found.supports(*args, **kwargs)
            if not reason:
                function = partial(_finish, call, self.schema) if call else _served(found.run)
        self.counter.count(reason)
        lasts = reason not in _PASSING and (reason or call is not None)
        if signature is not None and lasts:
            known = self.plans_if_faster if if_faster else self.plans
            plan = self._plan(named, call, reason)
            if plan is not None and version == spec.version():
                plans.remember(known, signature, plan)
        if report.WATCHING.timings:
            return self.counter.timed(reason, function, args, kwargs)
        return function(*args, **kwargs)

    def _slower(self, found: spec.OpSpec, named: dict[str, Any]) -> str:
        """Why default mode leaves the call to ATen, or ""."""
        given = self.schema.tensors_of(named)
        device = next((x.device for x in given if isinstance(x, torch.Tensor)), None)
        if device is None:
            return NUMBER
        key, call = self.original.key, classify(self.schema, named)
        return wins.why_not(found, key, call, named, device)

    def _plan(
        self, named: dict[str, Any], call: Call | None, reason: str
    ) -> Callable[..., Any] | None:
        """How later calls like this one go."""
        cell = self.counter.cell(reason)
        if call is None:
            return plans.fallback(self.schema, self.original.call, cell)
        return plans.build(self.schema, named, call, self.unplanned, cell)

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
    signature = schema.signature(runtime, lazy)
    branches = "".join(
        f"""
        if {name} in _chosen:
            try:
                _signature = {signature}
            except (AttributeError, TypeError, RuntimeError):  # a number, or no memory
                return _slow({schema.as_call})
            _plan = _find_plan{mode}(_signature)
            if _plan is not None:
                return _plan({schema.variables})
            return _miss{mode}(_signature, {schema.as_call})"""
        for name, mode in (("_KEY", ""), ("_KEY_IF_FASTER", "_if_faster"))
    )
    text = f"""
def _kernel({schema.parameters}):
    _chosen = _selected() if _state.open_blocks else _state.everywhere
    if not (_running.inside or _watching.listeners or _watching.timings):{branches}
    return _slow({schema.as_call})
"""

    def miss(signature: Any, *args: Any, **kwargs: Any) -> Any:
        return server.serve(args, kwargs, signature)

    def miss_if_faster(signature: Any, *args: Any, **kwargs: Any) -> Any:
        return server.serve(args, kwargs, signature, if_faster=True)

    space: dict[str, Any] = {
        "_KEY": key,
        "_KEY_IF_FASTER": gate.IF_FASTER + key,
        "_DEFAULTS": [each.default for each in schema.arguments],
        "_selected": gate.selected,
        "_state": gate.STATE,
        "_running": gate.RUNNING,
        "_watching": report.WATCHING,
        "_apart": apart,
        "_signature_of_list": signature_of_list,
        "_default_dtype": torch.get_default_dtype,
        "_find_plan": server.plans.get,
        "_find_plan_if_faster": server.plans_if_faster.get,
        "_miss": miss,
        "_miss_if_faster": miss_if_faster,
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
