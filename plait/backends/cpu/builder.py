"""The builder under virtual ranks and CPU operators: Triton's interpreter builder with hooks.

It tells the device of every load, store, atomic, barrier and fence; gives meaning to the inline
assembly that plait's kernels use; and computes bf16 correctly, which Triton's interpreter does not.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from plait.backends.cpu.lang_proxy import Binder, Rewrite, install_tensor_methods
from plait.backends.cpu.site import Site
from plait.backends.nvidia.intrinsics import (
    FENCE_PROXY_ASYNC,
    GLOBALTIMER,
    GRID_LAUNCH_DEPENDENTS,
    GRID_WAIT,
    NANOSLEEP,
    SMID,
)

_TORCH_DTYPE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_FLOPS_PER_NS = 5300.0  # one SM of an H200 class GPU in bf16; only shapes the virtual timeline


_TORCH_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def _as_float32(handle: TensorHandle) -> np.ndarray:
    """bf16 is held as uint16, the upper half of a float32; fp8 as uint8. Others as they are."""
    name = str(handle.dtype.scalar.name)
    if name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    if name in _TORCH_FP8:
        bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8))
        return bits.view(_TORCH_FP8[name]).to(torch.float32).numpy()
    return handle.data


def _convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Round as torch does (nearest even, NaN kept); bf16 in and out as uint16 bits."""
    data = np.ascontiguousarray(data)
    tensor = torch.from_numpy(data.view(np.int16) if source.name == "bf16" else data)
    if source.name == "bf16":
        tensor = tensor.view(torch.bfloat16)
    out = tensor.to(_TORCH_DTYPE[target.name])
    if target.name == "bf16":
        return out.view(torch.int16).numpy().view(np.uint16)
    return out.numpy()


class VirtualBuilder(InterpreterBuilder):
    """`device` is told what the running block does; the running block is `device.block`."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        # The checks of int32 overflow take 40 % of the time, and epochs are meant to wrap.
        self.options = dataclasses.replace(self.options, sanitize_overflow=False)
        self.device = device
        self._descriptor_access = False

    # --- memory
    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._access(ptrs, mask, write=False)
        return super().create_masked_load(ptrs, mask, other, *args, **kwargs)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        addresses = self._access(ptrs, mask, write=True)
        result = super().create_masked_store(ptrs, value, mask, *args, **kwargs)
        self.device.stored(addresses)
        return result

    def create_descriptor_load(self, *args: Any, **kwargs: Any) -> Any:
        self._descriptor_access = True
        try:
            return super().create_descriptor_load(*args, **kwargs)
        finally:
            self._descriptor_access = False

    def create_descriptor_store(self, *args: Any, **kwargs: Any) -> Any:
        self._descriptor_access = True
        try:
            return super().create_descriptor_store(*args, **kwargs)
        finally:
            self._descriptor_access = False

    def _access(self, ptrs: Any, mask: Any, *, write: bool) -> np.ndarray:
        lanes = mask if isinstance(mask, np.ndarray) else mask.data
        addresses = ptrs.data[lanes] if lanes.shape == ptrs.data.shape else ptrs.data.ravel()
        if addresses.size:
            bits = ptrs.get_element_ty().primitive_bitwidth
            self.device.accessed(
                addresses.ravel(),
                max(1, bits // 8),
                write=write,
                async_proxy=self._descriptor_access,
                site=self.site(),
            )
        return addresses

    def site(self) -> Site:
        """The innermost line of a kernel's own source that is running."""
        files = self.device.binder.files
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in files:
                return Site(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return Site("?", 0)

    # --- atomics and ordering
    def create_atomic_rmw(
        self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any, *args: Any
    ) -> Any:
        parent = super().create_atomic_rmw

        def run() -> Any:
            return parent(op, ptr, val, mask, sem, scope, *args)

        poll = str(op).endswith(".ADD") and not np.any(val.data)
        if ptr.data.size != 1:
            lanes = np.flatnonzero(mask.data)
            words = lanes.size and self.device.is_signal_word(int(ptr.data.reshape(-1)[lanes[0]]))
            if _name(sem) == "relaxed" and not words:
                return run()  # sums of a whole tile: nobody waits for them

            def lane_of(handle: Any, lane: int) -> Any:
                return TensorHandle(handle.data.reshape(-1)[lane : lane + 1], handle.dtype)

            def run_lane(lane: int) -> Any:
                one = [lane_of(each, lane) for each in (ptr, val, mask)]
                return parent(op, one[0], one[1], one[2], sem, scope, *args)

            return self._each_lane(ptr, val, mask, run_lane, _name(sem), _name(scope), poll)
        return self.device.atomic(
            int(ptr.data.reshape(-1)[0]), run, _name(sem), _name(scope), poll, self.site()
        )

    def _each_lane(
        self, ptr: Any, val: Any, mask: Any, run: Any, sem: str, scope: str, poll: bool
    ) -> Any:
        """An atomic of several addresses: one of each lane's, others running between them."""
        result = np.zeros_like(val.data)
        for lane in np.flatnonzero(mask.data):
            address = int(ptr.data.reshape(-1)[lane])
            seen = self.device.atomic(
                address, lambda lane=lane: run(lane), sem, scope, poll, self.site(), vector=True
            )
            result.reshape(-1)[lane] = seen.data.reshape(-1)[0]
        return TensorHandle(result, val.dtype.scalar)

    def create_atomic_cas(
        self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any, *args: Any
    ) -> Any:
        parent = super().create_atomic_cas

        def run() -> Any:
            return parent(ptr, cmp, val, sem, scope, *args)

        return self.device.atomic(
            int(ptr.data.reshape(-1)[0]), run, _name(sem), _name(scope), False, self.site()
        )

    def create_barrier(self, *args: Any, **kwargs: Any) -> None:
        self.device.cta_barrier()

    def create_inline_asm(
        self, asm: str, constraints: Any, values: Any, types: Any, *args: Any
    ) -> Any:
        if asm == FENCE_PROXY_ASYNC:
            self.device.proxy_fence()
            return _AsmResult(TensorHandle(np.zeros(1, np.int32), tl.int32))
        if asm == GLOBALTIMER:
            return _AsmResult(TensorHandle(np.array([self.device.now_ns], np.int64), tl.int64))
        if asm == SMID:  # every block has an SM of its own
            assert self.device.actor is not None
            index = self.device.actor.block.index
            return _AsmResult(TensorHandle(np.array([index], np.int32), tl.int32))
        if asm in (GRID_WAIT, GRID_LAUNCH_DEPENDENTS):  # a stream's kernels run one after the other
            return _AsmResult(TensorHandle(np.zeros(1, np.int32), tl.int32))
        if asm == NANOSLEEP:
            self.device.spend_ns(100)
            return _AsmResult(TensorHandle(np.zeros(1, np.int32), tl.int32))
        raise NotImplementedError(f"no virtual effect is known for the inline assembly {asm!r}")

    # --- arithmetic that Triton's interpreter gets wrong
    def create_dot(self, a: Any, b: Any, d: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = _as_float32(a), _as_float32(b)
        if left.dtype == np.float16:
            left, right = left.astype(np.float32), right.astype(np.float32)
        elif left.dtype == np.int8:
            left, right = left.astype(np.int32), right.astype(np.int32)
        self.device.spend_ns(2 * left.shape[0] * left.shape[1] * right.shape[1] / _FLOPS_PER_NS)
        product = torch.from_numpy(np.ascontiguousarray(left)) @ torch.from_numpy(
            np.ascontiguousarray(right)
        )
        return TensorHandle(product.numpy().astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if (
            source.name != target.name
            and source.name in _TORCH_DTYPE
            and target.name in _TORCH_DTYPE
        ):
            return TensorHandle(_convert(src.data, source, target), target)
        if source.name in _TORCH_FP8 and source.name != target.name:
            return self.cast_impl(TensorHandle(_as_float32(src), tl.float32), dst_type)
        if "bf16" in (source.name, target.name) and source.name != target.name:
            if source.name == "bf16":
                return super().cast_impl(TensorHandle(_as_float32(src), tl.float32), dst_type)
            return self.cast_impl(super().cast_impl(src, tl.float32), dst_type)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        names = (src.dtype.scalar.name, dst_type.scalar.name)
        if names[0] in _TORCH_FP8 or ("bf16" in names and set(names) <= set(_TORCH_DTYPE)):
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar.name != "bf16":
            return super().binary_op(lhs, rhs, op)
        out = op(_as_float32(lhs), _as_float32(rhs))
        if out.dtype == np.bool_:
            return TensorHandle(out, tl.int1)
        return TensorHandle(_convert(out, tl.float32, tl.bfloat16), tl.bfloat16)

    def unary_op(self, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar.name != "bf16":
            return super().unary_op(arg, op)
        return TensorHandle(_convert(op(_as_float32(arg)), tl.float32, tl.bfloat16), tl.bfloat16)

    def create_erf(self, arg: Any) -> Any:
        data = torch.erf(torch.from_numpy(np.ascontiguousarray(arg.data)))
        return TensorHandle(data.numpy(), arg.dtype.scalar)


class _AsmResult:
    """What `create_inline_asm` gives back to Triton's semantic layer."""

    def __init__(self, handle: TensorHandle) -> None:
        self.handle = handle

    def get_result(self, index: int) -> TensorHandle:
        return self.handle


def _name(enum: Any) -> str:
    name = str(enum).rsplit(".", maxsplit=1)[-1].lower()
    return "sys" if name == "system" else name


def make_binder(device: Any, rewrite: Rewrite | None) -> Binder:
    """The binder of one world; also points `tl.tensor`'s methods at its semantic."""
    semantic = TritonSemantic(VirtualBuilder(device))
    install_tensor_methods(semantic)
    return Binder(semantic, rewrite)


__all__ = ["VirtualBuilder", "make_binder"]
