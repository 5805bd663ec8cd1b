"""`plait.explain`: which way each ATen call of a function goes, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.ops.aten import dispatch, report, spec
from plait.ops.aten.registration import registered
from plait.ops.aten.targets import key_of, targets

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class Path:
    """One ATen call. `path` is plait or aten; `reason` says why it is not plait."""

    key: str
    path: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.key:<32} {self.path:<6}{self.reason}".rstrip()


@dataclass(frozen=True)
class Explanation:
    """The ATen calls of a function in order, below autograd, and what the function returned."""

    calls: tuple[Path, ...]
    result: Any

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "no call of ATen"


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call `fn(*args, **kwargs)` and tell for each call of ATen which kernel served it and why.

    What is on is what would be on without `explain`: enable, or open a `use()` block, around it.
    Backward passes that `fn` runs are told, too, and so are calls that ATen's own kernels make of
    operators that plait overrides. `print` shows the explanation; errors of `fn` are its own.
    """
    spec.load_catalog()
    calls: list[Path] = []

    def hear(key: str, dispatch_key: str, reason: str) -> None:
        del dispatch_key
        served = reason == report.PLAIT
        if reason == dispatch.OFF:
            reason = _why_off(key)
        calls.append(Path(key, "plait" if served else "aten", reason))

    before = report.listen(hear)
    try:
        with _Watch(calls):
            result = fn(*args, **kwargs)
    finally:
        report.listen(before)
    return Explanation(tuple(calls), result)


class _Watch(TorchDispatchMode):
    """Adds the calls that reach no override of plait."""

    def __init__(self, calls: list[Path]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = len(self._calls)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            key = key_of(func)
            # An override speaks before it runs anything, so its own word is the first one.
            if not any(each.key == key for each in self._calls[place : place + 1]):
                self._calls.insert(place, Path(key, "aten", _why_unheard(key, result)))
        return result


def _why_off(key: str) -> str:
    return dispatch.OFF if spec.find(key) else dispatch.NO_KERNEL


def _why_unheard(key: str, result: Any) -> str:
    if key not in targets():
        return "no operator that plait overrides"
    if spec.find(key) is None:
        return dispatch.NO_KERNEL
    leaves = [each for each in tree_leaves(result) if torch.is_tensor(each)]
    where = {_DISPATCH_KEYS.get(each.device.type, "") for each in leaves}
    if any(key in registered(each) for each in where):
        return "operands that reach another kernel of PyTorch first"
    return "not enabled"


__all__ = ["Explanation", "Path", "explain"]
