"""Launching a compiled Triton kernel again with other addresses, in few Python steps.

`BoundLaunch` compiles a `Launch` once and keeps its arguments in the order of Triton's own launcher
(`CompiledKernel.run`). A later call with tensors of the same shapes, strides, dtypes and alignment
replaces addresses only. Tensor descriptors are encoded once an address and kept, bounded. All that
depends on the Triton version is in this file, for 3.6 to 3.9; where Triton looks different, or
hooks (profilers) or scratch memory are in use, the ordinary launch is taken, which gives the same
result.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.backends.commands import Launch

_MAX_DESCRIPTORS = 4096
_STREAM = 3  # where the stream stands among the arguments of Triton's C launcher


class BoundLaunch:
    """One compiled kernel with its arguments; `run` launches it on the current stream.

    `raw(*arguments)` is the C launcher: `arguments` copied, with a stream's handle at `STREAM` and
    addresses at `slots`, launch without any further step. `raw` is None where only `run` works.
    `native` is the C launcher itself; where it takes the kernel's arguments as one tuple, that
    tuple begins at `split` of `arguments`, else `split` is None.
    """

    STREAM = _STREAM

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.compiled = launch.kernel.warmup(**launch.args, grid=(launch.grid,), **launch.options)
        self.compiled._init_handles()
        self._fast = _fast_launcher(self.compiled)
        self.raw: Any = None
        self.native: Any = None
        self.split: int | None = None
        self.arguments: list[Any] = []
        self.slots: dict[str, int] = {}
        self.encoders: dict[str, Callable[[int], Any]] = {}  # of descriptors, by address
        self._device = 0
        if self._fast is not None:
            self._device = torch.cuda.current_device()
            self._flatten(self._fast)
        self._stripped = False

    def _flatten(self, fast: _FastLauncher) -> None:
        """Arguments as the C launcher takes them, and where each tensor's address stands."""
        launch = self.launch
        self.raw, self.native, self.split = fast.raw, fast.native, fast.split
        self.arguments = flat = [launch.grid, 1, 1, None, *fast.middle]
        for name in launch.kernel.arg_names:
            value = _value_of(launch, name)
            if _is_descriptor(value):
                number, address = len(self.encoders), value.base.data_ptr()
                self.slots[name] = len(flat)
                flat.extend(fast.encode(value, number, address))
                self.encoders[name] = _encoder(fast, value, number)
            elif isinstance(value, torch.Tensor):
                self.slots[name] = len(flat)
                flat.append(value.data_ptr())
            else:
                flat.append(value)

    def launch_as_bound(self) -> None:
        """Launch with the first call's own arguments; the device is the current one."""
        launch = self.launch
        if self.raw is None or launches_are_watched():
            launch.kernel[(launch.grid,)](**launch.args, **launch.options)
            return
        arguments = self.arguments.copy()
        arguments[_STREAM] = torch._C._cuda_getCurrentRawStream(self._device)
        self.raw(*arguments)

    def run(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Launch with other tensors for the named arguments, laid out as those at first.

        For a descriptor, the tensor it describes. Every call names the same arguments.
        """
        if not self._stripped:
            self._strip(tensors)
        if self.raw is None or launches_are_watched():
            self._run_ordinarily(tensors)
            return
        arguments = self.arguments.copy()
        # The current stream of the device for which the kernel was loaded.
        arguments[_STREAM] = torch._C._cuda_getCurrentRawStream(self._device)
        slots, encoders = self.slots, self.encoders
        for name, tensor in tensors.items():
            address = tensor.data_ptr()
            encode = encoders.get(name)
            arguments[slots[name]] = address if encode is None else encode(address)
        self.raw(*arguments)

    def _strip(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let go of the first call's tensors that later calls bring anew.

        An argument nobody reads (a bias that is not there) often stands for one of those as well.
        """
        args = dict(self.launch.args)
        first: dict[int | None, str] = {_address(args[name]): name for name in tensors}
        first.pop(None, None)
        for name, value in args.items():
            stands_for = name if name in tensors else first.get(_address(value))
            if stands_for is not None:
                descriptor = _moved(value, None) if _is_descriptor(value) else None
                args[name] = _Moves(stands_for, descriptor)
        self.launch = dataclasses.replace(self.launch, args=args)
        self._stripped = True

    def _run_ordinarily(self, tensors: Mapping[str, torch.Tensor]) -> None:
        launch = self.launch
        args = dict(launch.args)
        for name, value in args.items():
            if isinstance(value, _Moves):
                tensor = tensors[value.name]
                known = value.descriptor
                args[name] = tensor if known is None else _moved(known, tensor)
        launch.kernel[(launch.grid,)](**args, **launch.options)


@dataclasses.dataclass(frozen=True)
class _Moves:
    """In place of a tensor (or a descriptor) that each call brings under `name`."""

    name: str
    descriptor: Any


def launches_are_watched() -> bool:
    """Whether somebody (a profiler) wants to hear of Triton's launches."""
    global _runtime_knobs
    if _runtime_knobs is None:
        from triton import knobs

        _runtime_knobs = knobs.runtime
    enter, leave = _runtime_knobs.launch_enter_hook, _runtime_knobs.launch_exit_hook
    # A chain of hooks may be empty.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_runtime_knobs: Any = None


def _encoder(fast: _FastLauncher, value: Any, number: int) -> Callable[[int], Any]:
    """From an address to the descriptor of the same layout there; remembered, bounded."""
    descriptor = _moved(value, None)  # the first tensor itself is not kept
    known: OrderedDict[int, Any] = OrderedDict()

    def encode(address: int) -> Any:
        encoded = known.get(address)
        if encoded is None:
            encoded = known[address] = fast.encode(descriptor, number, address)[0]
            if len(known) > _MAX_DESCRIPTORS:
                known.popitem(last=False)
        return encoded

    return encode


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


def _address(value: Any) -> int | None:
    tensor = value.base if _is_descriptor(value) else value
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None


# What Triton's launcher objects are called with, after the grid: it tells the two layouts apart.
_FLAT = ("stream", "function", "args")  # 3.6
_NESTED = (  # 3.7 to 3.9
    "stream",
    "function",
    "kernel_metadata",
    "launch_metadata",
    "launch_enter_hook",
    "launch_exit_hook",
    "args",
)


class _FastLauncher:
    """Triton's C launcher of one kernel.

    Triton 3.6 compiles one for every kernel, which takes the kernel's arguments one by one; later
    there is one for all, which takes them as a tuple after a description of them.
    """

    def __init__(self, compiled: Any, native: Any, descriptor_meta: list[Any]) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher = compiled.run
        self.native, self._meta = native, descriptor_meta
        self._make: Any = make_tensordesc_arg
        scratch = (None, None)
        packed = (compiled.packed_metadata, None, None, None)  # and no hooks
        start = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        if _layout(launcher) == _FLAT:
            self.middle = (*start, *scratch, *packed)
            self.split, self.raw = None, native
        else:
            described = (launcher.arg_annotations, launcher.kernel_signature)
            self.middle = (*start, *packed, *scratch, *described)
            self.split = split = _STREAM + 1 + len(self.middle)
            self.raw = lambda *arguments: native(*arguments[:split], arguments[split:])

    def encode(self, descriptor: Any, number: int, address: int) -> tuple[Any, ...]:
        """A descriptor's arguments at another address."""
        meta = self._meta[number] if self._meta else None
        moved = _moved(descriptor, _At(address))
        if self._make.__code__.co_argcount == 2:
            return tuple(self._make(moved, meta))
        return tuple(self._make(moved, meta, None))  # since 3.8; the third is for other vendors


class _At:
    """An address that passes for a tensor where only the address is asked for."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def build_launcher(compiled: Any) -> None:
    """Build the C launcher of a kernel that was compiled without a GPU, into Triton's cache.

    Where Triton has one launcher for all kernels, or there is no driver to link it with, there is
    nothing to do.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    if _parameters(CudaLauncher) == _FLAT and ctypes.util.find_library("cuda") is not None:
        CudaLauncher(compiled.src, compiled.metadata)


def _layout(launcher: Any) -> tuple[str, ...]:
    """What the launcher object is called with, after the grid."""
    return _parameters(type(launcher))


def _parameters(kind: type) -> tuple[str, ...]:
    call = vars(kind).get("__call__")
    if not inspect.isfunction(call):
        return ()
    names = tuple(inspect.signature(call).parameters)
    return names[4:] if names[:4] == ("self", "gridX", "gridY", "gridZ") else ()


def _fast_launcher(compiled: Any) -> _FastLauncher | None:
    """The C launcher, if this Triton is one of those known and the kernel needs no more."""
    launcher = compiled.run
    needed = ["launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size"]
    layout = _layout(launcher)
    if layout == _NESTED:
        needed += ["arg_annotations", "kernel_signature"]
    if layout not in (_FLAT, _NESTED) or not all(hasattr(launcher, name) for name in needed):
        return None
    # Scratch memory, and a sanitizer's further arguments, are allocated for every launch.
    more = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if any(getattr(launcher, name, 0) for name in more):
        return None
    native = launcher.launch
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    cells: dict[str, Any] = {}
    if getattr(native, "__closure__", None):  # Triton's wrapper that encodes descriptors
        cells = dict(zip(native.__code__.co_freevars, native.__closure__, strict=True))
    if "launcher" in cells:
        native = cells["launcher"].cell_contents
        meta = cells["tensordesc_meta"].cell_contents
    return _FastLauncher(compiled, native, list(meta or ()))


__all__ = ["BoundLaunch", "build_launcher", "launches_are_watched"]
