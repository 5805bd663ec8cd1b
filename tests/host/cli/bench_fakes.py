"""A GPU that is none: products by torch on the CPU, and invented times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from plait.backends.commands import Program
from plait.device import device_info
from plait.runtime.lab import Contestants, Lab
from plait.runtime.timing import Timing

GPU = replace(device_info("cpu"), arch="sm90", num_sms=132, name="NVIDIA H200")


class FakeGpu:
    """Runs products on the CPU and says how long they took.

    `slow` maps a config's text to a factor, `wrong` and `failing` hold texts; torch takes 100 us.
    """

    def __init__(self) -> None:
        self.slow: dict[str, float] = {}
        self.wrong: set[str] = set()
        self.failing: set[str] = set()
        self.timed: list[tuple[list[str], int]] = []
        self.ran = 0

    def lab(self, device: torch.device) -> Lab:
        return Lab(device, GPU, self.run, self.times)

    def run(self, program: Program) -> None:
        self.ran += 1
        launch = program.launches()[0]
        args = launch.args
        names = ("out_ptr", "x", "w0")
        out, x, weight = (getattr(args[name], "base", args[name]) for name in names)
        batch = (args["num_batches"],) if args["BATCHED"] else ()
        out = out.view(*batch, args["M"], args["N"])
        if args["DESC"]:
            shape = (args["K"], args["N"]) if args["B_KN"] else (args["N"], args["K"])
            x, weight = x.view(*batch, args["M"], args["K"]), weight.view(*batch, *shape)
            weight = weight.mT if args["B_KN"] else weight
        result = x.float() @ weight.float().mT
        if args["SCALES"] == "rows":
            result = result * args["x_scale_ptr"][:, None] * args["w_scale_ptr"]
        out.copy_(result)
        tile = f"{args['BLOCK_M']}x{args['BLOCK_N']}x{args['BLOCK_K']}"
        if tile in self.wrong:
            out[..., -1, -1] += 10 * result.abs().max()
        if tile in self.failing:
            raise RuntimeError(f"out of registers\nwith {tile}")

    def times(self, contestants: Contestants, rounds: int) -> Mapping[str, Timing]:
        self.timed.append((list(contestants), rounds))
        found = {}
        for name in contestants:
            time_us = 200.0 if name == "copy" else 100.0 * self.slow.get(name, 1.0)
            found[name] = Timing(name, tuple(time_us * (1 + 0.01 * (i % 3)) for i in range(rounds)))
        return found
