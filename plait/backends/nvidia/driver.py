"""Copies and events on raw streams, through the CUDA driver's own Python bindings.

`cuda.bindings` comes with CUDA builds of torch. A call costs the host 0.5 us above what the driver
itself needs, where `copy_` costs about 4 us and an event through torch as much again. Without the
module `find_driver` gives None, and programs run through torch (`CudaExecutor.run`).

Handles that are made once (`pointer`, `lane`, `event`) are cheaper to pass than integers.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch

_MAX_LANES = 256  # streams that callers bring; torch's own pools hold far fewer


class Lane(NamedTuple):
    """One stream, as Triton's launcher takes it and as the driver's bindings do."""

    raw: int
    handle: Any


class Driver:
    """What prepared programs need. `copy`, `copy_rows`, `record` and `wait` return `(error,)`.

    `copy(dst, src, num_bytes, handle)`, `copy_rows(box, handle)`, `record(event, handle)` and
    `wait(handle, event, 0)` are the bindings' own functions: give an error to `raise_for`. All
    belong to the current device.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.copy = bindings.cuMemcpyAsync
        self.copy_rows = bindings.cuMemcpy2DAsync
        self.record = bindings.cuEventRecord
        self.wait = bindings.cuStreamWaitEvent
        self._lanes: dict[int, Lane] = {}
        self._thread = threading.local()

    def enter_thread(self, device_index: int) -> None:
        """Before a thread's first call: the driver, unlike torch, chooses no context by itself."""
        if getattr(self._thread, "entered", False):
            return
        cu = self._bindings
        error, context = cu.cuCtxGetCurrent()
        self.raise_for(error, "cuCtxGetCurrent")
        if not int(context):
            error, context = cu.cuDevicePrimaryCtxRetain(device_index)
            self.raise_for(error, "cuDevicePrimaryCtxRetain")
            self.raise_for(cu.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")
        self._thread.entered = True

    def lane(self, raw: int) -> Lane:
        """The stream of this handle (0: the default stream); remembered, bounded."""
        lane = self._lanes.get(raw)
        if lane is None:
            if len(self._lanes) >= _MAX_LANES:
                self._lanes.clear()
            lane = self._lanes[raw] = Lane(raw, self._bindings.CUstream(raw))
        return lane

    def new_stream(self, device_index: int) -> int:
        """The handle of a new stream that does not wait for the default stream; never destroyed."""
        self.enter_thread(device_index)
        cu = self._bindings
        error, _, greatest = cu.cuCtxGetStreamPriorityRange()
        self.raise_for(error, "cuCtxGetStreamPriorityRange")
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        error, stream = cu.cuStreamCreateWithPriority(int(flags), greatest)
        self.raise_for(error, "cuStreamCreateWithPriority")
        return int(stream)

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Whether copies by address run on a stream: not from host memory that is not pinned."""
        return tensor.device.type != "cpu" or tensor.is_pinned()

    def pointer(self, address: int) -> Any:
        """An address that does not change."""
        return self._bindings.CUdeviceptr(address)

    def event(self, owner: object) -> Any:
        """An event without timing, destroyed with `owner`."""
        flags = self._bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING
        error, event = self._bindings.cuEventCreate(int(flags))
        self.raise_for(error, "cuEventCreate")
        end = weakref.finalize(owner, self._bindings.cuEventDestroy, event)
        end.atexit = False  # the context may be gone by then, and takes its events along
        return event

    def box(self, dst_pitch: int, src_pitch: int, width: int, height: int) -> Any:
        """`height` rows of `width` bytes, each row a pitch after the last; see `place`."""
        kind = self._bindings.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        box = self._bindings.CUDA_MEMCPY2D()
        box.srcXInBytes = box.srcY = box.dstXInBytes = box.dstY = 0
        box.srcMemoryType = box.dstMemoryType = kind
        box.srcPitch, box.dstPitch = src_pitch, dst_pitch
        box.WidthInBytes, box.Height = width, height
        return box

    def place(self, box: Any, dst: Any, src: Any) -> None:
        """Give a box its addresses (integers or pointers)."""
        box.dstDevice, box.srcDevice = dst, src

    def raise_for(self, error: Any, function: str) -> None:
        """RuntimeError unless `error` is success, as torch raises for CUDA's errors."""
        if int(error):
            raise RuntimeError(f"CUDA driver: {function} failed with {error!r}")


@cache
def find_driver() -> Driver | None:
    """The driver, or None where `cuda.bindings` is not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found]
    except ImportError:
        return None
    return Driver(driver)


__all__ = ["Driver", "Lane", "find_driver"]
