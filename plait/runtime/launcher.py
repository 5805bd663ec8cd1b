"""Launching a compiled Triton kernel again with other addresses, in few Python steps.

`BoundLaunch` compiles a `Launch` once and keeps its arguments in the order of Triton's own launcher
(`CompiledKernel.run`). A later call with tensors of the same shapes, strides, dtypes and alignment
replaces addresses only. Tensor descriptors are encoded once an address and kept, bounded. All that
depends on the Triton version is in this file; where Triton looks different, or hooks (profilers) or
scratch memory are in use, the ordinary launch is taken, which gives the same result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from plait.backends.commands import Launch

_MAX_DESCRIPTORS = 4096


class BoundLaunch:
    """One compiled kernel with its arguments; `run` launches it on the current stream."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        self.compiled = launch.kernel.warmup(**launch.args, grid=(launch.grid,), **options)
        self.compiled._init_handles()
        self._names = list(launch.kernel.arg_names)
        self._values = [_value_of(launch, name) for name in self._names]
        self._fast = _fast_launcher(self.compiled)
        described = [n for n in self._names if _is_descriptor(launch.args.get(n))]
        self._numbers = {name: number for number, name in enumerate(described)}
        self._descriptors: dict[str, OrderedDict[int, Any]] = {n: OrderedDict() for n in described}
        self._flat, self._slots = self._flatten()

    def _flatten(self) -> tuple[list[Any], dict[str, int]]:
        """Arguments as the C launcher takes them, and where each tensor's address stands."""
        flat: list[Any] = []
        slots: dict[str, int] = {}
        if self._fast is None:
            return flat, slots
        for name, value in zip(self._names, self._values, strict=True):
            if _is_descriptor(value):
                slots[name] = len(flat)
                flat.extend(self._fast.encode(value, self._numbers[name], value.base.data_ptr()))
            elif isinstance(value, torch.Tensor):
                slots[name] = len(flat)
                flat.append(value.data_ptr())
            else:
                flat.append(value)
        return flat, slots

    def run(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Launch with other tensors for the named arguments, laid out as those at first.

        For a descriptor, the tensor it describes.
        """
        fast = self._fast
        if fast is None or fast.hooked():
            self._run_ordinarily(tensors)
            return
        flat = self._flat.copy()
        slots, descriptors = self._slots, self._descriptors
        for name, tensor in tensors.items():
            value = address = tensor.data_ptr()
            known = descriptors.get(name)
            if known is not None:
                value = known.get(address)
                if value is None:
                    value = self._encode(name, address)
            flat[slots[name]] = value
        fast.call(self.launch.grid, flat)

    def _run_ordinarily(self, tensors: Mapping[str, torch.Tensor]) -> None:
        launch = self.launch
        args = dict(launch.args)
        for name, tensor in tensors.items():
            args[name] = _moved(args[name], tensor) if name in self._numbers else tensor
        launch.kernel[(launch.grid,)](
            **args, num_warps=launch.num_warps, num_stages=launch.num_stages
        )

    def _encode(self, name: str, address: int) -> Any:
        assert self._fast is not None
        descriptor = self.launch.args[name]
        encoded = self._fast.encode(descriptor, self._numbers[name], address)[0]
        known = self._descriptors[name]
        known[address] = encoded
        if len(known) > _MAX_DESCRIPTORS:
            known.popitem(last=False)
        return encoded


def _moved(descriptor: Any, base: Any) -> Any:
    """The same descriptor over other memory of the same layout."""
    kind: Any = type(descriptor)
    other = kind.__new__(kind)
    other.__dict__.update(descriptor.__dict__)
    other.base = base
    return other


def _value_of(launch: Launch, name: str) -> Any:
    if name in launch.args:
        return launch.args[name]
    return launch.kernel.signature.parameters[name].default


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape") and hasattr(value, "base")


class _FastLauncher:
    """Triton 3.6's C launcher of one kernel."""

    def __init__(self, compiled: Any, raw: Any, descriptor_meta: list[Any]) -> None:
        from triton import knobs
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher = compiled.run
        self._raw, self._meta, self._make = raw, descriptor_meta, make_tensordesc_arg
        self._runtime = knobs.runtime
        self._device = torch.cuda.current_device()
        self._function = compiled.function
        self._middle = (
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )

    def hooked(self) -> bool:
        """Whether somebody wants to hear of launches."""
        hooks = (self._runtime.launch_enter_hook, self._runtime.launch_exit_hook)
        return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain may be empty

    def encode(self, descriptor: Any, number: int, address: int) -> tuple[Any, ...]:
        """A descriptor's arguments at another address."""
        return tuple(self._make(_moved(descriptor, _At(address)), self._meta[number]))

    def call(self, grid: int, flat: list[Any]) -> None:
        """Launch on the current stream of the device for which the kernel was loaded."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._raw(grid, 1, 1, stream, self._function, *self._middle, *flat)


class _At:
    """An address that passes for a tensor where only the address is asked for."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _fast_launcher(compiled: Any) -> _FastLauncher | None:
    """The C launcher, if this Triton is built as 3.6 is and the kernel needs no scratch memory."""
    launcher = compiled.run
    needed = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size")
    if not all(hasattr(launcher, name) for name in needed):
        return None
    if launcher.global_scratch_size or getattr(launcher, "profile_scratch_size", 0):
        return None
    raw = launcher.launch
    meta = getattr(compiled.metadata, "tensordesc_meta", None) or []
    cells: dict[str, Any] = {}
    if getattr(raw, "__closure__", None):  # Triton's wrapper that encodes descriptors
        cells = dict(zip(raw.__code__.co_freevars, raw.__closure__, strict=True))
    if "launcher" in cells:
        raw = cells["launcher"].cell_contents
        meta = cells["tensordesc_meta"].cell_contents
    return _FastLauncher(compiled, raw, list(meta))


__all__ = ["BoundLaunch"]
