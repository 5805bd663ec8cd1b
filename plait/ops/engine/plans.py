"""Launch plans: what a call of a known signature does, as one generated function.

`build` turns the recorded launches of a call into a function of the overload's arguments: allocate,
launch through Triton's C launcher with addresses as integers, return. Its text depends on the
structure alone and is compiled once; sizes and kernels are constants it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from plait.ops.engine.call import Call, Number, Pointer, Step
from plait.ops.engine.signature import Schema
from plait.runtime.launcher import BoundLaunch, launches_are_watched

MAX_PLANS = 4096  # of one overload


def remember(known: dict[Any, Any], signature: Any, plan: Callable[..., Any]) -> None:
    """Keep a plan among those of one overload, of which there is a limited number."""
    if len(known) >= MAX_PLANS:
        known.clear()
    known[signature] = plan


class _Names:
    """What stands for a tensor of the recorded call in the generated text."""

    def __init__(self, schema: Schema, named: dict[str, Any], call: Call) -> None:
        self._names: dict[int, str] = {}
        self._variables = {each.name: each.variable for each in schema.arguments}
        for each in schema.arguments:
            value = named[each.name]
            if each.kind == "tensor" and value is not None:
                self._names.setdefault(id(value), each.variable)
            elif each.kind == "tensors":
                for index, one in enumerate(value or ()):
                    self._names.setdefault(id(one), f"{each.variable}[{index}]")
        for kind, tensors in (("_r", call.results), ("_t", call.scratch)):
            for index, one in enumerate(tensors):
                if one is not None:
                    self._names.setdefault(id(one), f"{kind}{index}")

    def number(self, number: Number) -> str:
        """The variable of a runtime number."""
        return self._variables[number.name]

    def of(self, tensor: torch.Tensor) -> str:
        """Its variable."""
        name = self._names.get(id(tensor))
        assert name is not None, "a launch takes arguments, results and scratch, and no views"
        return name


def build(
    schema: Schema,
    named: dict[str, Any],
    call: Call,
    ordinary: Callable[..., Any],
    cell: list[float],
) -> Callable[..., Any] | None:
    """The plan of a recorded call, or None where Triton's launcher is not known.

    `named` are the arguments that the call was recorded with, the very objects.

    It takes all arguments of the overload positionally, adds 1 to `cell[0]` and returns what the
    overload returns. While somebody watches Triton's launches, `ordinary` runs instead.
    """
    names = _Names(schema, named, call)
    constants: dict[str, Any] = {
        "_empty": _empty_strided(),
        "_raw_stream": torch._C._cuda_getCurrentRawStream,
        "_current_device": torch._C._cuda_getDevice,
        "_on_device": torch.cuda.device,
        "_watched": launches_are_watched,
        "_ordinary": ordinary,
        "_cell": cell,
        "_index": call.device.index,
    }
    lines = []
    for kind, tensors in (("_r", call.results), ("_t", call.scratch)):
        for number, one in enumerate(tensors):
            variable = f"{kind}{number}"
            if one is None or names.of(one) != variable:
                continue  # what the caller has given
            constants[f"_A{variable}"] = (tuple(one.shape), one.stride(), one.dtype)
            lines.append(f"{variable} = _empty(*_A{variable})")
    with torch.cuda.device(call.device):
        launches = call.bound()
    for number, (step, bound) in enumerate(zip(call.steps, launches, strict=True)):
        line = _launch(number, step, bound, names, constants)
        if line is None:
            return None
        lines.append(line)
    results = [_returned(one, names) for one in call.results]
    lines.append("_cell[0] += 1")
    lines.append(f"return {results[0] if schema.num_returns == 1 else ', '.join(results)}")
    several = torch.cuda.device_count() > 1
    return _function(schema.variables, tuple(lines), bool(call.steps), several)(constants)


def fallback(schema: Schema, aten: Callable[..., Any], cell: list[float]) -> Callable[..., Any]:
    """The plan of a call that ATen serves; it takes what other plans take, and counts alike."""
    space: dict[str, Any] = {"_aten": aten, "_cell": cell}
    exec(_fallback_code(schema.variables, schema.as_call), space)
    return space["_plan"]


@lru_cache(maxsize=1024)
def _fallback_code(variables: str, as_call: str) -> Any:
    text = f"def _plan({variables}):\n    _cell[0] += 1\n    return _aten({as_call})"
    return compile(text, "<fallback plan>", "exec")


def _returned(result: torch.Tensor | None, names: _Names) -> str:
    return "None" if result is None else names.of(result)


def _launch(
    number: int, step: Step, bound: BoundLaunch, names: _Names, constants: dict[str, Any]
) -> str | None:
    """The line of one launch; what stays the same goes into constants."""
    if bound.raw is None:
        return None
    parameters = step.launch.kernel.arg_names
    flat: list[Any] = list(bound.arguments)
    first = len(flat) - len(parameters)
    changing = {BoundLaunch.STREAM: "_stream"}
    for place, name in enumerate(parameters, first):
        value = step.args.get(name)
        if isinstance(value, Number):
            assert isinstance(value.value, float) or _never_specialized(step, name), (
                f"{name} of {step.launch.kernel} may differ from call to call"
            )
            changing[place] = names.number(value)
        elif isinstance(value, Pointer):
            offset = value.offset * (value.dtype or value.tensor.dtype).itemsize
            constants[f"_O{number}_{place}"] = offset
            changing[place] = f"{names.of(value.tensor)}.data_ptr() + _O{number}_{place}"
        elif isinstance(value, torch.Tensor):
            changing[place] = f"{names.of(value)}.data_ptr()"
    constants[f"_launch{number}"] = bound.native
    constants[f"_kept{number}"] = bound.compiled

    def listed(begin: int, end: int) -> str:
        """These arguments: constants in runs, and what changes by its expression."""
        parts = []
        for place in (*sorted(each for each in changing if begin <= each < end), end):
            if place > begin:
                constants[f"_C{number}_{begin}"] = tuple(flat[begin:place])
                parts.append(f"*_C{number}_{begin}")
            if place < end:
                parts.append(changing[place])
            begin = place + 1
        return "".join(f"{each}, " for each in parts)

    if bound.split is None:
        return f"_launch{number}({listed(0, len(flat))})"
    return f"_launch{number}({listed(0, bound.split)}({listed(bound.split, len(flat))}))"


def _never_specialized(step: Step, name: str) -> bool:
    """Whether Triton compiles the same kernel for all integers in this place."""
    return any(each.name == name and each.do_not_specialize for each in step.launch.kernel.params)


@lru_cache(maxsize=1024)
def _function(
    variables: str, lines: tuple[str, ...], launches: bool, several: bool
) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    """From constants to the function of these lines."""
    text = [f"def _plan({variables}):"]
    if launches:
        text += ["    if _watched():", f"        return _ordinary({variables})"]
    if several:  # Triton launches on the current device, and memory comes from there
        text += [
            "    if _current_device() != _index:",
            "        with _on_device(_index):",
            f"            return _plan({variables})",
        ]
    if launches:
        text.append("    _stream = _raw_stream(_index)")
    text += [f"    {line}" for line in lines]
    code = compile("\n".join(text), "<launch plan>", "exec")

    def make(constants: dict[str, Any]) -> Callable[..., Any]:
        space = dict(constants)
        exec(code, space)
        return space["_plan"]

    return make


def _empty_strided() -> Callable[..., Any]:
    from torch._C._dynamo import guards

    found = getattr(guards, "_empty_strided_cuda", None)
    if found is not None:
        return found

    def empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=torch.device("cuda"))

    return empty


__all__ = ["MAX_PLANS", "build", "fallback", "remember"]
