"""Planned calls without a GPU: operands lie in host memory, and launches run at addresses there."""

import ctypes
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from plait.backends.commands import Launch
from plait.backends.cpu.interpreter import interpret
from plait.ops.aten import dispatch, gate, spec
from plait.ops.aten.originals import Original
from plait.ops.engine import call, plans

STREAM = 55
BLOCK = 64


@triton.jit
def add_scaled_kernel(x_ptr, y_ptr, out_ptr, size, scale, BLOCK: tl.constexpr):
    """out[i] = x[i] + scale * y[i]"""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + scale * y, mask=mask)


class HostLaunch:
    """A bound launch whose C launcher runs the kernel under the interpreter, at the addresses."""

    STREAM = 3
    split: int | None = None
    log: list[tuple[Any, ...]]

    def __init__(self, launch: Launch) -> None:
        self.launch, self.compiled = launch, object()
        values = [launch.args[name] for name in launch.kernel.arg_names]
        self.arguments = [launch.grid, 1, 1, None, "middle", *map(_address, values)]
        self.raw = self.native = self._launcher(launch.kernel, [_kind(each) for each in values])

    def launch_as_bound(self) -> None:
        interpret(self.launch)

    def _launcher(self, kernel: Any, kinds: list[Any]) -> Any:
        """The C launcher, which knows the kernel and nothing of the first call."""
        log, split = self.log, self.split

        def launch(*arguments: Any) -> None:
            grid, _, _, stream, middle, *rest = arguments
            if split is not None:
                (rest,) = rest
            log.append((kernel.fn.__name__, stream, middle, *rest))
            values = [
                _memory(value, kind) if kind else value
                for value, kind in zip(rest, kinds, strict=True)
            ]
            interpret(Launch(kernel, grid, dict(zip(kernel.arg_names, values, strict=True))))

        return launch


def _kind(value: Any) -> Any:
    """Dtype and bytes of what a pointer points into; None for other arguments."""
    if not hasattr(value, "data_ptr"):
        return None
    tensor = getattr(value, "tensor", value)
    nbytes = tensor.untyped_storage().nbytes() + tensor.untyped_storage().data_ptr()
    return value.dtype, nbytes - value.data_ptr()


def _address(value: Any) -> Any:
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def _memory(address: int, kind: Any) -> torch.Tensor:
    dtype, nbytes = kind
    assert isinstance(address, int)
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize)


class Planned:
    """The entry of a GPU's slot over host memory, for one key of one operator."""

    def __init__(self, operator: spec.OpSpec, key: str) -> None:
        self.server = dispatch.Server(Original(key, "CPU"), "cpu")
        self.slow: list[Any] = []
        self.entry = dispatch.planned_entry(self.server, self._slow)
        self.log: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry(*args, **kwargs)

    def _slow(self, *args: Any, **kwargs: Any) -> Any:
        self.slow.append((args, kwargs))
        return self.server.original.call(*args, **kwargs)

    @property
    def plans(self) -> dict[Any, Any]:
        return self.server.plans


class Devices:
    """Which device is the current one, and which have been made so."""

    def __init__(self) -> None:
        self.current, self.count, self.entered = 0, 1, []

    @contextmanager
    def device(self, device: Any):
        index = getattr(device, "index", device)
        self.entered.append(index)
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def devices(monkeypatch):
    found = Devices()
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.count)
    for name, value in (
        ("_cuda_getCurrentRawStream", lambda index: STREAM),
        ("_cuda_getDevice", lambda: found.current),
    ):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    return found


@pytest.fixture(params=[None, 5], ids=["flat", "nested"])
def planned(request, monkeypatch, devices):
    """`planned(operator, key)` gives a `Planned`; keys are on meanwhile, and nothing else is."""
    bound = type("Bound", (HostLaunch,), {"split": request.param, "log": []})
    monkeypatch.setattr(call, "BoundLaunch", bound)
    monkeypatch.setattr(call.Call, "run", lambda self: [b.launch_as_bound() for b in self.bound()])
    empty = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(plans, "_empty_strided", lambda: empty)
    before = gate.STATE.everywhere
    with spec.only():

        def make(operator: spec.OpSpec, key: str) -> Planned:
            if spec.find(key) is not operator:
                spec.add(operator)
            gate.STATE.everywhere |= {key}
            found = Planned(operator, key)
            found.log = bound.log
            return found

        yield make
    gate.STATE.everywhere = before


def add_scaled(call: call.Call, self: Any, other: Any, *, alpha: Any = 1) -> None:
    """self + alpha * other, of two contiguous tensors of one shape and dtype."""
    if self.shape != other.shape or self.dtype != other.dtype:
        call.decline("operands of two kinds")
    out = call.result(self.shape, self.dtype)
    args = {"x_ptr": self, "y_ptr": other, "out_ptr": out, "size": self.numel(), "scale": alpha}
    blocks = -(-self.numel() // BLOCK)
    call.launch(add_scaled_kernel, blocks, {**args, "BLOCK": BLOCK})


ADD_KEYS = ("add.Tensor", "add_.Tensor", "add.out")
ADD = spec.OpSpec("add", ADD_KEYS, compute=add_scaled)
