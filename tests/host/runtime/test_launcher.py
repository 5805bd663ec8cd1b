"""`BoundLaunch` where Triton's own launcher is not known: the ordinary launch, with new tensors."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plait.backends.commands import Launch
from plait.runtime.launcher import BoundLaunch, launches_are_watched


class _Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.block_shape = base, [16, 16]


class _Kernel:
    """A kernel of a Triton whose compiled kernels look like nothing plait knows."""

    arg_names = ("x", "bias", "out", "table", "N")

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []

    def warmup(self, **arguments: Any) -> Any:
        return SimpleNamespace(_init_handles=lambda: None, run=object())

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(num_warps: int, num_stages: int, **arguments: Any) -> None:
            self.launched.append(arguments)

        return launch


def test_later_launches_get_their_own_tensors_and_none_of_the_first():
    kernel, x, out, table = _Kernel(), torch.ones(4, 4), torch.zeros(4), torch.zeros(2)
    # Where there is no bias, the result stands for it.
    arguments = {"x": _Descriptor(x), "bias": out, "out": out, "table": table, "N": 4}
    bound = BoundLaunch(Launch(kernel, 2, arguments))
    assert bound.raw is None
    bound.run({"x": x, "out": out})
    freed = [StorageWeakRef(each.untyped_storage()) for each in (x, out)]
    assert kernel.launched[0]["x"].base is x
    kernel.launched.clear()
    del x, out, arguments
    gc.collect()
    assert all(each.expired() for each in freed)
    other, result = torch.ones(4, 4), torch.zeros(4)
    bound.run({"x": other, "out": result})
    (seen,) = kernel.launched
    assert seen["x"].base is other
    assert seen["x"].block_shape == [16, 16]
    assert seen["out"] is seen["bias"] is result
    assert seen["table"] is table
    assert seen["N"] == 4


def test_watchers_are_noticed():
    from triton import knobs

    def hook(metadata: Any) -> None: ...

    assert not launches_are_watched()
    knobs.runtime.launch_exit_hook.add(hook)
    try:
        assert launches_are_watched()
    finally:
        knobs.runtime.launch_exit_hook.remove(hook)
    assert not launches_are_watched()
