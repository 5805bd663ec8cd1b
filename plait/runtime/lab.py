"""Where a command measures: a device, how programs run on it, and the timer.

Benchmarks and the tuner take a `Lab`, so that tests can give them one with invented times.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from plait import __version__
from plait.backends.base import executor_for
from plait.backends.commands import Program
from plait.device import DeviceInfo, device_info
from plait.errors import DeviceError
from plait.runtime.timing import Timing, gpu_times

_PAUSE_S = 0.01

Contestants: TypeAlias = Mapping[str, "Callable[[], object] | torch.cuda.CUDAGraph"]


@dataclass(frozen=True)
class Lab:
    """`run` enqueues a program; `times` measures contestants, interleaved, over some rounds.

    `rested` does so with pauses; see `rested_times`.
    """

    device: torch.device
    info: DeviceInfo
    run: Callable[[Program], None]
    times: Callable[[Contestants, int], Mapping[str, Timing]]
    rested: Callable[[Contestants, int], Mapping[str, Timing]] | None = None

    def rested_times(self, contestants: Contestants, rounds: int) -> Mapping[str, Timing]:
        """Times of a device that is not at its power limit, where that can be arranged."""
        return (self.rested or self.times)(contestants, rounds)


def gpu_lab() -> Lab:
    """The current GPU, timed with cold L2. Raises DeviceError if PyTorch has none."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "device",
            "a GPU that PyTorch can use",
            "none",
            "Run this on a machine with a GPU; `plait doctor` says what is missing.",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    executor = executor_for(device)
    rested = functools.partial(gpu_times, pause_s=_PAUSE_S)
    return Lab(device, device_info(device), executor.run, gpu_times, rested)


def versions() -> dict[str, str]:
    """Versions of what decides a kernel's speed."""
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "missing"
    cuda = torch.version.cuda or torch.version.hip or "none"
    return {
        "torch": torch.__version__,
        "triton": triton_version,
        "plait": __version__,
        "cuda": cuda,
    }


def gpu_clocks(device: torch.device) -> str:
    """Clocks, power and temperature of a GPU as its vendor's tool says now; "" if it cannot."""
    index = device.index or 0
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader", "-i", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


__all__ = ["Contestants", "Lab", "gpu_clocks", "gpu_lab", "versions"]
