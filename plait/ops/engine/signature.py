"""The arguments of an ATen overload: which are tensors, which are written, and their signature.

A signature holds all that a launch plan depends on. Of a tensor: class, shape, stride, dtype,
device index and the address modulo 16; of everything else the value; of a runtime number its class;
of what is written whether it lies apart from all operands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.ops.engine.call import Given


@dataclass(frozen=True)
class Argument:
    """One argument: `kind` is tensor, tensors, numbers (a list), float or value."""

    name: str
    kind: str
    kwarg_only: bool
    default: Any
    has_default: bool
    written: bool

    @property
    def variable(self) -> str:
        """Its name in generated code. `from` is an argument of ATen, too, but never by keyword."""
        return self.name if self.kwarg_only else f"a_{self.name}"


class Schema:
    """The arguments of one overload, in order, and what it returns."""

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.arguments = tuple(_argument(each) for each in schema.arguments)
        self.num_returns = len(schema.returns)
        self.outs = tuple(each for each in self.arguments if each.written and each.kwarg_only)
        written = [each for each in self.arguments if each.written and not each.kwarg_only]
        self.inplace = written[0] if len(written) == 1 and schema.name.endswith("_") else None
        self.inputs = tuple(each for each in self.arguments if each not in self.outs)

    def tensors_of(self, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        found = []
        for each in self.arguments:
            value: Any = named[each.name]
            if value is None:
                continue
            if each.kind == "tensor":
                found.append(value)
            elif each.kind == "tensors":
                found.extend(one for one in value if one is not None)
        return found

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, left out ones with their defaults.

        Every tensor is an object of its own, also where one was given twice: which argument a
        kernel reads is then told by the object, and a plan of `dot(x, x)` serves `dot(x, y)`.
        """
        named = {each.name: each.default for each in self.arguments}
        named.update(zip((each.name for each in self.arguments), args, strict=False))
        named.update(kwargs)
        seen: set[int] = set()
        for each in self.arguments:
            if each.kind == "tensor":
                named[each.name] = _own(named[each.name], seen)
            elif each.kind == "tensors" and named[each.name] is not None:
                named[each.name] = [_own(one, seen) for one in named[each.name]]
        return named

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments in order, as positional and keyword arguments."""
        pairs = list(zip(self.arguments, values, strict=True))
        args = tuple(value for each, value in pairs if not each.kwarg_only)
        return args, {each.name: value for each, value in pairs if each.kwarg_only}

    def given(self, named: Mapping[str, Any]) -> Given:
        """What the overload writes into."""
        outs = tuple(named[each.name] for each in self._results)
        if not outs:
            return Given()
        operands = self.tensors_of({**named, **{each.name: None for each in self._results}})
        return Given(outs, inplace=self.inplace is not None, apart=apart(outs, operands))

    @property
    def _results(self) -> tuple[Argument, ...]:
        """The arguments that results are written into."""
        return self.outs if self.inplace is None else (self.inplace,)

    # --- pieces of generated code
    @property
    def parameters(self) -> str:
        """The parameter list of a function that the dispatcher calls."""
        parts, starred = [], False
        for index, each in enumerate(self.arguments):
            if each.kwarg_only and not starred:
                parts.append("*")
                starred = True
            name = each.variable
            parts.append(f"{name}=_DEFAULTS[{index}]" if each.has_default else name)
        return ", ".join(parts)

    @property
    def variables(self) -> str:
        """All arguments, positionally."""
        return ", ".join(each.variable for each in self.arguments)

    @property
    def as_call(self) -> str:
        """All arguments as the original takes them."""
        return ", ".join(
            f"{each.name}={each.name}" if each.kwarg_only else each.variable
            for each in self.arguments
        )

    def signature(self, runtime: Collection[str], lazy: bool) -> str:
        """The expression of a call's signature; `lazy`: conjugated and negated views may come."""
        parts = [_signature_of(each, each.name in runtime, lazy) for each in self.arguments]
        results = self._results
        operands = [
            f"*{each.variable}" if each.kind == "tensors" else each.variable
            for each in self.arguments
            if each.kind in ("tensor", "tensors") and each not in results
        ]
        if len(results) > 1 or (results and operands):
            outs = ", ".join(each.variable for each in results)
            parts.append(f"_apart([{outs}], [{', '.join(operands)}])")
        return f"({', '.join(parts)}, _default_dtype())"


# Types of ATen's schemas whose values may be -0.0, which equals 0.0.
_FLOATS = ("float", "number", "Optional[float]", "Optional[number]")


def _own(tensor: Any, seen: set[int]) -> Any:
    """The tensor, or an alias of it if it was seen before."""
    if isinstance(tensor, torch.Tensor):
        if id(tensor) in seen:
            return torch.ops.aten.alias(tensor)
        seen.add(id(tensor))
    return tensor


def _argument(each: Any) -> Argument:
    kind = str(each.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        name = "tensor"
    elif "Tensor" in kind:
        name = "tensors"
    elif "List" in kind:
        name = "numbers"
    else:
        name = "float" if kind in _FLOATS else "value"
    written = each.alias_info is not None and each.alias_info.is_write
    has_default = each.has_default_value()
    default = each.default_value if has_default else None
    return Argument(each.name, name, each.kwarg_only, default, has_default, written)


def _signature_of(argument: Argument, runtime: bool, lazy: bool) -> str:
    name = argument.variable
    if runtime:
        return f"{name}.__class__"
    if argument.kind == "tensor":
        whole = (
            f"{name}.__class__, {name}.shape, {name}.stride(), {name}.dtype, "
            f"{name}.get_device(), {name}.data_ptr() & 15"
        )
        if lazy:
            whole += f", {name}.is_conj(), {name}.is_neg()"
        return f"None if {name} is None else ({whole})"
    if argument.kind == "tensors":
        return f"_signature_of_list({name})"
    if argument.kind == "numbers":
        return f"None if {name} is None else tuple({name})"
    if argument.kind == "float":
        return f"{name}.__class__, {name} or str({name})"
    return f"{name}.__class__, {name}"


def signature_of_list(tensors: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """The signature of a list of tensors."""
    return tuple(
        None
        if x is None
        else (x.__class__, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15)
        for x in tensors
    )


def apart(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None]) -> bool:
    """Whether no two of the written tensors, and none of them and an operand, share a storage."""
    seen = {x.untyped_storage().data_ptr() for x in inputs if x is not None and x.numel()}
    for out in outs:
        address = out.untyped_storage().data_ptr()
        if out.numel() and address in seen:
            return False
        seen.add(address)
    return True


__all__ = ["Argument", "Schema", "apart", "signature_of_list"]
