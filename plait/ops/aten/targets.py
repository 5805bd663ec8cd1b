"""Which ATen overloads plait may override, and what the names of `enable` and `use` mean.

A key is a dispatcher name without its namespace: `add.Tensor`, `mm`. A name is a key, a base name
(`add`: all overloads of `add` and `add_`), a group (`reduction`) or a pattern (`*_backward`).
Where a base name is also the key of its default overload (`mm`), `mm.default` names that one key.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from plait.errors import ArgumentError

_FORMS = "a key, base name, group or pattern of ATen operators"


class Target(NamedTuple):
    """One overload. `kind` is kernel or explicit, as targets.txt says."""

    key: str
    kind: str
    group: str


@cache
def targets() -> Mapping[str, Target]:
    """Every target by its key, in the order of targets.txt."""
    found, group = {}, ""
    for line in files("plait.ops.aten").joinpath("targets.txt").read_text().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, mark = line.partition(" ")
            found[key] = Target(key, "explicit" if mark == "e" else "kernel", group)
    return found


def checked(argument: str, names: str | Iterable[str]) -> tuple[str, ...]:
    """`names` as a tuple of strings; ArgumentError, which calls them `argument`, if they are none.

    What the names mean is not looked at: `select` does.
    """
    if isinstance(names, str):
        return (names,)
    found = tuple(names) if isinstance(names, Iterable) else (names,)
    for name in found:
        if not isinstance(name, str):
            raise ArgumentError(argument, _FORMS, repr(name), "Names are strings.")
    return found


def select(argument: str, names: str | Iterable[str]) -> frozenset[str]:
    """The keys that `names` mean together; `argument` is what an error calls them.

    Raises `ArgumentError`, with near matches, for a name that means no target.
    """
    found: frozenset[str] = frozenset()
    for name in checked(argument, names):
        found |= _meaning(argument, name)
    return found


@cache
def _meaning(argument: str, name: str) -> frozenset[str]:
    known = targets()
    plain = name.removeprefix("aten::").removeprefix("aten.")
    if plain.endswith(".default") and plain[: -len(".default")] in known:
        return frozenset((plain[: -len(".default")],))
    if "." in plain and plain in known:
        return frozenset((plain,))
    if any(mark in plain for mark in "*?["):
        found = fnmatch.filter(known, plain)
    else:
        bases = {plain, f"{plain}_"}
        found = [key for key, target in known.items() if key.partition(".")[0] in bases]
        found = found or [key for key, target in known.items() if target.group == plain]
    if not found:
        raise ArgumentError(argument, _FORMS, repr(name), _remedy(plain))
    return frozenset(found)


def _remedy(name: str) -> str:
    if composite(name):
        return f"PyTorch composes {name} of other operators: plait.explain shows which, name those."
    known = targets()
    names = {*known, *(key.partition(".")[0] for key in known), *(t.group for t in known.values())}
    near = difflib.get_close_matches(name, sorted(names), n=3)
    return f"Did you mean {', '.join(near)}?" if near else "`plait.explain(fn)` shows its keys."


def composite(name: str) -> bool:
    """Whether PyTorch composes the operator `name` of others above autograd."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    overloads = torch._C._dispatch_get_all_op_names()
    found = [each for each in overloads if each.split(".")[0] == f"aten::{name.split('.')[0]}"]
    return any(has(each, "CompositeImplicitAutograd") for each in found)


def key_of(op: torch._ops.OpOverload) -> str:
    """The key of an ATen overload: `add.Tensor`, or `mm` for a default overload."""
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


__all__ = ["Target", "checked", "composite", "key_of", "select", "targets"]
