"""Sums over ranks: push parts to their owners by copy engine, add them there in rank order.

The common half of reduce-scatter (another part for each rank) and one-shot all-reduce (the same
tensor for all). Tensors are flat here: [elements, 1], so that any shape cuts into slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.backends.commands import Launch, Program, StreamWait
from plait.collectives.push import (
    Chunks,
    gather_bytes,
    gathered_view,
    open_region,
    push_tensors,
    slice_rows,
)
from plait.collectives.segments import Segments
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SLICE_ELEMENTS = 1 << 30  # offsets within a slot are 32 bits wide
_MIN_BLOCK, _MAX_BLOCK = 256, 4096  # elements of a tile; 8192 spills with Triton 3.9
_TILES_PER_SM = 4  # so that a small tensor is spread over all SMs


def sum_over_ranks(
    group: Group,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    operator: signals.Operator,
    call: str,
) -> None:
    """out [n, 1] = sum over ranks of what each has for this one.

    `parts[p]` [n_p, 1], contiguous, goes to rank p (the own one stays), all in the dtype in which
    they travel: fp32, bf16 or fp16. Each n_p is the same on every rank, and n = n_rank. Runs in
    slices if the workspace is too small.
    """
    itemsize = parts[0].element_size()
    lengths = [part.shape[0] for part in parts]
    segments = Segments.of((sum(lengths), 1), 0, lengths)
    limit = min(slice_rows(segments, itemsize, group.workspace.capacity_bytes), _MAX_SLICE_ELEMENTS)
    for piece in segments.slices(limit):
        region = group.take_region(gather_bytes(piece, itemsize), call)
        cuts = [
            slice(first, first + rows) for first, rows in zip(piece.first, piece.rows, strict=True)
        ]
        sends = [part[cut] for part, cut in zip(parts, cuts, strict=True)]
        program = plan_sum(group, region, sends, out[cuts[group.rank]], piece, operator)
        group.run(program, f"{call} first={piece.first[0]}")


def plan_sum(
    group: Group,
    region: Region,
    sends: Sequence[torch.Tensor],
    out: torch.Tensor,
    segments: Segments,
    operator: signals.Operator,
) -> Program:
    """The program of one slice: `sends[p]` [rows_p, 1] for each rank, `out` [rows_rank, 1]."""
    own = sends[group.rank]
    chunks = Chunks.of(segments.max_rows, own.element_size(), group.device)
    slots = gathered_view(region, segments, 1, own.dtype)
    summing = sum_slots(group, region, own, slots, out, chunks.num, chunks.rows, operator)
    program = Program(operator.name.lower(), members=group.members)
    program.add(open_region(region, summing.grid, operator))
    receives = [out.shape[0]] * group.world_size
    program.add(*push_tensors(group, region, sends, receives, segments.max_rows, chunks))
    program.add(summing)
    return program.add(StreamWait("main", on="comm"))


def sum_slots(
    group: Group,
    region: Region,
    own: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    num_chunks: int,
    chunk_elements: int,
    operator: signals.Operator,
    bias: torch.Tensor | None = None,
) -> Launch:
    """out = own + what peers push into `slots` [world_size, ...], plus bias once; the last launch.

    `own` and `out` are contiguous with as many elements; a slot may be longer. With a bias their
    last dim is its length. Chunks of `chunk_elements` of each slot arrive in order.
    """
    from plait.collectives.kernels import _sum_segments_kernel

    num_elements = out.numel()
    block = block_elements(num_elements, group.executor.num_sms)
    grid = max(1, min(group.executor.num_sms, -(-num_elements // block)))
    args = {
        "ctx_ptr": region.ctx,
        "own_ptr": own,
        "slots_ptr": slots,
        "out_ptr": out,
        "num_elements": num_elements,
        "slot_elements": slots[0].numel(),
        "num_chunks": num_chunks,
        "chunk_elements": chunk_elements,
        "WORLD_SIZE": group.world_size,
        "BLOCK": block,
        "OP": int(operator),
    }
    if bias is not None:
        args |= {
            "bias_ptr": bias,
            "stride_bias": bias.stride(0),
            "num_cols": bias.shape[0],
            "HAS_BIAS": True,
        }
    return Launch(_sum_segments_kernel, grid, args, num_warps=max(4, min(16, block // 512)))


def block_elements(num_elements: int, num_sms: int) -> int:
    """Elements of a tile, a power of two: each SM gets a few tiles where there is enough."""
    wanted = num_elements // (num_sms * _TILES_PER_SM)
    block = _MIN_BLOCK
    while block < min(wanted, _MAX_BLOCK):
        block *= 2
    return block


__all__ = ["SUM_DTYPES", "block_elements", "plan_sum", "sum_over_ranks", "sum_slots"]
