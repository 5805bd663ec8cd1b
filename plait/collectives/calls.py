"""What every collective does first: find the group, check x, say which implementation serves."""

from __future__ import annotations

import torch

from plait.checks import check_device, check_one_of
from plait.runtime.record import record_run
from plait.symm.group import Group, check_belongs, get_group

IMPLS = ("auto", "fused", "unfused", "reference")


def begin_call(operator: str, group: str, x: torch.Tensor, impl: str, detail: str = "") -> Group:
    """The calling rank's group, once `x` and `impl` fit it; recorded for `plait.last_run()`.

    "fused" needs symmetric memory and raises UnsupportedError without. "auto" takes it where it is.
    """
    found = get_group(group)
    check_one_of("impl", impl, IMPLS)
    check_device("x", x, found.device, f"group {group!r}")
    check_belongs("x", x, found)
    if impl == "fused" and not found.transport.symmetric:
        found.workspace  # noqa: B018 - raises UnsupportedError, which says why
    symmetric = found.transport.symmetric
    served = ("fused" if symmetric else "unfused") if impl == "auto" else impl
    reason = f"impl={impl!r}"
    if impl == "auto":
        reason = (
            "auto: symmetric memory" if symmetric else "auto: the ranks share no symmetric memory"
        )
    record_run(operator, served, reason, detail)
    return found


__all__ = ["IMPLS", "begin_call"]
