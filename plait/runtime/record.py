"""What ran: each rank's last operator, and which implementation served it and why."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class RunRecord:
    """One call: `impl` is "fused", "unfused" or "reference"; `reason` says why it was chosen."""

    operator: str
    impl: str
    reason: str
    detail: str = ""


class _Local(threading.local):
    record: RunRecord | None = None


_local = _Local()


def record_run(operator: str, impl: str, reason: str, detail: str = "") -> None:
    """Remember what ran in the calling thread."""
    _local.record = RunRecord(operator, impl, reason, detail)


def repeat_run(record: RunRecord) -> None:
    """Remember that a call ran as one did before, of which `record` was made once."""
    _local.record = record


def last_run() -> RunRecord | None:
    """The last operator that the calling thread (a virtual rank is one thread) ran, or None."""
    return _local.record


__all__ = ["RunRecord", "last_run", "record_run", "repeat_run"]
