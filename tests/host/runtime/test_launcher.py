"""`BoundLaunch`: Triton's C launcher in the layouts of its versions, else the ordinary launch."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
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


class _Flat:
    """The launcher object of Triton 3.6; its C launcher is `launch`."""

    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launch = lambda *arguments: launched.append(arguments)

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        scratch = (None, None)
        options = (self.launch_cooperative_grid, self.launch_pdl)
        self.launch(gridX, gridY, gridZ, stream, function, *options, *scratch, *args)


class _Nested(_Flat):
    """The launcher object of Triton 3.7 to 3.9."""

    arg_annotations, kernel_signature = ["annotations"], b"signature"

    def __call__(
        self,
        gridX,
        gridY,
        gridZ,
        stream,
        function,
        kernel_metadata,
        launch_metadata,
        launch_enter_hook,
        launch_exit_hook,
        *args,
    ):
        options = (self.launch_cooperative_grid, self.launch_pdl)
        told = (kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook)
        described = (self.arg_annotations, self.kernel_signature)
        start = (gridX, gridY, gridZ, stream, function, *options, *told)
        self.launch(*start, None, None, *described, args)


class _Strange(_Flat):
    def __call__(self, grid, *args): ...


class _Compiled:
    """A kernel that is compiled for a launcher object of one of these kinds."""

    arg_names = ("x", "n", "out", "N")

    def __init__(self, kind: type, launched: list[tuple[Any, ...]]) -> None:
        self.run = kind(launched)
        self.function, self.packed_metadata, self.metadata = 99, (4, 1, 0), SimpleNamespace()

    def _init_handles(self) -> None: ...

    def warmup(self, **arguments: Any) -> Any:
        return self


def _by_address(arguments: Any, names: dict[int, str]) -> Any:
    if isinstance(arguments, tuple):
        return tuple(_by_address(each, names) for each in arguments)
    return names.get(arguments, arguments) if type(arguments) is int else arguments


@pytest.fixture
def _on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    raw_stream = lambda index: 55  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw_stream, raising=False)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("kind", [_Flat, _Nested])
def test_a_launch_with_addresses_is_what_the_launcher_object_would_launch(kind):
    """By `run`, by `raw` with the arguments, and by `native` with the last of them as a tuple."""
    launched: list[tuple[Any, ...]] = []
    compiled = _Compiled(kind, launched)
    x, out = torch.ones(4), torch.zeros(4)
    bound = BoundLaunch(Launch(compiled, 7, {"x": x, "n": 3, "out": out, "N": 16}))
    compiled.run(7, 1, 1, 55, 99, (4, 1, 0), None, None, None, x.data_ptr(), 3, out.data_ptr(), 16)
    bound.run({"x": x, "out": out})
    y = torch.ones(4)
    bound.run({"x": y, "out": out})
    flat = [*bound.arguments]
    flat[bound.STREAM] = 55
    bound.raw(*flat)
    if bound.split is not None:
        bound.native(*flat[: bound.split], tuple(flat[bound.split :]))
    else:
        assert bound.native is bound.raw
    names = {x.data_ptr(): "x", out.data_ptr(): "out", y.data_ptr(): "y"}
    plain = [_by_address(tuple(each), names) for each in launched]
    (expected, first, other, *rest) = plain
    assert first == expected
    assert other == _by_address(tuple(launched[0]), {**names, x.data_ptr(): "y"})
    assert all(each == expected for each in rest)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_what_needs_memory_of_its_own_is_launched_ordinarily(name):
    compiled = _Compiled(_Nested, [])
    setattr(compiled.run, name, 1)
    assert BoundLaunch(Launch(compiled, 1, {"x": 0, "n": 0, "out": 0, "N": 1})).raw is None
    strange = _Compiled(_Strange, [])
    assert BoundLaunch(Launch(strange, 1, {"x": 0, "n": 0, "out": 0, "N": 1})).raw is None


@pytest.mark.newest_triton
def test_the_installed_triton_is_one_that_is_known():
    from triton.backends.nvidia.driver import CudaLauncher

    from plait.runtime import launcher

    assert launcher._parameters(CudaLauncher) in (launcher._FLAT, launcher._NESTED)


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
