"""What overlap is measured by. Times are of one unit; see docs/design/model.md.

NaN where a metric means nothing: without communication there is nothing to hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def ect(overlapped: float, gemm: float) -> float:
    """Effective communication time: what overlap adds to the best plain GEMM, in the same unit."""
    return overlapped - gemm


def overlap_efficiency(overlapped: float, gemm: float, comm: float) -> float:
    """1 - ECT / communication alone: 1 is fully hidden; below 0 worse than one after the other."""
    return 1 - ect(overlapped, gemm) / comm if comm > 0 else math.nan


def hidden_share(overlapped: float, gemm: float, comm: float) -> float:
    """What is saved over one after the other, as a share of the shorter: 1 is perfect overlap."""
    shorter = min(gemm, comm)
    return (gemm + comm - overlapped) / shorter if shorter > 0 else math.nan


def bound_ratio(overlapped: float, gemm: float, comm: float) -> float:
    """Overlapped time over the longer of the two: 1 is the physical limit."""
    longer = max(gemm, comm)
    return overlapped / longer if longer > 0 else math.nan


def speedup(unfused: float, overlapped: float) -> float:
    """Time of one after the other over the overlapped time."""
    return unfused / overlapped


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values; NaN without any."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


__all__ = [
    "bound_ratio",
    "ect",
    "geometric_mean",
    "hidden_share",
    "overlap_efficiency",
    "speedup",
]
