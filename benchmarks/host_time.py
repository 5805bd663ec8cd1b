"""Host time of launches, copies, events and planned calls, as JSON lines.

    python -m benchmarks.host_time FILE [LINK]

Appends one line a measurement to FILE: what, microseconds of the host (best and median), and for a
call the number of its steps. The GPU is idle before each sample, so nothing waits for room in a
queue. LINK is that of the emulated peers, by default paced:360. Every wait has a deadline.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import plait
from plait.backends.commands import Copy, Program, Signal, StreamWait
from plait.backends.nvidia.driver import find_driver
from plait.backends.nvidia.executor import CudaExecutor
from plait.overlap.common import plans
from plait.runtime.prepared import PreparedProgram
from plait.settings import override
from plait.symm.regions import close_region, open_region
from plait.symm.signals import Operator

_SAMPLES = 200
_COPIES = 50  # in one sample, so that the clock does not count


def measure(call: Callable[[], Any], count: int = 1) -> dict[str, float]:
    """Microseconds of the host for each of `count` things that `call` does."""
    for _ in range(8):
        call()
    times: list[float] = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6 / count)
    torch.cuda.synchronize()
    return {"best_us": round(min(times), 2), "median_us": round(statistics.median(times), 2)}


def primitives(device: torch.device) -> dict[str, dict[str, float]]:
    """One launch, copies and events, prepared and through torch."""
    executor = CudaExecutor(device)
    word = torch.zeros(1, dtype=torch.int32, device=device)
    mirror = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    there, here = (torch.zeros(1 << 20, device=device) for _ in range(2))
    programs = {
        "4-byte copy": Program("copies", [Signal(word, mirror)] * _COPIES),
        "4 MiB copy on the device": Program("copies", [Copy(there, here)] * _COPIES),
        "event record and wait": Program("events", [StreamWait("comm", on="main")] * _COPIES),
    }
    found: dict[str, dict[str, float]] = {}
    for name, program in programs.items():
        roles = {"here": here} if "MiB" in name else {}
        prepared = PreparedProgram(program, roles, executor)
        found[f"{name}, prepared"] = measure(lambda p=prepared, r=roles: p.run(r), _COPIES)
        found[f"{name}, through torch"] = measure(lambda p=program: executor.run(p), _COPIES)
    group = plait.Group.emulated(1, link="paced:360", device=device)
    region = group.take_region(1 << 20)
    both = Program("region", [open_region(region, 1, Operator.USER), close_region(region)])
    prepared = PreparedProgram(both, {}, executor)
    found["launch of a small kernel, prepared"] = measure(lambda: prepared.run({}), 2)
    found["launch of a small kernel, through Triton"] = measure(lambda: executor.run(both), 2)
    group.close()
    return found


def calls(device: torch.device, link: str) -> dict[str, dict[str, Any]]:
    """Planned calls of 8 ranks, of which 7 are emulated, and the same calls unplanned."""
    found: dict[str, dict[str, Any]] = {}
    for rows in (16, 512, 4096):
        group = plait.Group.emulated(8, link=link, device=device)
        x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
        weight = torch.randn(1024, 4096, device=device, dtype=torch.bfloat16)
        share = x[: max(1, rows // 8)]
        operators: dict[str, Callable[[], Any]] = {
            "ag_gemm": lambda g=group, s=share, w=weight: plait.ag_gemm(
                s, w, group=g, impl="fused"
            ),
            "gemm_rs": lambda g=group, s=x, w=weight: plait.gemm_rs(s, w, group=g, impl="fused"),
            "gemm_ar": lambda g=group, s=x, w=weight: plait.gemm_ar(s, w, group=g, impl="fused"),
        }
        for name, call in operators.items():
            for _ in range(6):
                call()
            torch.cuda.synchronize()
            record = plait.last_run()
            result: dict[str, Any] = dict(measure(call))
            result["planned"] = record is not None and record.detail == "planned"
            cache = plans._caches[group.workspace]
            last = next(reversed(cache._plans.values()))
            result["steps"] = sum(p.num_steps for p in last.programs) if last else None
            found[f"{name} M={rows} TP8 {link}"] = result
            with override(prologue_delay_us=1e-3):  # settings under which nothing is planned
                found[f"{name} M={rows} TP8 {link}, not planned"] = measure(call)
        group.close()
    return found


def main(arguments: list[str]) -> None:
    """Measure all and append the lines to the file that is the first argument."""
    faulthandler.dump_traceback_later(300, exit=True)
    path, link = Path(arguments[0]), (arguments[1:] or ["paced:360"])[0]
    device = torch.device("cuda", torch.cuda.current_device())
    assert find_driver() is not None, "cuda.bindings is not installed"
    with override(deadline_s=10.0):
        found = {**primitives(device), **calls(device, link)}
    lines = [json.dumps({"what": what, **numbers}) for what, numbers in found.items()]
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
