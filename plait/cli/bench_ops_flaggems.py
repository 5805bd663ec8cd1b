"""FlagGems as a contestant of `plait bench ops`, where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

import plait
from plait.cli.bench_ops_measure import check, raised
from plait.cli.bench_ops_points import Point
from plait.runtime.timing import capture

PACKAGE = "flag_gems"


def is_installed() -> bool:
    """Whether it can be imported."""
    return find_spec(PACKAGE) is not None


def version() -> str:
    """Of the distribution; "unknown" where it has no metadata."""
    for name in (PACKAGE, PACKAGE.replace("_", "-")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def contestant(
    point: Point, operands: Sequence[Any]
) -> Callable[[Callable[[], Any]], torch.cuda.CUDAGraph | str]:
    """From the plain call to its captured graph under FlagGems, or why there is none.

    PyTorch lets two libraries of one process override a slot only one after the other, so plait's
    overrides are taken out first. Results are checked as plait's are.
    """

    def make(call: Callable[[], Any]) -> torch.cuda.CUDAGraph | str:
        plain = call()
        plait.uninstall()
        gems = import_module(PACKAGE)
        try:
            with gems.use_gems():
                result = call()
                graph = capture(call)
        except Exception as error:
            return f"FlagGems {raised(error)}"
        wrong = check(point, operands, result, plain, same_strides=False)
        return f"FlagGems is wrong: {wrong}" if wrong else graph

    return make


__all__ = ["contestant", "is_installed", "version"]
