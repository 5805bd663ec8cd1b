"""Free memory full of NaN, so that what a kernel does not write, or reads too much of, shows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from plait.ops.engine.call import Call

# How many blocks of how many bytes: sizes that allocators keep apart, PyTorch's small and large
# blocks of a GPU and the bins of the C library.
_GPU = {2**23: 2, 2**20: 2, 2**15: 4, 2**9: 16}
_CPU = {2**17: 1, 2**14: 4, 2**12: 6, 2**10: 12, 512: 12, 192: 12}


def poison(device: torch.device) -> None:
    """Fill free memory of `device` with bytes that are NaN in floating dtypes, -1 in integers."""
    sizes = _GPU if device.type == "cuda" else _CPU
    blocks = [
        torch.empty(nbytes, dtype=torch.uint8, device=device)
        for nbytes, count in sizes.items()
        for _ in range(count)
    ]
    for each in blocks:
        each.fill_(255)


def poisoned_results() -> Any:
    """A block in which operators of plait get results and scratch memory full of the same bytes.

    The C library writes into free memory itself, so on the CPU `poison` does not reach all of it.
    Plans on a GPU do not come this way.
    """
    new = Call._new

    def filled(self: Call, *args: Any) -> torch.Tensor:
        made = new(self, *args)
        memory = made.untyped_storage()
        if memory.nbytes():
            torch.empty(0, dtype=torch.uint8, device=made.device).set_(memory).fill_(255)
        return made

    return mock.patch.object(Call, "_new", filled)


__all__ = ["poison", "poisoned_results"]
