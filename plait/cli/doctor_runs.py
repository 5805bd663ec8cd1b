"""What will run on this machine and why not: `plait doctor`'s table, a pure function of facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# (is it so, why it stops the run, what to do, whether something is broken rather than absent)
_Obstacle = tuple[Any, str, str, bool]


@dataclass(frozen=True)
class Run:
    """One row: `broken` says that it would run on this hardware if the software were right."""

    what: str
    runs: bool
    reason: str
    todo: str = ""
    broken: bool = False


def what_runs(facts: Mapping[str, Any]) -> list[Run]:
    """The table. Facts that a failed probe left out count as unfavourable."""
    on_gpu = list(_gpu_obstacles(facts))
    gpus = facts.get("gpus") or []
    archs = [int(gpu["arch"][2:]) for gpu in gpus if gpu["arch"][2:].isdigit()]
    best = max(archs, default=0)
    shown = f"sm{best}"
    old = (best < 80, f"{shown} is older than sm80", "use a GPU from sm80 on", False)
    no_descriptors = (
        best < 90,
        f"{shown} has no tensor descriptors; the pointer kernel serves",
        "",
        False,
    )
    environment = facts.get("environment") or {}
    blocking = (
        _is_on(environment, "CUDA_LAUNCH_BLOCKING"),
        "CUDA_LAUNCH_BLOCKING is set: ranks that wait for each other would hang",
        "unset CUDA_LAUNCH_BLOCKING",
        True,
    )
    return [
        _run("virtual ranks on the CPU", "a small ag_gemm ran", _cpu_obstacles(facts)),
        _run("virtual ranks on one GPU", f"{len(gpus)} x {shown}", [*on_gpu, old, blocking]),
        _run(
            "processes on GPUs (symmetric memory)",
            _process_reason(gpus, environment),
            [*on_gpu, old, *_process_obstacles(facts, gpus, environment)],
        ),
        _run(
            "processes on the CPU (gloo, unfused)",
            "gloo is available",
            [*_torch_obstacles(facts), *_gloo_obstacles(facts)],
        ),
        _run("descriptor GEMM kernels (sm90 and up)", shown, [*on_gpu, no_descriptors]),
        _run("pointer GEMM kernels (sm80 and up)", shown, [*on_gpu, old]),
    ]


def _run(what: str, reason: str, obstacles: Iterable[_Obstacle]) -> Run:
    for so, why, todo, broken in obstacles:
        if so:
            return Run(what, False, why, todo, broken)
    return Run(what, True, reason)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() not in ("", "0", "false", "off", "no")


def _torch_obstacles(facts: Mapping[str, Any]) -> list[_Obstacle]:
    return [(not facts.get("torch"), "torch does not load or is too old", "see above", True)]


def _cpu_obstacles(facts: Mapping[str, Any]) -> Iterable[_Obstacle]:
    yield from _torch_obstacles(facts)
    for name in ("triton", "numpy", "greenlet"):
        missing = facts.get(name) is None
        yield missing, f"{name} does not load or is too old", "see above", facts.get("linux", True)
    text = "numpy 2.4 and Triton 3.6 do not go together"
    yield facts.get("numpy_clash"), text, 'pip install "numpy<2.4"', True
    trial = facts.get("trial", "the trial did not end")
    yield trial, trial, "see above; otherwise report it, with this page", True


def _gpu_obstacles(facts: Mapping[str, Any]) -> Iterable[_Obstacle]:
    yield from _torch_obstacles(facts)
    why = facts.get("no_gpu", "no GPU was found")
    yield not facts.get("gpus"), f"no GPU: {why}", "use virtual ranks on the CPU", False
    yield facts.get("amd"), "plait has no backend for AMD GPUs yet", "use the CPU", False
    yield not facts.get("triton"), "triton does not load or is too old", "see above", True
    text = "Triton's launcher needs a C compiler and Python.h"
    yield not facts.get("compiler"), text, "install gcc and python3-dev", True
    interpreted = _is_on(facts.get("environment") or {}, "TRITON_INTERPRET")
    yield interpreted, "TRITON_INTERPRET is set", "unset TRITON_INTERPRET", True


_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def _process_reason(gpus: list[Any], environment: Mapping[str, str]) -> str:
    if len(gpus) > 1:
        return f"{len(gpus)} GPUs reach each other"
    return f"several processes on one GPU: {_OVERLAP}={environment.get(_OVERLAP)}"


def _process_obstacles(
    facts: Mapping[str, Any], gpus: list[Any], environment: Mapping[str, str]
) -> Iterable[_Obstacle]:
    symm_mem = facts.get("symm_mem", "its probe did not end")
    yield symm_mem, f"symmetric memory does not import: {symm_mem}", "see above", True
    yield from _gloo_obstacles(facts)
    alone = len(gpus) < 2 and not _is_on(environment, _OVERLAP)
    yield alone, "one GPU only", f"set {_OVERLAP}=1 to share it", False
    pairs = facts.get("unreachable") or []
    text = ", ".join(f"{a} -> {b}" for a, b in pairs[:4])
    todo = "choose GPUs that reach each other with CUDA_VISIBLE_DEVICES"
    yield pairs, f"GPUs without peer access: {text}", todo, False


def _gloo_obstacles(facts: Mapping[str, Any]) -> Iterable[_Obstacle]:
    todo = "use a PyTorch with gloo"
    yield not facts.get("gloo"), "gloo is missing from this PyTorch", todo, True


__all__ = ["Run", "what_runs"]
