"""Which implementation serves a call: an explicit choice runs or raises, `auto` says why.

`auto` takes the fused kernel unless a measurement or the model says that communication and product
in turn are faster on this GPU over this link. All ranks must decide alike, or one waits for signals
that nobody sends: the decision depends on sizes, dtypes, link, GPU and the shipped table, never on
addresses, strides or tiles. Docs: docs/design/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from plait.device import device_info
from plait.errors import UnsupportedError
from plait.model.choose import Choice, Measurement
from plait.model.choose import choose as choose_faster
from plait.model.problem import OPERATORS, Link, Operator, Problem
from plait.model.rates import rates_of
from plait.runtime.record import RunRecord, record_run, repeat_run
from plait.runtime.tuning_store import (
    TuningEntry,
    TuningTable,
    gpu_slug,
    read_table,
    tuning_table,
)
from plait.settings import Settings, settings
from plait.symm.group import Group
from plait.symm.transports.base import LinkSpeed

SHIPPED_TABLES = Path(__file__).parent / "tables"

_MAX_CHOICES = 4096
_RATED_BYTES = 2  # of an element; what an fp32 product takes depends on the precision asked for
_TAKES = "auto: the fused kernel takes this call"


class Sizes(NamedTuple):
    """One call, M, N and K those of all ranks together.

    `travel_bytes`: of an element that travels. `algorithm`: the fused kernel's, of gemm_ar.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    travel_bytes: int
    algorithm: Literal["one_shot", "two_shot"] | None = None


def choose(
    operator: str, group: Group, impl: str, obstacle: str | None, sizes: Sizes | None = None
) -> str:
    """ "fused", "unfused" or "reference", recorded for `plait.last_run()`.

    `obstacle` says why the fused kernel cannot serve this call (None if it can); groups whose ranks
    share no memory cannot either. Without `sizes`, and where nobody knows the link, "auto" is fused
    if it can be.
    """
    if obstacle is None and not group.transport.symmetric:
        obstacle = "the ranks of this group share no symmetric memory"
    if impl == "auto":
        if obstacle is not None:
            record_run(operator, "unfused", obstacle)
            return "unfused"
        link = group.transport.link_speed()
        # One rank has nothing to hide; what it then runs "unfused" still has the collective's copy.
        if link is None or sizes is None or group.world_size == 1:
            record_run(operator, "fused", _TAKES)
            return "fused"
        record = _remembered(operator, group, link, sizes)
        repeat_run(record)
        return record.impl
    if impl == "fused" and obstacle is not None:
        raise UnsupportedError(
            "impl", "a call that the fused kernel takes", obstacle, "Use 'auto' or 'unfused'."
        )
    record_run(operator, impl, f"impl={impl!r}")
    return impl


# --- remembered choices: a first one takes milliseconds, and unfused calls have no plan
_choices: dict[tuple[Any, ...], RunRecord] = {}
_made_under: Settings | None = None  # they name the folder of the user's own table


def _remembered(operator: str, group: Group, link: LinkSpeed, sizes: Sizes) -> RunRecord:
    global _made_under
    current = settings()
    if _made_under is not current:
        _choices.clear()
        _made_under = current
    transport = group.transport
    key = (operator, group.world_size, group.device, link, transport.one_process, sizes)
    record = _choices.get(key)
    if record is None:
        gpu = device_info(group.device).name
        impl, reason = decide(operator, group.world_size, link, gpu, sizes, transport.one_process)
        if len(_choices) >= _MAX_CHOICES:
            _choices.clear()
        record = _choices[key] = RunRecord(operator, impl, reason)
    return record


def forget_choices() -> None:
    """Decide anew, as after a table was written."""
    _choices.clear()


def decide(
    operator: str,
    world_size: int,
    link: LinkSpeed,
    gpu: str,
    sizes: Sizes,
    own_table: bool = False,
) -> tuple[str, str]:
    """(implementation, reason) of `impl="auto"`, from nothing but what all ranks know.

    `own_table`: the user's own table counts, too. It may differ from machine to machine, so only
    for groups that live in one process.
    """
    if min(sizes[:3]) < 1:
        return "fused", _TAKES  # nothing to compute
    problem = Problem(
        cast(Operator, operator), sizes.M, sizes.N, sizes.K, world_size, sizes.dtype.itemsize,
        0 if sizes.travel_bytes == sizes.dtype.itemsize else sizes.travel_bytes,
    )  # fmt: skip
    rates = rates_of(gpu) if sizes.dtype.itemsize == _RATED_BYTES else None
    found: Choice = choose_faster(
        problem,
        Link(link.gb_s, link.latency_us),
        rates,
        measured=measurements(_table(gpu, own_table)),
        algorithm=sizes.algorithm,
    )
    if rates is None and found.reason.startswith("fused"):
        return "fused", f"{_TAKES}; no rates of {gpu} for {_dtype_name(sizes.dtype)}"
    return found.impl, f"auto: {found.reason}"


# --- the table
def _table(gpu: str, own_table: bool) -> TuningTable:
    if own_table:
        return tuning_table(gpu, SHIPPED_TABLES)
    return read_table(shipped_table_path(gpu))


def shipped_table_path(gpu: str) -> Path:
    """The shipped table of the GPU with this name; may not exist."""
    return SHIPPED_TABLES / f"{gpu_slug(gpu)}.json"


def table_key(dtype: str, world_size: int, gb_s: float, latency_us: float) -> dict[str, Any]:
    """What names a measurement besides the operator, M, N and K (of all ranks together).

    `dtype` such as "bfloat16". The link goes in by its figures, not its name, so that entries serve
    whatever link has nearly the same.
    """
    return {"dtype": dtype, "world_size": world_size, "gb_s": gb_s, "latency_us": latency_us}


def measurements(table: TuningTable) -> Sequence[Measurement]:
    """The entries of overlapped operators: `time_us` is fused, `baseline_us` unfused.

    Types of the same size count as one: their products and transfers take as long.
    """
    return [_measurement(each) for each in table.entries if each.operator in OPERATORS]


def _measurement(entry: TuningEntry) -> Measurement:
    key, shape = entry.key, entry.shape
    itemsize = getattr(torch, key["dtype"]).itemsize
    operator = cast(Operator, entry.operator)
    return Measurement(
        Problem(operator, shape["M"], shape["N"], shape["K"], key["world_size"], itemsize),
        bandwidth_gb_s=key["gb_s"],
        fused_us=entry.time_us,
        unfused_us=entry.baseline_us,
        latency_us=key["latency_us"],
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = [
    "SHIPPED_TABLES",
    "Sizes",
    "choose",
    "decide",
    "forget_choices",
    "measurements",
    "shipped_table_path",
    "table_key",
]
