"""Which implementation serves a call: an explicit choice runs or raises, `auto` says why."""

from __future__ import annotations

from plait.errors import UnsupportedError
from plait.runtime.record import record_run
from plait.symm.group import Group


def choose(operator: str, group: Group, impl: str, obstacle: str | None) -> str:
    """ "fused", "unfused" or "reference", recorded for `plait.last_run()`.

    `obstacle` says why the fused kernel cannot serve this call (None if it can); groups whose ranks
    share no memory cannot either.
    """
    if obstacle is None and not group.transport.symmetric:
        obstacle = "the ranks of this group share no symmetric memory"
    if impl == "auto":
        chosen = "fused" if obstacle is None else "unfused"
        record_run(
            operator,
            chosen,
            "auto: the fused kernel takes this call" if obstacle is None else obstacle,
        )
        return chosen
    if impl == "fused" and obstacle is not None:
        raise UnsupportedError(
            "impl", "a call that the fused kernel takes", obstacle, "Use 'auto' or 'unfused'."
        )
    record_run(operator, impl, f"impl={impl!r}")
    return impl


__all__ = ["choose"]
