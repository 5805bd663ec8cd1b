"""AG+GEMM: from checked arguments to programs. Building a program is pure; nothing here waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from plait.backends.commands import Launch, Program, StreamWait
from plait.collectives.all_gather import collect_rows
from plait.collectives.push import (
    Chunks,
    close_region,
    gather_bytes,
    gathered_view,
    open_region,
    push_rows,
    slice_rows,
)
from plait.collectives.segments import Segments
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import (
    dot_precision,
    out_descriptor,
    out_descriptor_allowed,
    row_operand,
)
from plait.overlap.ag_gemm.configs import choose_config
from plait.overlap.common.operands import Weights, block_args
from plait.overlap.common.plans import run_program
from plait.overlap.common.quantized import product_args
from plait.overlap.common.row_scales import RowScales, gathered_scales, push_scaled_rows
from plait.overlap.common.tail import cut_last_wave
from plait.overlap.common.trace import Awaits, is_tracing, trace_args
from plait.schedules.partition import num_segmented_tiles
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

_OPERATOR = signals.Operator.AG_GEMM
_STEPS = (("wait", "compute", "store"),)  # what a trace's stamps end


def run_ag_gemm(
    group: Group,
    x: torch.Tensor,
    weights: Weights,
    segments: Segments,
    outs: list[torch.Tensor],
    pres: list[torch.Tensor],
    activation: str,
    gathered_out: torch.Tensor | None,
    scales: RowScales | None = None,
) -> None:
    """Fill `outs` (and `pres`, `gathered_out`), all [M, features]; `x` is [rows, K], contiguous.

    `scales`: of the rows of x where the weights have theirs.
    """
    row_bytes = x.shape[1] * x.element_size()
    call = f"ag_gemm M={segments.rows} K={x.shape[1]} {x.dtype} first={segments.first}"
    if scales is not None:
        row_bytes += scales.row_bytes
        call += f" scales={scales.columns} shared={scales.shared}"
    limit = slice_rows(segments, row_bytes, group.workspace.capacity_bytes)
    for part in segments.slices(limit):
        region = group.take_region(gather_bytes(part, row_bytes), call)
        first = part.first[group.rank]
        count = part.rows[group.rank]
        program = plan_ag_gemm(
            group, region, x[first : first + count], weights, part, outs, pres, activation,
            gathered_out, None if scales is None else scales.rows(first, count),
        )  # fmt: skip
        run_program(group, program, call)


def plan_ag_gemm(
    group: Group,
    region: Region,
    x: torch.Tensor,
    weights: Weights,
    segments: Segments,
    outs: list[torch.Tensor],
    pres: list[torch.Tensor],
    activation: str,
    gathered_out: torch.Tensor | None,
    scales: RowScales | None = None,
) -> Program:
    """The program of one slice.

    Two weights with a gated activation share one kernel; otherwise each
    weight has a kernel of its own, all on one gather, and the last one closes the region."""
    chunks = Chunks.of(segments.max_rows, x.shape[1] * x.element_size(), group.device)
    jobs = weights.jobs(activation)
    configs = [
        choose_config(segments, job, x, group.device, out.dtype)
        for job, out in zip(jobs, outs, strict=True)
    ]
    launches: list[Launch] = []
    arrivals = 1
    for index, (job, config) in enumerate(zip(jobs, configs, strict=True)):
        last = index == len(jobs) - 1
        closes = last and gathered_out is None
        job_pres = pres[index : index + job.count] if pres else []
        launches += _launches(
            group, region, x, job, segments, chunks, config, outs[index], job_pres, activation,
            wait_all=last, finish=closes, scales=scales,
        )  # fmt: skip
        arrivals = sum(each.grid for each in launches if each.args["FINISH"]) if closes else 1
    program = Program("ag_gemm", members=group.members)
    program.add(open_region(region, arrivals, _OPERATOR))
    if scales is None:
        program.add(*push_rows(group, region, x, segments, chunks))
    else:
        program.add(*push_scaled_rows(group, region, x, scales, segments, chunks))
    program.add(*launches, StreamWait("main", on="comm"))
    if gathered_out is not None:
        program.add(*collect_rows(group, region, x, segments, gathered_out), close_region(region))
    return program


def _launches(
    group: Group,
    region: Region,
    x: torch.Tensor,
    job: Weights,
    segments: Segments,
    chunks: Chunks,
    config: Config,
    out: torch.Tensor,
    pres: list[torch.Tensor],
    activation: str,
    *,
    wait_all: bool,
    finish: bool,
    scales: RowScales | None,
) -> list[Launch]:
    """One launch of the kernel, or two: whole waves of tiles, and the last one in smaller tiles."""
    from plait.overlap.ag_gemm.kernels import _ag_gemm_kernel

    num_cols, features = job.num_cols, x.shape[1]
    slots = group.executor.num_sms * config.blocks_per_sm
    gathered = gathered_view(region, segments, features, x.dtype)
    num_tiles = num_segmented_tiles(segments.rows, -(-num_cols // config.block_n), config.block_m)
    stored_whole = config.desc_store and segments.uniform and out_descriptor_allowed(out)
    args = {
        "ctx_ptr": region.ctx,
        "x": row_operand(x, config),
        "gathered": row_operand(gathered.view(-1, features), config),
        "pre0_ptr": pres[0] if pres else out,
        "pre1_ptr": pres[-1] if pres else out,
        "table_ptr": segments.table(group.device),
        "num_chunks": chunks.num,
        "chunk_rows": chunks.rows,
        "segment_rows": gathered.shape[1],
        "total": segments.total,
        "N": num_cols,
        "K": features,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_om": out.stride(0),
        "stride_on": out.stride(1),
        "stride_pm": (pres[0] if pres else out).stride(0),
        "stride_pn": (pres[0] if pres else out).stride(1),
        "ACT": activation,
        "STORE_PRE": bool(pres),
        "PRECISION": dot_precision(x.dtype),
        "OP": int(_OPERATOR),
        "OUT_DESC": stored_whole,
        "FLATTEN": config.flatten and not is_tracing(),
        **product_args(x, job, out.dtype, config),
    }
    if scales is not None:
        args |= _scale_args(region, segments, x, scales)
    parts = cut_last_wave(num_tiles, slots, config.block_n)
    launches = []
    for part in parts:
        first, last = part is parts[0], part is parts[-1]
        tile = replace(config, block_n=config.block_n // part.pieces)
        early = not first and group.executor.early_launches and config.desc
        own = {
            **args,
            **job.kernel_args(tile, out),
            **block_args(tile),
            "out_ptr": _out_operand(out, segments, tile, job.count) if stored_whole else out,
            "first_tile": part.first,
            "num_tiles": part.count,
            "PIECES": part.pieces,
            "WAIT_ALL": wait_all and last,
            "FINISH": finish,
            "LEADS": len(parts) > 1 and first and config.desc,
            "EARLY": early,
            **trace_args(
                group,
                part.count * part.pieces,
                _STEPS,
                _awaits(group, segments, chunks, config, num_cols),
            ),
        }
        grid = max(1, min(slots, part.count * part.pieces))
        launches.append(
            Launch(_ag_gemm_kernel, grid, own, tile.num_warps, tile.num_stages, early=early)
        )
    return launches


def _scale_args(
    region: Region, segments: Segments, x: torch.Tensor, scales: RowScales
) -> dict[str, Any]:
    """Where the kernel finds the scales of own and of gathered rows, beyond `product_args`."""
    gathered = gathered_scales(region, segments, x.shape[1] * x.element_size(), scales)
    return {
        "x_scale_ptr": scales.values,
        "gathered_scale_ptr": gathered,
        "scale_slot": gathered.shape[1] if scales.shared else 0,
        "stride_xsm": 0 if scales.shared else scales.columns,
    }


def _awaits(
    group: Group, segments: Segments, chunks: Chunks, config: Config, num_cols: int
) -> Awaits:
    """The words that tiles wait for, for `trace_args`."""
    num_n = -(-num_cols // config.block_n)

    def awaits(_loop: int, segment: int, tile: int) -> list[int]:
        if segment == group.rank:
            return []
        end = min((tile // num_n + 1) * config.block_m, segments.rows[segment])
        return [segment * chunks.num + (end - 1) // chunks.rows]

    return awaits


def _out_operand(out: torch.Tensor, segments: Segments, config: Config, num_weights: int) -> Any:
    """A descriptor of out [M, N] as one matrix a rank, so that no tile reaches into the next."""
    return out_descriptor(out.view(segments.world_size, -1, out.shape[1]), config, num_weights)


__all__ = ["plan_ag_gemm", "run_ag_gemm"]
