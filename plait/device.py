"""What plait knows about a device; the only place that probes hardware."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from plait.errors import DeviceError
from plait.settings import settings

# The interpreter has no shared memory of its own. It reports what sm90 offers a block, so that a
# tile choice that is valid for virtual ranks on the CPU is one that a GPU would accept as well.
_INTERPRETER_SHARED_MEMORY_BYTES = 232_448


@dataclass(frozen=True)
class DeviceInfo:
    """Facts that plans and configs depend on. `arch` is `sm90`-like, never a product name."""

    kind: Literal["cpu", "cuda"]
    vendor: Literal["cpu", "nvidia", "amd"]
    arch: str
    num_sms: int  # on the CPU: blocks per kernel of one virtual rank
    shared_memory_bytes: int  # the most that one block may use
    name: str


def device_info(device: torch.device | str) -> DeviceInfo:
    """The facts of `device`. GPUs are probed once; the CPU follows `settings().cpu_blocks`.

    Raises `DeviceError` for a device type that plait has no backend for.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return DeviceInfo(
            kind="cpu",
            vendor="cpu",
            arch="cpu",
            num_sms=settings().cpu_blocks,
            shared_memory_bytes=_INTERPRETER_SHARED_MEMORY_BYTES,
            name="CPU (Triton interpreter)",
        )
    if device.type != "cuda":
        raise DeviceError(
            "device", "a cpu or cuda device", device, "Move the tensors to one of these."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _probe_gpu(index)


@cache
def _probe_gpu(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    if is_amd:
        arch = properties.gcnArchName.split(":")[0]
        shared_memory_bytes = properties.shared_memory_per_block
    else:
        arch = f"sm{properties.major}{properties.minor}"
        shared_memory_bytes = properties.shared_memory_per_block_optin
    return DeviceInfo(
        kind="cuda",
        vendor="amd" if is_amd else "nvidia",
        arch=arch,
        num_sms=properties.multi_processor_count,
        shared_memory_bytes=shared_memory_bytes,
        name=properties.name,
    )


__all__ = ["DeviceInfo", "device_info"]
