"""What an SM has left beside the resident blocks of a kernel: numbers of the cubin, no GPU.

A kernel that waits holds its SMs until its peers' data are there. Where those come by a kernel (a
copy within one GPU: virtual ranks, and processes that share a GPU and map each other's memory), it
must find room beside the waiting blocks, or nobody ever goes on. So AG+GEMM, GEMM+RS and GEMM+AR
need `leaves_room` there, or a grid that keeps some SMs free; large tiles, which take most of the
registers, always need the free SMs. Copies by copy engines, between GPUs or from the host, need
neither, and `plait.matmul`, which waits for nobody, never does.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ops.matmul.configs import (
    RESERVED_SHARED_BYTES,
    ROOM_REGISTERS,
    ROOM_SHARED_BYTES,
    Config,
    shared_memory_limit,
)

ROOM_THREADS = 256

_WARP_SIZE = 32
_REGISTERS = 65_536
_REGISTER_UNIT = 256  # registers are given to a warp in pieces of so many
_THREADS = {"sm86": 1536, "sm87": 1536, "sm89": 1536, "sm120": 1536}
_THREADS_OTHERWISE = 2048


@dataclass(frozen=True)
class Room:
    """Free registers, bytes of shared memory and threads of one SM; below 0 if they are missing."""

    registers: int
    shared_bytes: int
    threads: int


def room_left(config: Config, registers: int, shared_bytes: int, arch: str) -> Room:
    """What is free beside the `config.blocks_per_sm` blocks that an SM is meant to hold.

    `registers` are those of one thread and `shared_bytes` those of one block, as compiled for
    `arch`. Example: 8 warps of 200 registers leave 65,536 - 8 * 32 * 200 = 14,336 registers.
    """
    threads = config.num_warps * _WARP_SIZE
    of_warp = -(-registers * _WARP_SIZE // _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = config.blocks_per_sm
    of_sm = shared_memory_limit(arch) + RESERVED_SHARED_BYTES
    return Room(
        registers=_REGISTERS - blocks * config.num_warps * of_warp,
        shared_bytes=of_sm - blocks * (shared_bytes + RESERVED_SHARED_BYTES),
        threads=_THREADS.get(arch, _THREADS_OTHERWISE) - blocks * threads,
    )


def leaves_room(config: Config, registers: int, shared_bytes: int, arch: str) -> bool:
    """Whether `room_left` is enough for a block of a copy: 16 K registers, 8 KiB, 256 threads."""
    room = room_left(config, registers, shared_bytes, arch)
    return (
        room.registers >= ROOM_REGISTERS
        and room.shared_bytes >= ROOM_SHARED_BYTES + RESERVED_SHARED_BYTES
        and room.threads >= ROOM_THREADS
    )


__all__ = ["ROOM_THREADS", "Room", "leaves_room", "room_left"]
