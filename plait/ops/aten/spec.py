"""An operator of plait as data: which overloads it serves, when, how, and what they mean.

One `OpSpec` is all that an operator needs to be reached through ATen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.errors import ArgumentError
from plait.ops.aten.targets import targets


@dataclass(frozen=True)
class OpSpec:
    """An operator for overloads that share a signature.

    All three functions get what the dispatcher hands over: trailing defaults are left out, and a
    number may stand in a tensor's place. `supports` returns why `run` cannot serve a call, one of
    a few constant texts, or "" if it can. It is a pure function of shapes, strides, dtypes and
    settings, never of values or time, so that all ranks choose alike. `run` must not fail on what
    `supports` accepts. `reference` is the meaning in torch alone.
    """

    name: str
    keys: tuple[str, ...]
    run: Callable[..., Any]
    supports: Callable[..., str] = lambda *args, **kwargs: ""
    reference: Callable[..., Any] | None = None
    wins_on: tuple[str, ...] = ()  # dispatch keys where `enable()` without names turns it on


_specs: dict[str, OpSpec] = {}
_changes: list[int] = [0]


def add(spec: OpSpec) -> None:
    """Let `spec` serve its keys; ArgumentError if one is no target or already served."""
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
    _changes[0] += 1


def remove(spec: OpSpec) -> None:
    """Let ATen serve the keys of `spec` again; registered overrides of them pass through."""
    for key in spec.keys:
        if _specs.get(key) is spec:
            del _specs[key]
    _changes[0] += 1


def served() -> frozenset[str]:
    """The keys that plait has an operator for."""
    return frozenset(_specs)


def version() -> int:
    """A number that changes when an operator is added or removed."""
    return _changes[0]


def default_keys(dispatch_key: str) -> frozenset[str]:
    """The keys that win on `dispatch_key`, so that they are on without being named."""
    return frozenset(key for key, spec in _specs.items() if dispatch_key in spec.wins_on)


find = _specs.get  # the spec of a key or None: a plain dict's method, every served call asks it

__all__ = ["OpSpec", "add", "default_keys", "find", "remove", "served", "version"]
