"""GEMM+RS by copy engine: each peer's rows are computed in a launch of their own, then copied.

For links over which a kernel's stores are slow or hold up its blocks (PCIe). The product is that of
`plait.matmul`, launch after launch, each allowed to start while the one before it ends.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.backends.commands import Launch, Step, StreamWait
from plait.collectives.push import (
    Chunks,
    gather_bytes,
    gathered_view,
    open_region,
    push_to,
    pushed_arrivals,
)
from plait.collectives.segments import Segments
from plait.collectives.sums import sum_slots
from plait.device import device_info
from plait.ops.matmul.configs import Config
from plait.ops.matmul.fused import config_for
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.product import Product
from plait.overlap.common.operands import Weights
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

_OPERATOR = signals.Operator.GEMM_RS
MAX_ELEMENTS = 1 << 30  # of a slot: the sum's offsets have 32 bits


def staged_bytes(segments: Segments, num_cols: int, dtype: torch.dtype) -> int:
    """Bytes of a region that holds every rank's partial rows for this one."""
    return gather_bytes(segments, num_cols * dtype.itemsize)


def plan_staged(
    group: Group,
    region: Region,
    x: torch.Tensor,
    weight: Weights,
    segments: Segments,
    out: torch.Tensor,
    reduce_dtype: torch.dtype,
) -> list[Step]:
    """The commands of one slice; `out` [rows, N] is this rank's rows of it.

    Segments are consecutive rows of x (`segments.contiguous`). The partial rows lie in memory of
    the call until their copies have ended, which `main` waits for at the end.
    """
    num_cols, rank = weight.num_cols, group.rank
    chunks = Chunks.of(segments.max_rows, num_cols * reduce_dtype.itemsize, group.device)
    parts = [out.new_empty((rows, num_cols), dtype=reduce_dtype) for rows in segments.rows]
    slots = gathered_view(region, segments, num_cols, reduce_dtype)
    summing = sum_slots(
        group, region, parts[rank], slots, out, chunks.num, chunks.rows * num_cols, _OPERATOR,
        next(iter(weight.biases), None),
    )  # fmt: skip
    config = _config(group, x, weight, reduce_dtype)
    receives = (segments.rows[rank],) * group.world_size
    commands: list[Step] = [
        open_region(region, summing.grid, _OPERATOR),
        pushed_arrivals(
            region, receives, num_cols, reduce_dtype, segments.max_rows, chunks, segments.rows
        ),
    ]
    for step in range(1, group.world_size + 1):
        peer = (rank + step) % group.world_size
        first = segments.starts[peer] + segments.first[peer]
        count = segments.rows[peer]
        rows, here = x[first : first + count], weight.of_rows(first, count)
        commands += _product(group, rows, here, parts[peer], config, first_of_all=step == 1)
        if peer != rank:
            commands.append(StreamWait("comm", on="main"))
            commands += push_to(region, peer, parts[peer], segments.max_rows, chunks)
    return [*commands, summing, StreamWait("main", on="comm")]


def _product(
    group: Group,
    x: torch.Tensor,
    weight: Weights,
    out: torch.Tensor,
    config: Config,
    first_of_all: bool,
) -> list[Launch]:
    """out = x @ weight^T. It reads nothing that the launch before it writes, and may overlap it."""
    program = plan_matmul(
        x,
        weight.weights,
        (),
        out,
        activation="none",
        config=config,
        num_sms=group.executor.num_sms,
        scaling=next(iter(weight.scalings), None),
        chained=group.executor.early_launches,
    )
    launches = program.launches()
    if first_of_all:  # what comes before it on the stream it does read
        return launches
    return [replace(each, early=group.executor.early_launches) for each in launches]


def _config(group: Group, x: torch.Tensor, weight: Weights, dtype: torch.dtype) -> Config:
    """That of the whole product: tiles of all launches together fill the SMs."""
    out = x.new_empty(0, dtype=dtype)
    product = Product(x, weight.weights, (), "none", out.dtype, scalings=weight.scalings)
    config = config_for(product, device_info(group.device))
    return replace(config, splits=1, split_tail=False)


__all__ = ["MAX_ELEMENTS", "plan_staged", "staged_bytes"]
