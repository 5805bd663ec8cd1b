"""Where the operators of ATen that plait has kernels for are described.

Each module has `SPECS`, a tuple of `OpSpec`s. They are read when a name is first looked up, not
when plait is imported: kernels need Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = (
    "plait.ops.norm.specs",
    "plait.ops.reduction.specs",
    "plait.ops.scan.specs",
)


def specs() -> list[Any]:
    """All `OpSpec`s that ship."""
    return [each for name in MODULES for each in import_module(name).SPECS]


__all__ = ["MODULES", "specs"]
