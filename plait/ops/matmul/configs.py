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

# All blocks of an SM together: half of its registers hold accumulators at the most.
_ACC_REGISTERS_PER_SM = 32_768

# `tl.dot` takes no shorter step of K than 16 elements, and 32 of 8 bits.
_LEAST_BLOCK = 16
_LEAST_K_BYTES = 32
_LARGEST_BLOCK = 256

# Shared memory that the hardware keeps for itself beside each block.
RESERVED_SHARED_BYTES = 1024

# What a waiting kernel leaves free of an SM where copies are kernels (see occupancy.py). So many
# registers may be accumulators then: what else its block holds takes up to twice as many.
ROOM_REGISTERS = 16_384
ROOM_SHARED_BYTES = 8_192
_ACC_REGISTERS_BESIDE_ROOM = 16_384

# Below this many tiles the last wave of a large GPU is mostly empty: take smaller tiles.
_TILES_TO_FILL = 132

# Splitting K pays only if each part is still long.
_MIN_SPLIT_K = 1024
_MIN_TAIL_K = 512
_SHORT_K = 1024  # up to here storing tiles takes a good part of the time


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
    split_tail: bool = False  # split only the tiles that do not fill a wave of all SMs
    desc_store: bool = False  # store through a descriptor where out allows it
    flatten: bool = False  # one loop over tiles and K: loads go on while a tile is stored


def finish_columns(config: Config, num_weights: int = 1) -> int:
    """Columns that a store through a descriptor writes at a time: the rule of `finish_tile`."""
    elements = num_weights * config.block_m * config.block_n
    pieces = 4 if elements > 128 * 128 else 2 if elements > 64 * 128 else 1
    return config.block_n // pieces


def shared_memory_bytes(config: Config, dtype: torch.dtype, num_weights: int = 1) -> int:
    """Shared memory of one block: the pipeline's operand tiles and its barriers."""
    elements = config.block_k * (config.block_m + num_weights * config.block_n)
    barriers = 16 * (num_weights + 1) if config.desc else 0
    staged = 0
    if config.desc_store:  # of 16-bit results; wider ones may leave no room for a second block
        staged = 2 * config.block_m * finish_columns(config, num_weights)
    if config.desc_store and config.flatten and dtype.itemsize == 1:
        staged += 128 * config.num_warps  # scales on their way into the layout of the tile
    if config.flatten:
        staged += 64  # words that a kernel polls, from one thread to all
    return config.num_stages * (elements * dtype.itemsize + barriers) + staged


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
    room_for_copies: bool = False,
) -> bool:
    """Whether the kernel can be compiled for `arch` with this config and keep to its registers.

    The one predicate of the heuristic, the tuner and the tests. `room_for_copies`: and whether an
    AG+GEMM or GEMM+RS kernel, which waits, leaves an SM room for the kernels of copies.
    """
    blocks = (config.block_m, config.block_n, config.block_k)
    if any(size < _LEAST_BLOCK or size > _LARGEST_BLOCK or size & (size - 1) for size in blocks):
        return False
    if config.block_k < least_block_k(dtype):
        return False
    if config.num_warps not in (4, 8) or config.num_stages < 1 or config.group_m < 1:
        return False
    if config.splits < 1 or config.blocks_per_sm < 1:
        return False
    if (config.desc or config.desc_store) and not has_descriptors(arch):
        return False
    room = ROOM_SHARED_BYTES if room_for_copies else 0
    if not _shared_memory_fits(config, dtype, arch, num_weights, room):
        return False
    if arch == "cpu":
        return True
    ieee = dtype is torch.float32 and precision == "ieee"
    if ieee and config.desc:
        return False  # without tensor cores the swizzled tiles are read element by element: spills
    threads = config.num_warps * _WARP_SIZE
    acc_registers = num_weights * config.block_m * config.block_n // threads
    together = acc_registers * threads * config.blocks_per_sm
    if together > (_ACC_REGISTERS_BESIDE_ROOM if room_for_copies else _ACC_REGISTERS_PER_SM):
        return False
    return acc_registers <= (_ACC_REGISTERS_IEEE if ieee else _ACC_REGISTERS)


def _shared_memory_fits(
    config: Config, dtype: torch.dtype, arch: str, num_weights: int, room: int = 0
) -> bool:
    """Whether the blocks that an SM is meant to hold, and one of `room`, fit its shared memory."""
    one = shared_memory_bytes(config, dtype, num_weights) + RESERVED_SHARED_BYTES
    room += RESERVED_SHARED_BYTES if room else 0
    return config.blocks_per_sm * one + room <= shared_memory_limit(arch) + RESERVED_SHARED_BYTES


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
    batch: int = 1,
) -> Config:
    """The config for out [M, N] = x [M, K] @ weight [N, K]^T without tuning; always valid.

    `batch`: so many products at once.
    """
    desc = descriptors_allowed and has_descriptors(arch)
    if arch == "cpu":
        # Every interpreted operation costs the same whatever its size: few large tiles.
        config = Config(32, 128, 128, 4, 1, 8, desc)
    elif dtype is torch.float32 and precision == "ieee":
        config = Config(64, 64 // num_weights, 32, 8, 3, 8, False)
    else:
        config = _tensor_core_config(
            M, N, K, dtype.itemsize, arch, desc, num_weights, max(batch, 1)
        )
    config = replace(
        config,
        block_m=min(config.block_m, smallest_block(M)),
        block_n=min(config.block_n, smallest_block(N)),
        block_k=min(config.block_k, max(smallest_block(K), least_block_k(dtype))),
    )
    while config.num_stages > 1 and not _shared_memory_fits(config, dtype, arch, num_weights):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _tensor_core_config(
    M: int,
    N: int,
    K: int,
    itemsize: int,
    arch: str,
    desc: bool,
    num_weights: int,
    batch: int,
) -> Config:
    """128 bytes of K a tile row, the widest swizzle of shared memory; twice that for few rows."""
    block_k = 128 // itemsize
    if not desc or num_weights == 2 or _compute_capability(arch) < 90:
        if M <= 64:
            return Config(64, 128 // num_weights, block_k, 4, 4, 8, desc)
        large = Config(128, 256 // num_weights, block_k, 8, 3, 8, desc)
        tiles = batch * -(-M // large.block_m) * -(-N // large.block_n)
        small = tiles < _TILES_TO_FILL or _compute_capability(arch) < 90
        return replace(large, block_n=128 // num_weights) if small else large
    if M <= 64:
        return _few_rows_config(M, N, K, block_k, batch)
    from plait.ops.matmul.waves import product_time_us

    stored = {"desc_store": True, "flatten": True}
    options = [
        (1.0, Config(128, 256, block_k, 8, 4, 8, True, **stored)),
        (0.98, Config(256, 128, block_k, 8, 4, 8, True, **stored)),
        (0.92, Config(128, 128, block_k, 4, 6, 8, True)),
    ]
    if itemsize > 1:  # fp8 sums in steps need more registers than two blocks have
        warps = 8 if K > _SHORT_K else 4
        options.append((0.94, Config(128, 128, block_k, warps, 3, 8, True, 1, 2, **stored)))
    timed = [
        (product_time_us(M, N, K, itemsize, config, rate, batch), config)
        for rate, option in options
        for config in _split_ways(option, K)
    ]
    return min(timed, key=lambda each: each[0])[1]


def _split_ways(config: Config, K: int) -> list[Config]:
    """Unsplit, split in the last wave only, or everywhere; where the parts stay long."""
    tails = [s for s in (2, 3, 4, 6) if K // s >= _MIN_TAIL_K]
    wholes = [s for s in (2, 4) if K // s >= _MIN_SPLIT_K]
    return [
        config,
        *(replace(config, splits=splits, split_tail=True) for splits in tails),
        *(replace(config, splits=splits) for splits in wholes),
    ]


def _few_rows_config(M: int, N: int, K: int, block_k: int, batch: int) -> Config:
    """Reading the weight takes the time: enough blocks to ask for it from everywhere at once."""
    wide = M > 16 and N > 4096
    config = Config(
        64 if M > 16 else 16, 128 if wide else 64, 2 * block_k, 4, 4, 8, True, 1, 1 if wide else 2
    )
    splits, tiles = 1, batch * -(-N // config.block_n)
    while tiles * splits < (90 if wide else 120) and K // (2 * splits) >= _MIN_SPLIT_K:
        splits *= 2
    return replace(config, splits=splits)


def least_block_k(dtype: torch.dtype) -> int:
    """The fewest elements of K in one step of `tl.dot`: 16, or 32 of fp8 and int8."""
    return max(_LEAST_BLOCK, _LEAST_K_BYTES // dtype.itemsize)


def smallest_block(size: int) -> int:
    """The smallest block, a power of two from 16 on, that covers `size`."""
    return max(_LEAST_BLOCK, 1 << max(size - 1, 0).bit_length())


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
    longer = min(2 * first.block_k, max(smallest_block(K), least_block_k(dtype)))
    block_ks = (first.block_k, longer)
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
    "RESERVED_SHARED_BYTES",
    "ROOM_REGISTERS",
    "ROOM_SHARED_BYTES",
    "Config",
    "candidates",
    "default_config",
    "finish_columns",
    "has_descriptors",
    "is_valid",
    "least_block_k",
    "shared_memory_bytes",
    "shared_memory_limit",
    "smallest_block",
]
