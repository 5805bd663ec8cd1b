"""Putting overrides into ATen's slots, and turning keys on and off.

A key is registered when it is first enabled and stays registered: taking one out while other
threads compute crashes PyTorch. `disable` and `use` flip a gate in front of it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from functools import lru_cache

import torch

from plait.errors import ArgumentError, DeviceError, UnsupportedError
from plait.ops.aten import gate, spec, wins, wrapped
from plait.ops.aten.dispatch import override
from plait.ops.aten.originals import Original, why_not
from plait.ops.aten.targets import checked, select

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


class _Slots:
    """What is registered in this process. `generation` counts uninstalls."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.library: torch.library.Library | None = None
        self.originals: dict[tuple[str, str], Original] = {}
        self.generation = 0


_slots = _Slots()


def enable(
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    *,
    device: torch.device | str | None = None,
) -> None:
    """Let plait's kernels serve calls of ATen, in all threads, from now on.

    Without names: the calls that plait's kernels have been measured to be faster at on this GPU,
    by the table that ships or by that of `plait tune ops`; nothing on a GPU without a table. That
    asks CUDA for the GPU's name, so fork workers before. With names: every call that plait
    supports.

    Everything else, also a call with operands of another device, is ATen's as before, to the bit;
    `plait.explain` says which way a call goes and why, and `plait.report` counts. Enable before
    other threads compute: PyTorch's table of kernels is written without a lock.

    Args:
        include: keys (`add.Tensor`), base names (`add`: all overloads of `add` and `add_`), groups
            (`reduction`) or patterns (`*_backward`); by default what is faster on this GPU.
        exclude: names of the same forms, to be taken out again.
        device: whose calls; by default the GPU's, where this PyTorch is built for one.

    Raises:
        ArgumentError: a name means no operator; near matches are named.
        UnsupportedError: plait has a kernel for nothing of `include`.
    """
    on, off = _choose(include, exclude, device)
    gate.turn(on, off)


def disable(include: str | Iterable[str] = "*", exclude: str | Iterable[str] = ()) -> None:
    """Hand calls back to ATen in all threads; a thread's open `use()` block keeps its choice.

    Args:
        include: which, by default all; names as in `enable`.
        exclude: what stays on of these.

    Raises:
        ArgumentError: a name means no operator.
    """
    off = select("include", include) - select("exclude", exclude)
    gate.turn(frozenset(), off | gate.if_faster(off))


def use(
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    *,
    device: torch.device | str | None = None,
) -> gate.Block:
    """A block in which more of ATen, or less, is plait's: `with plait.use("reduction"): ...`.

    It adds to what is on around it and takes `exclude` away; `use((), "*")` turns all off. It holds
    for the calling thread and for the backward passes that it starts, not for other threads.
    Entering and leaving take about 2 us; the first block with some names registers them.

    Arguments and errors are those of `enable`.
    """
    return gate.Block(*_choose(include, exclude, device))


def uninstall() -> None:
    """Take every override out of PyTorch; for tests and programs with a single thread.

    While any other thread computes, PyTorch crashes: `disable()` is for those.

    Raises:
        ArgumentError: a `use()` block is open.
    """
    with _slots.lock:
        if gate.STATE.open_blocks:
            raise ArgumentError(
                "plait.uninstall",
                "a call outside of all use() blocks",
                f"{gate.STATE.open_blocks} open",
                "Leave them first, or call plait.disable() instead.",
            )
        gate.STATE.everywhere = frozenset()
        if _slots.library is not None:
            _slots.library._destroy()
        _slots.library = None
        _slots.originals.clear()
        spec.caches.clear()  # of slots that are gone; plans keep compiled kernels alive
        _slots.generation += 1


def install(keys: Iterable[str], dispatch_key: str) -> dict[str, str]:
    """Register overrides of `keys`; they pass calls through until they are on and served.

    Returns the keys that this torch does not let be overridden there, with the reason.
    """
    refused = {}
    with _slots.lock:
        wrapped.prepare()
        if _slots.library is None:
            _slots.library = torch.library.Library("aten", "IMPL")
        for key in keys:
            if (key, dispatch_key) in _slots.originals:
                continue
            if reason := why_not(key, dispatch_key):
                refused[key] = reason
                continue
            original = Original(key, dispatch_key)
            _register(_slots.library, original)
            _slots.originals[key, dispatch_key] = original
    return refused


def registered(dispatch_key: str) -> frozenset[str]:
    """The keys that plait has overridden at `dispatch_key`."""
    return frozenset(key for key, where in list(_slots.originals) if where == dispatch_key)


def dispatch_key_of(device: torch.device | str | None) -> str:
    """The slot that serves `device`; DeviceError if plait has no kernels for its type."""
    if device is None:
        return "CUDA" if torch.backends.cuda.is_built() else "CPU"
    kind = torch.device(device).type
    if kind not in _DISPATCH_KEYS:
        raise DeviceError("device", f"one of {', '.join(_DISPATCH_KEYS)}", repr(str(device)))
    return _DISPATCH_KEYS[kind]


def _register(library: torch.library.Library, original: Original) -> None:
    device_type = original.dispatch_key.lower()
    with warnings.catch_warnings():
        # PyTorch warns once a process that a kernel is overridden; that is the purpose here.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        # PyTorch has overrides of its own in some slots (torch._native): plait's chains to them.
        function = override(original, device_type)
        library.impl(original.key, function, original.dispatch_key, allow_override=True)


def _choose(
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str],
    device: torch.device | str | None,
) -> tuple[frozenset[str], frozenset[str]]:
    if not (include is None or isinstance(include, str)):
        include = checked("include", include)
    if not isinstance(exclude, str):
        exclude = checked("exclude", exclude)
    tables = "" if include is not None else wins.tables_in_use()
    return _chosen(include, exclude, device, spec.version(), _slots.generation, tables)


@lru_cache(maxsize=256)
def _chosen(
    include: str | tuple[str, ...] | None,
    exclude: str | tuple[str, ...],
    device: torch.device | str | None,
    version: int,  # of the specs; with `generation` it makes an old answer a miss
    generation: int,
    tables: str,
) -> tuple[frozenset[str], frozenset[str]]:
    """What to turn on, registered, and what to turn off, as the gate has it."""
    del version, generation, tables
    dispatch_key = dispatch_key_of(device)
    off = select("exclude", exclude)
    if include is None:
        on = wins.default_keys(dispatch_key)
    else:
        named = select("include", include)
        on = named & spec.served()
        if named and not on:
            raise UnsupportedError(
                "include",
                "a name of something that plait has a kernel for",
                repr(include),
                f"There are {len(spec.served())} such keys in this version.",
            )
    on -= off
    on = on.difference(install(on, dispatch_key))
    return gate.if_faster(on) if include is None else on, off | gate.if_faster(off)


__all__ = [
    "disable",
    "dispatch_key_of",
    "enable",
    "install",
    "registered",
    "uninstall",
    "use",
]
