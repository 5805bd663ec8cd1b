"""An operator of plait as data: which overloads it serves, when, how, and what they mean.

One `OpSpec` is all that an operator needs to be reached through ATen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from plait.errors import ArgumentError
from plait.ops.aten.targets import targets


@dataclass(frozen=True)
class OpSpec:
    """An operator for overloads that share a signature.

    An operator with kernels has `compute(call, **arguments)` (plait/ops/engine/call.py): all
    arguments of the overload by name but for `out`, one text for functional, in-place and out
    overloads. It declines what it cannot serve by `call.decline(reason)`, one of a few constant
    texts, and is a pure function of shapes, strides, dtypes, numbers and settings, never of values
    or time, so that all ranks choose alike. `runtime_numbers` are arguments that it gets as
    `Number`s, because they differ from call to call.

    One without kernels of its own has `run`, which gets what the dispatcher hands over: trailing
    defaults are left out, and a number may stand in a tensor's place. `supports` returns why `run`
    cannot serve a call or "" if it can; `run` must not fail on what `supports` accepts.

    `reference` is the meaning in torch alone.
    """

    name: str
    keys: tuple[str, ...]
    run: Callable[..., Any] | None = None
    supports: Callable[..., str] = lambda *args, **kwargs: ""
    compute: Callable[..., None] | None = None
    runtime_numbers: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None


_loading = threading.RLock()
_specs: dict[str, OpSpec] = {}
_changes: list[int] = [0]
caches: list[dict[Any, Any]] = []  # what was decided on the strength of specs


def add(spec: OpSpec) -> None:
    """Let `spec` serve its keys; ArgumentError if one is no target or already served."""
    assert (spec.run is None) != (spec.compute is None), "an operator has `run` or `compute`"
    for key in spec.keys:
        if key not in targets():
            raise ArgumentError(f"keys of {spec.name}", "keys that are targets", repr(key))
        if key in _specs:
            raise ArgumentError(
                f"keys of {spec.name}",
                "keys that no other operator serves",
                repr(key),
                f"{_specs[key].name} serves it.",
            )
    _specs.update(dict.fromkeys(spec.keys, spec))
    decide_anew()


def remove(spec: OpSpec) -> None:
    """Let ATen serve the keys of `spec` again; registered overrides of them pass through."""
    for key in spec.keys:
        if _specs.get(key) is spec:
            del _specs[key]
    decide_anew()


def decide_anew() -> None:
    """Forget plans and decisions: operators, or what they look at beside arguments, changed."""
    _changes[0] += 1
    for each in caches:
        each.clear()


def load_catalog() -> None:
    """Let every operator that ships serve its keys; once, at the first look-up of a name."""
    with _loading:  # a cache alone would let two threads load, and the second finds keys taken
        _load_catalog()


@cache
def _load_catalog() -> None:
    from plait.ops.catalog import specs

    for each in specs():
        add(each)


@contextmanager
def only(*specs: OpSpec) -> Iterator[None]:
    """A block in which these operators alone serve their keys; for tests."""
    load_catalog()
    before = dict(_specs)
    _specs.clear()
    try:
        for each in specs:
            add(each)
        decide_anew()
        yield
    finally:
        _specs.clear()
        _specs.update(before)
        decide_anew()


def served() -> frozenset[str]:
    """The keys that plait has an operator for."""
    load_catalog()
    return frozenset(_specs)


def version() -> int:
    """A number that changes when an operator is added or removed."""
    return _changes[0]


find = _specs.get  # the spec of a key or None: a plain dict's method, every served call asks it

__all__ = [
    "OpSpec",
    "add",
    "caches",
    "decide_anew",
    "find",
    "load_catalog",
    "only",
    "remove",
    "served",
    "version",
]
