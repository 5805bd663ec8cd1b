"""The kernels that were in their slots before plait's, and the exact way back to them.

`op.redispatch` from inside an override would return to the override: only a kernel captured
before registration leads past it. It is called with a constant keyset, that of its own slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.ops.aten.wrapped import NUMBERS, wrapped

_LEFT_ALONE = {
    # `addr_` hands one C++ reference over twice, and ATen looks whether it is one: in that case a
    # result that does not fit is an error. Boxed calls have two handles, so it would be resized.
    "addr.out": "ATen tells whether `out` and `self` are one C++ reference; no override keeps that",
}


class Original:
    """The kernel of `key` at one dispatch key; `call(*args, **kwargs)` runs it.

    Arguments are those that the dispatcher hands to an override, results and errors are the
    kernel's own. `slots` are the positions of tensors, where a number may stand instead.
    """

    __slots__ = ("call", "dispatch_key", "kernel", "key", "overload", "slots", "written")

    def __init__(self, key: str, dispatch_key: str) -> None:
        self.key = key
        self.dispatch_key = dispatch_key
        self.kernel = torch.library.get_kernel(f"aten::{key}", dispatch_key)
        packet, _, name = key.partition(".")
        self.overload = getattr(getattr(torch.ops.aten, packet), name or "default")
        arguments = self.overload._schema.arguments
        positions = [
            index
            for index, each in enumerate(arguments)
            if str(each.type) in ("Tensor", "Optional[Tensor]") and not each.kwarg_only
        ]
        self.slots = tuple(positions)
        # An operand that is written gets a number of its own, not the one kept for all calls.
        self.written = frozenset(
            index
            for index in positions
            if (alias := arguments[index].alias_info) is not None and alias.is_write
        )
        self.call = self._caller()

    def _caller(self) -> Callable[..., Any]:
        call_boxed = self.kernel.call_boxed
        keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, self.dispatch_key))
        slots, last = self.slots, max(self.slots, default=-1)
        with_numbers = self._with_numbers

        if not slots:
            return lambda *args, **kwargs: call_boxed(keyset, *args, **kwargs)

        if slots == tuple(range(last + 1)):  # the usual case, and a slice is faster than indices
            width = last + 1

            def call(*args: Any, **kwargs: Any) -> Any:
                for each in args[:width]:
                    if each.__class__ in NUMBERS:
                        return call_boxed(keyset, *with_numbers(args), **kwargs)
                return call_boxed(keyset, *args, **kwargs)

            return call

        def call_scattered(*args: Any, **kwargs: Any) -> Any:
            for index in slots:
                if index < len(args) and args[index].__class__ in NUMBERS:
                    return call_boxed(keyset, *with_numbers(args), **kwargs)
            return call_boxed(keyset, *args, **kwargs)

        return call_scattered

    def _with_numbers(self, args: tuple[Any, ...]) -> list[Any]:
        replaced = list(args)
        for index in self.slots:
            if index < len(args) and args[index].__class__ in NUMBERS:
                replaced[index] = wrapped(args[index], fresh=index in self.written)
        return replaced


def why_not(key: str, dispatch_key: str) -> str:
    """Why `key` cannot be overridden at `dispatch_key` with this torch; empty if it can."""
    name = f"aten::{key}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if key in _LEFT_ALONE:
        return _LEFT_ALONE[key]
    if not torch._C._dispatch_has_kernel(name):
        return f"torch {torch.__version__} has no such operator"
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, dispatch_key):
        return f"torch has no kernel of it for {dispatch_key}"
    if has(name, "CompositeImplicitAutograd") and not has(name, dispatch_key):
        # Its slot is shared with autograd, torch.compile and torch.func: an override breaks them.
        return "PyTorch composes it of other operators above autograd"
    return ""


__all__ = ["Original", "why_not"]
