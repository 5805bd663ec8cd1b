"""Tensors of batch norm as (samples, channels, spatial), and the tiles that blocks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from plait.ops.engine.call import Call
from plait.ops.norm.layer_norm_layout import Matrix, matrix, unit_of
from plait.ops.norm.rows import next_power_of_2

_TILE, _INTERPRETED_TILE = 4096, 1 << 16
_LONGEST = 8192  # elements of a channel that one block keeps in registers


@dataclass(frozen=True)
class Channels:
    """Tensors of one shape.

    Attributes:
        steps: stride of the channel dim in each tensor.
        inner: samples as rows and space as elements of a row.
        beside: channels lie side by side in the first tensor.
        unit: what divides the strides of samples and, if `beside`, the number of channels, else
            `space` and the strides of channels; passed in this unit (see `Matrix.unit`).
    """

    num_channels: int
    steps: tuple[int, ...]
    inner: Matrix
    beside: bool
    unit: int

    @property
    def units(self) -> tuple[int, int]:
        """Of the number of channels, and of space."""
        return (self.unit, 1) if self.beside else (1, self.unit)

    def sizes(self) -> dict[str, int]:
        """Launch arguments `samples`, `num_channels`, `space`, `c1`."""
        return {
            "samples": self.inner.num_rows,
            "num_channels": self.num_channels // self.units[0],
            "space": self.inner.size // self.units[1],
            "c1": self.inner.columns[-1][0],
        }

    def constants(self) -> dict[str, int | bool]:
        """Compile-time launch arguments COLUMN_DIMS, WIDE, CHANNEL_UNIT, SPACE_UNIT."""
        return {
            "COLUMN_DIMS": len(self.inner.columns),
            "WIDE": self.inner.wide,
            "CHANNEL_UNIT": self.units[0],
            "SPACE_UNIT": self.units[1],
        }

    def places(self, name: str, index: int) -> dict[str, int]:
        """Launch arguments `{name}_sc`, `_sn`, `_s0`, `_s1`: strides of tensor `index`."""
        found = self.inner.places(name, index)
        return {
            f"{name}_sc": self.steps[index] // self.units[1],
            f"{name}_sn": found[f"{name}_r2"] // self.unit,
            f"{name}_s0": found[f"{name}_c0"],
            f"{name}_s1": found[f"{name}_c1"],
        }


def channels_of(
    call: Call, shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> Channels:  # fmt: skip
    """Tensors of (N, C, ...) with these strides; declines what the kernels have no indices for."""
    rest = (shape[0], *shape[2:])
    others = [(s[0], *s[2:]) for s in strides]
    inner = matrix(rest, len(rest), others)
    if inner is not None and len(inner.columns) == 1:
        # All of it is one dim: of samples if its stride is large, of space if it is 1.
        if inner.columns[0][1][0] != 1:
            inner = matrix((inner.size,), 0, [(n,) for n in inner.columns[0][1]])
    else:
        inner = matrix(rest, len(rest) - 1, others)
    if inner is None:
        call.decline("strides that do not merge into few dims")
    steps = tuple(s[1] for s in strides)
    reach = max(abs(each) * (shape[1] - 1) for each in steps)
    reach += max(_reach(inner, index) for index in range(len(strides)))
    inner = replace(inner, unit=1, wide=inner.wide or reach >= 2**31 - 2**20)
    beside = steps[0] == 1 and shape[1] > 1
    between = [each for n, s in inner.rows if n > 1 for each in s]
    unit = unit_of(shape[1], between) if beside else unit_of(inner.size, between, steps)
    return Channels(shape[1], steps, inner, beside, unit)


def _reach(inner: Matrix, index: int) -> int:
    return sum(abs(s[index]) * max(n - 1, 0) for n, s in (*inner.rows, *inner.columns))


@dataclass(frozen=True)
class Blocks:
    """A tile of channels, samples and space; `grid_channels` blocks side by side cover channels."""

    channels: int
    samples: int
    space: int
    num_tiles: int
    grid_channels: int
    whole: bool
    num_warps: int
    num_parts: int

    def constants(self) -> dict[str, int]:
        """Launch arguments CHANNELS, SAMPLES, SPACE, num_tiles, num_parts, PARTS."""
        return {
            "CHANNELS": self.channels,
            "SAMPLES": self.samples,
            "SPACE": self.space,
            "num_tiles": self.num_tiles,
            "num_parts": self.num_parts,
            "PARTS": next_power_of_2(self.num_parts),
        }


def blocks_for(call: Call, found: Channels, dtype: torch.dtype) -> Blocks:
    """Tiles for tensors like `found`; the first tensor's strides say what lies side by side."""
    samples, space = found.inner.num_rows, found.inner.size
    size = next_power_of_2(samples) * next_power_of_2(space)
    narrower = 2 if dtype == torch.float64 else 1
    tile = _INTERPRETED_TILE if call.interpreted else _TILE // narrower
    if not found.beside and size * narrower <= max(_LONGEST, tile):
        count = max(2048 // size, 1) if not call.interpreted else max(tile // size, 1)
        count = min(count, next_power_of_2(found.num_channels))
        if not call.interpreted:
            count = min(count, max(next_power_of_2(found.num_channels // 128), 1))
        return _blocks(call, found, count, next_power_of_2(samples), next_power_of_2(space))
    if found.beside:
        count = min(next_power_of_2(found.num_channels), 128 // dtype.itemsize)
        if call.interpreted:
            count = next_power_of_2(found.num_channels)
    else:
        count = 1
    block_space = min(next_power_of_2(space), max(tile // count, 1))
    block_samples = min(next_power_of_2(samples), max(tile // (count * block_space), 1))
    return _blocks(call, found, count, block_samples, block_space)


def _blocks(call: Call, found: Channels, channels: int, samples: int, space: int) -> Blocks:
    tiles = -(-found.inner.num_rows // samples) * -(-found.inner.size // space)
    grid = -(-found.num_channels // channels)
    warps = min(max(channels * samples * space // 512, 1), 16)
    wanted = max(call.info.num_sms * max(32 // warps, 1) // grid, 1)
    parts = max(min(wanted, -(-tiles // 2), 128), 1)
    return Blocks(channels, samples, space, tiles, grid, tiles == 1, warps, parts)


__all__ = ["Blocks", "Channels", "blocks_for", "channels_of"]
