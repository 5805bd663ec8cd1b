"""Host time of overridden calls against ATen's, printed and bounded loosely."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import plait
from plait.ops.aten import registration, targets

KEYS = ("sum", "_softmax", "native_layer_norm")


def host_us(function: Callable[[], object], calls: int = 500) -> float:
    """Microseconds of host time a call, without waiting for the GPU; best of several rounds."""
    rounds = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return min(rounds)


def test_host_time_of_planned_calls(device):
    """Printed, and bounded loosely: at most ATen + 4 us is the aim, on a quiet machine."""
    x = torch.randn(32, device=device)
    y = torch.randn(4, 8, device=device)
    w = torch.randn(8, device=device)
    out = torch.empty((), device=device)
    cases = {
        "sum": lambda: x.sum(),
        "sum dim": lambda: y.sum(-1),
        "sum out": lambda: torch.sum(x, 0, out=out),
        "softmax": lambda: torch.softmax(y, -1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(y, (8,), w, w),
        "declined": lambda: torch.sum(x, 0, dtype=torch.complex64),
    }
    ratios = []
    print(f"\nhost us     {'ATen':>9}{'gate off':>9}{'plait':>9}")
    for name, function in cases.items():
        function()
        times = [host_us(function)]
        with plait.use((), "*", device=device):
            registration.install(targets.select("KEYS", KEYS), registration.dispatch_key_of(device))
            times.append(host_us(function))
        with plait.use(KEYS, device=device):
            times.append(host_us(function))
        registration.uninstall()
        ratios.append(times[2] / times[0])
        print(f"{name:<12}" + "".join(f"{each:9.2f}" for each in times))
    print(f"geometric mean of plait to ATen {statistics.geometric_mean(ratios):.2f}")
    assert max(ratios) < 3


def test_cost_of_a_miss(device):
    """A new size of a known class: recorded, bound and launched, nothing compiled."""
    xs = [torch.randn(3, 2101 + 2 * n, device=device) for n in range(200)]
    with plait.use(KEYS, device=device):
        for x in xs[:20]:
            x.sum(-1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for x in xs[20:]:
            x.sum(-1)
    each = (time.perf_counter() - start) / len(xs[20:]) * 1e6
    torch.cuda.synchronize()
    registration.uninstall()
    print(f"\na call of a new size: {each:.0f} us")
    assert each < 1000
