"""Runs launches of kernels without peers on the CPU: the operators of ATen, block after block.

The builder is that of virtual ranks, so a kernel means the same in both; here nobody listens, no
other rank runs meanwhile, and the calling thread does the work.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from triton.language.semantic import TritonSemantic

from plait.backends.commands import Launch
from plait.backends.cpu.builder import VirtualBuilder
from plait.backends.cpu.lang_proxy import (
    Binder,
    constexpr_names,
    exchange_tensor_methods,
    install_tensor_methods,
)
from plait.backends.cpu.site import Site

_lock = threading.RLock()
_NOWHERE = Site("?", 0)
_NOTHING = np.empty(0, np.uint64)


class _Builder(VirtualBuilder):
    """Without what only observers of virtual ranks need."""

    def _access(self, ptrs: Any, mask: Any, *, write: bool) -> np.ndarray:
        return _NOTHING

    def site(self) -> Site:
        return _NOWHERE


class _Alone:
    """The device of a block that runs alone."""

    now_ns = 0
    actor = None

    def stored(self, addresses: np.ndarray) -> None:
        """Nobody waits for a store."""

    def spend_ns(self, cost_ns: float) -> None:
        """There is no clock."""

    def cta_barrier(self) -> None:
        """One block's operations are in order."""

    def proxy_fence(self) -> None:
        """And so are its copies."""

    def is_signal_word(self, address: int) -> bool:
        """No memory is shared."""
        return False

    def atomic(self, address: int, run: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Nothing comes between."""
        return run()


@cache
def _binder() -> Binder:
    device: Any = _Alone()
    semantic = TritonSemantic(_Builder(device))
    with _lock:
        before = exchange_tensor_methods(None)
        install_tensor_methods(semantic)
        exchange_tensor_methods(before)
    return Binder(semantic)


@contextmanager
def _methods_of(semantic: Any) -> Iterator[None]:
    """Methods of `tl.tensor` belong to this interpreter; a virtual world may have one, too."""
    before = exchange_tensor_methods(semantic)
    try:
        yield
    finally:
        exchange_tensor_methods(before)


def interpret(launch: Launch) -> None:
    """Run every block of a launch, one after the other; returns when all have ended."""
    with _lock:
        binder = _binder()
        function = binder.function(launch.kernel)
        plain = constexpr_names(launch.kernel.fn)
        bound = inspect.signature(function).bind(**launch.args)
        bound.apply_defaults()
        builder = binder.semantic.builder
        builder.set_grid_dim(launch.grid, 1, 1)
        with _methods_of(binder.semantic), np.errstate(all="ignore"):
            for index in range(launch.grid):
                builder.set_grid_idx(index, 0, 0)
                values = {
                    name: value if name in plain else binder.argument(value)
                    for name, value in bound.arguments.items()
                }
                function(**values)


__all__ = ["interpret"]
