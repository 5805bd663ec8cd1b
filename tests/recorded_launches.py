"""The launches that operators of plait record for a GPU, gathered on a machine without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from plait.backends.commands import Launch
from plait.device import DeviceInfo
from plait.ops.aten import dispatch, spec
from plait.ops.engine.call import Call, Given

H200 = DeviceInfo("cuda", "nvidia", "sm90", 132, 232_448, "NVIDIA H200")


class GpuCall(Call):
    """A call that takes its CPU operands for a GPU's; nothing runs, and all results are 0."""

    def __init__(self, device: torch.device, given: Given | None = None) -> None:
        super().__init__(torch.device(H200.kind, 0), given)

    @property
    def info(self) -> DeviceInfo:
        return H200

    def run(self) -> None:
        pass

    def _new(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None
    ) -> torch.Tensor:
        made = torch.empty(0, dtype=dtype)
        if strides is None:
            return made.new_zeros(tuple(shape))
        return made.new_empty_strided(tuple(shape), tuple(strides)).zero_()


@contextmanager
def recorded(*, by_aten: bool) -> Iterator[dict[str, list[Launch]]]:
    """A block in which operators record their launches as on an H200: lists by operator's name.

    Results are ATen's if `by_aten`, which takes its time, else 0.
    """
    found: dict[str, list[Launch]] = {}
    compute = dispatch.compute

    def record(operator: spec.OpSpec, schema: Any, named: dict[str, Any]) -> tuple[Any, str]:
        call, reason = compute(operator, schema, named)
        if call is not None:
            found.setdefault(operator.name, []).extend(step.launch for step in call.steps)
        return (None, reason or "recorded only") if by_aten else (call, reason)

    with mock.patch.multiple(dispatch, compute=record, Call=GpuCall):
        yield found


__all__ = ["H200", "GpuCall", "recorded"]
