"""Three threads compute and run backward while a fourth turns overrides on and off.

    python -m tests.aten_stress SECONDS DEVICE bitwise    made-up operators that are ATen's kernels
    python -m tests.aten_stress SECONDS DEVICE shipped    the operators that ship

A program of its own, because a mistake here would crash the process. It prints how often things
were turned, how many passes each thread made, and how many calls plait served.
"""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import plait
from plait.ops.aten import registration, spec, targets


def made_up(dispatch_key: str) -> tuple[str, ...]:
    """Operators for `add` and `mm` that are the kernels they replace."""
    exact = {key: torch.library.get_kernel(f"aten::{key}", dispatch_key) for key in ADD_AND_MM}
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def run(key: str) -> Callable[..., Any]:
        return lambda a, b: exact[key].call_boxed(keys, a, b)

    def supports(a: Any, b: Any, **options: Any) -> str:
        return "" if isinstance(b, torch.Tensor) else "a number"

    for key in ADD_AND_MM:
        spec.add(spec.OpSpec(key, (key,), run=run(key), supports=supports))
    return ADD_AND_MM


ROOT = Path(__file__).resolve().parents[1]
ADD_AND_MM = ("add.Tensor", "mm")
SHIPPED = ("sum", "_softmax", "_softmax_backward_data", "native_layer_norm", "*layer_norm_backward")


class Stress:
    """The threads and what they have done."""

    def __init__(self, seconds: float, device: torch.device, keys: tuple[str, ...]) -> None:
        self.end, self.device, self.keys = time.time() + seconds, device, keys
        self.bitwise = keys == ADD_AND_MM
        self.flips, self.wrong, self.passes = 0, [], [0, 0, 0]

    def flip(self) -> None:
        while time.time() < self.end:
            with plait.use("*", device=self.device):
                pass
            plait.enable(self.keys[:1], device=self.device)
            plait.disable()
            if not self.bitwise:
                plait.enable(self.keys, device=self.device)
                plait.disable(self.keys[-1])
                plait.disable()
            self.flips += 1
            time.sleep(1e-4)  # else the others wait for Python's lock, 5 ms every time

    def compute(self, number: int) -> None:
        x = torch.arange(64.0, device=self.device).view(8, 8) / 64

        def once() -> list[torch.Tensor]:
            w = x.clone().requires_grad_()
            y = torch.softmax(w @ x + 1, 0) * x + w
            loss = (torch.nn.functional.layer_norm(y, (8,)) * x).sum() + y.sum()
            loss.backward()
            return [loss.detach(), w.grad]

        with plait.use((), "*"):
            plain = once()
        while time.time() < self.end:
            if number == 2 and self.passes[number] % 2:
                with plait.use(self.keys[1:2], device=self.device):
                    got = once()
            else:
                got = once()
            if not all(self._same(a, b) for a, b in zip(got, plain, strict=True)):
                self.wrong.append(got)
            self.passes[number] += 1

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a, b) if self.bitwise else torch.allclose(a, b, rtol=1e-4, atol=1e-4)

    def run(self) -> None:
        threads = [threading.Thread(target=self.compute, args=(i,)) for i in range(3)]
        threads.append(threading.Thread(target=self.flip))
        for each in threads:
            each.start()
        for each in threads:
            each.join()


def main(seconds: str, device: str, kind: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    where = torch.device(device)
    with ExitStack() as stack:
        if kind == "bitwise":
            stack.enter_context(spec.only())
            keys = made_up(registration.dispatch_key_of(where))
        else:
            keys = SHIPPED
        # Before threads compute: registering writes PyTorch's table of kernels without a lock.
        registration.install(targets.targets(), registration.dispatch_key_of(where))
        stress = Stress(float(seconds), where, keys)
        stress.run()
        served = plait.report().served
    assert not stress.wrong, (len(stress.wrong), stress.passes, stress.wrong[0])
    assert min(stress.passes) > 5, stress.passes
    assert stress.flips > 5, stress.flips
    assert served > 0
    print(stress.flips, stress.passes, served)


def run_stress(seconds: float, device: torch.device, kind: str) -> str:
    """What the program prints, run in a process of its own; AssertionError with its last words."""
    command = [sys.executable, "-m", "tests.aten_stress", str(seconds), str(device), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
