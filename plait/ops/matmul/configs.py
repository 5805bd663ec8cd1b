"""Tile choices of the GEMM kernels: a frozen `Config`, one validity predicate, one default.

Pure functions of the problem: no GPU, no Triton. `arch` is `DeviceInfo.arch`, "cpu" being the
interpreter of virtual ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

_WARP_SIZE = 32

# Shared memory one block may use. The interpreter has none of its own: a tile that runs there
# should also fit a GPU.
_SHARED_BYTES = {"sm80": 166_912, "sm86": 101_376, "sm87": 166_912, "sm89": 101_376}
_SHARED_BYTES_SM90_ON = 232_448
_SHARED_BYTES_UNKNOWN = 65_536

# Accumulator registers a thread may hold: 128 leave room for addresses and the epilogue (compiled
# for sm90 nothing spills). Without tensor cores the operands live in registers too.
_ACC_REGISTERS = 128
_ACC_REGISTERS_IEEE = 32

# Below this many tiles the last wave of a large GPU is mostly empty: take smaller tiles.
_TILES_TO_FILL = 132

# Splitting K pays only if each part is still long; rates of one H200 in bf16, for choosing only.
_MIN_SPLIT_K = 1024
_FLOPS_PER_SM_US = 5.3e6
_BYTES_PER_US = 3.5e6


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements; `group_m` rows of tiles share L2; `desc`: load by descriptors."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    desc: bool
    splits: int = 1
    blocks_per_sm: int = 1


def shared_memory_bytes(config: Config, dtype: torch.dtype, num_weights: int = 1) -> int:
    """Shared memory of one block: the pipeline's operand tiles and its barriers."""
    elements = config.block_k * (config.block_m + num_weights * config.block_n)
    barriers = 16 * (num_weights + 1) if config.desc else 0
    return config.num_stages * (elements * dtype.itemsize + barriers)


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory one block may use on `arch`."""
    if arch == "cpu" or _compute_capability(arch) >= 90:
        return _SHARED_BYTES_SM90_ON
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_UNKNOWN)


def has_descriptors(arch: str) -> bool:
    """Whether kernels on `arch` can read through tensor descriptors."""
    return arch == "cpu" or _compute_capability(arch) >= 90


def _compute_capability(arch: str) -> int:
    return int(arch[2:]) if arch.startswith("sm") and arch[2:].isdigit() else 0


def is_valid(
    config: Config,
    dtype: torch.dtype,
    arch: str,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
) -> bool:
    """Whether the kernel can be compiled for `arch` with this config and keep to its registers.

    The one predicate of the heuristic, the tuner and the tests.
    """
    blocks = (config.block_m, config.block_n, config.block_k)
    if any(size < 16 or size > 256 or size & (size - 1) for size in blocks):
        return False
    if config.num_warps not in (4, 8) or config.num_stages < 1 or config.group_m < 1:
        return False
    if config.splits < 1 or config.blocks_per_sm < 1:
        return False
    if config.desc and not has_descriptors(arch):
        return False
    needed = shared_memory_bytes(config, dtype, num_weights) * config.blocks_per_sm
    if needed > shared_memory_limit(arch):
        return False
    if arch == "cpu":
        return True
    ieee = dtype is torch.float32 and precision == "ieee"
    if ieee and config.desc:
        return False  # without tensor cores the swizzled tiles are read element by element: spills
    threads = config.num_warps * _WARP_SIZE
    acc_registers = num_weights * config.block_m * config.block_n // threads
    return acc_registers <= (_ACC_REGISTERS_IEEE if ieee else _ACC_REGISTERS)


def default_config(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    arch: str,
    descriptors_allowed: bool,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
) -> Config:
    """The config for out [M, N] = x [M, K] @ weight [N, K]^T without tuning; always valid."""
    desc = descriptors_allowed and has_descriptors(arch)
    if arch == "cpu":
        # Every interpreted operation costs the same whatever its size: few large tiles.
        config = Config(32, 128, 128, 4, 1, 8, desc)
    elif dtype is torch.float32 and precision == "ieee":
        config = Config(64, 64 // num_weights, 32, 8, 3, 8, False)
    else:
        config = _tensor_core_config(M, N, K, dtype.itemsize, arch, desc, num_weights)
    config = replace(
        config,
        block_m=min(config.block_m, smallest_block(M)),
        block_n=min(config.block_n, smallest_block(N)),
        block_k=min(config.block_k, smallest_block(K)),
    )
    room = shared_memory_limit(arch) // config.blocks_per_sm
    while config.num_stages > 1 and shared_memory_bytes(config, dtype, num_weights) > room:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _tensor_core_config(
    M: int, N: int, K: int, itemsize: int, arch: str, desc: bool, num_weights: int
) -> Config:
    """128 bytes of K a tile row, the widest swizzle of shared memory; twice that for few rows."""
    block_k = 128 // itemsize
    if not desc or num_weights == 2 or _compute_capability(arch) < 90:
        if M <= 64:
            return Config(64, 128 // num_weights, block_k, 4, 4, 8, desc)
        large = Config(128, 256 // num_weights, block_k, 8, 3, 8, desc)
        tiles = -(-M // large.block_m) * -(-N // large.block_n)
        small = tiles < _TILES_TO_FILL or _compute_capability(arch) < 90
        return replace(large, block_n=128 // num_weights) if small else large
    if M <= 64:
        return _few_rows_config(M, N, K, block_k)
    options = [
        (1.0, Config(128, 256, block_k, 8, 3, 8, True)),
        (0.98, Config(256, 128, block_k, 8, 4, 8, True)),
        (0.95, Config(128, 128, block_k, 4, 6, 8, True)),
    ]
    timed = [
        (
            _time_us(M, N, K // splits, itemsize, rate, config, splits),
            replace(config, splits=splits),
        )
        for rate, config in options
        for splits in (1, 2, 4)
        if splits == 1 or K // splits >= _MIN_SPLIT_K
    ]
    return min(timed, key=lambda each: each[0])[1]


def _few_rows_config(M: int, N: int, K: int, block_k: int) -> Config:
    """Reading the weight takes the time: enough blocks to ask for it from everywhere at once."""
    wide = M > 16 and N > 4096
    config = Config(
        64 if M > 16 else 16, 128 if wide else 64, 2 * block_k, 4, 4, 8, True, 1, 1 if wide else 2
    )
    splits, tiles = 1, -(-N // config.block_n)
    while tiles * splits < (90 if wide else 120) and K // (2 * splits) >= _MIN_SPLIT_K:
        splits *= 2
    return replace(config, splits=splits)


def _time_us(
    M: int, N: int, split_k: int, itemsize: int, rate: float, config: Config, splits: int
) -> float:
    """Rough time on a large GPU: waves of tiles, and the traffic of split sums."""
    tiles = -(-M // config.block_m) * -(-N // config.block_n) * splits
    waves = -(-tiles // _TILES_TO_FILL)
    tile_us = (
        2 * config.block_m * config.block_n * split_k / (rate * _FLOPS_PER_SM_US * 2 / itemsize)
    )
    if splits == 1:
        return waves * tile_us
    return 1.05 * waves * tile_us + 4.0 + 8.0 * splits * M * N / _BYTES_PER_US


def smallest_block(size: int) -> int:
    """The smallest block, a power of two from 16 on, that covers `size`."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def candidates(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    arch: str,
    descriptors_allowed: bool,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
) -> list[Config]:
    """Valid configs worth measuring, without duplicates, `default_config` first."""
    first = default_config(
        M, N, K, dtype, arch, descriptors_allowed, num_weights=num_weights, precision=precision
    )
    descs = (True, False) if descriptors_allowed else (False,)
    block_ks = (first.block_k, min(2 * first.block_k, smallest_block(K)))
    found = [first]
    for block_m, block_n, block_k, warps, stages, group_m, desc in product(
        (64, 128, 256), (64, 128, 256), block_ks, (4, 8), (2, 3, 4), (4, 8, 16), descs
    ):
        config = Config(block_m, block_n, block_k, warps, stages, group_m, desc)
        covers = block_m <= max(64, smallest_block(M)) and block_n <= max(64, smallest_block(N))
        valid = is_valid(config, dtype, arch, num_weights=num_weights, precision=precision)
        if covers and valid and config not in found:
            found.append(config)
    return found


__all__ = [
    "Config",
    "candidates",
    "default_config",
    "has_descriptors",
    "is_valid",
    "shared_memory_bytes",
    "shared_memory_limit",
    "smallest_block",
]
