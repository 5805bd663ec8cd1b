"""Opening and closing a region: the launches around what a call does in it."""

from __future__ import annotations

import itertools
import random

from plait.backends.commands import Launch
from plait.settings import settings
from plait.symm import signals
from plait.symm.workspace import Region

_calls = itertools.count()


def open_region(
    region: Region, num_arrivals: int, operator: signals.Operator, *, leads: bool = False
) -> Launch:
    """The prologue: advance the region's epoch when the peers have consumed the last one.

    `num_arrivals` blocks of the call will `finish`: the last kernel's grid, or 1 with
    `close_region`. `leads`: the kernel that follows on `main` is launched early.
    """
    from plait.symm.kernels import _prologue_kernel

    limit_us = settings().prologue_delay_us
    # A share of the limit that differs by rank and call, and is the same in every run.
    share = random.Random(hash((region.rank, next(_calls)))).random() if limit_us else 0.0
    delay_ns = int(limit_us * share * 1000)
    args = {
        "ctx_ptr": region.ctx,
        "num_arrivals": num_arrivals,
        "delay_ns": delay_ns,
        "OP": int(operator),
        "HAS_DELAY": limit_us > 0,
    }
    if leads:
        args["LEADS"] = True
    return Launch(_prologue_kernel, 1, args, num_warps=1)


def close_region(region: Region) -> Launch:
    """The stand-alone finish, for calls whose last reader is not a kernel that finishes itself."""
    from plait.symm.kernels import _finish_kernel

    return Launch(_finish_kernel, 1, {"ctx_ptr": region.ctx}, num_warps=1)


__all__ = ["close_region", "open_region"]
