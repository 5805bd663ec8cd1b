"""Rough times of tile schedules on a large GPU: for choosing between configs, not for predicting.

Whole waves of tiles, a last wave that is full or not, and the traffic of split sums. Rates are
those of one H200 in bf16.
"""

from __future__ import annotations

from plait.ops.matmul.configs import Config

NUM_SMS = 132
_FLOPS_PER_SM_US = 5.3e6
_BYTES_PER_US = 3.5e6
_SPLIT_SLOWDOWN = 1.05  # a shorter loop over K fills its pipeline again
_STORE_US = 2.0  # of 128 x 256 elements
_SUM_US = 3.0  # the second kernel, launched early


def product_time_us(
    M: int, N: int, K: int, itemsize: int, config: Config, rate: float, batch: int = 1
) -> float:
    """Time of out [batch, M, N] by `config`, whose tiles run at `rate` of the fastest ones."""
    tiles = batch * -(-M // config.block_m) * -(-N // config.block_n)
    slots = NUM_SMS * config.blocks_per_sm
    flops = 2 * config.block_m * config.block_n * K
    # Blocks that share an SM share its tensor cores; one multiplies while another stores.
    tile_us = config.blocks_per_sm * flops / (rate * _FLOPS_PER_SM_US * 2 / itemsize)
    tile_us += _STORE_US * config.block_m * config.block_n / (128 * 256)
    if config.splits == 1:
        return -(-tiles // slots) * tile_us
    whole = tiles // slots if config.split_tail else 0
    split = tiles - whole * slots
    if split == 0:
        return whole * tile_us
    part_us = _SPLIT_SLOWDOWN * tile_us / config.splits
    stored = 8.0 * config.splits * split * config.block_m * min(config.block_n, N)
    if config.block_m > M:
        stored *= M / config.block_m
    traffic_us = _SUM_US + stored / _BYTES_PER_US
    return whole * tile_us + -(-split * config.splits // slots) * part_us + traffic_us


__all__ = ["NUM_SMS", "product_time_us"]
