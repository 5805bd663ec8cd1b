"""AG+GEMM: from checked arguments to programs. Building a program is pure; nothing here waits."""

from __future__ import annotations

import torch

from plait.backends.commands import Command, Launch, Program, StreamWait
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
from plait.ops.matmul.operands import dot_precision, row_operand
from plait.overlap.ag_gemm.configs import choose_config
from plait.overlap.common.operands import Weights, block_args
from plait.schedules.partition import num_segmented_tiles
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import Region

_OPERATOR = signals.Operator.AG_GEMM


def run_ag_gemm(
    group: Group,
    x: torch.Tensor,
    weights: Weights,
    segments: Segments,
    outs: list[torch.Tensor],
    pres: list[torch.Tensor],
    activation: str,
    gathered_out: torch.Tensor | None,
) -> None:
    """Fill `outs` (and `pres`, `gathered_out`), all [M, features]; `x` is [rows, K], contiguous."""
    row_bytes = x.shape[1] * x.element_size()
    limit = slice_rows(segments, row_bytes, group.workspace.capacity_bytes)
    call = f"ag_gemm M={segments.rows} K={x.shape[1]} {x.dtype} first={segments.first}"
    for part in segments.slices(limit):
        region = group.take_region(gather_bytes(part, row_bytes), call)
        first = part.first[group.rank]
        rows = x[first : first + part.rows[group.rank]]
        program = plan_ag_gemm(
            group, region, rows, weights, part, outs, pres, activation, gathered_out
        )
        group.run(program, call)


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
) -> Program:
    """The program of one slice.

    Two weights with a gated activation share one kernel; otherwise each
    weight has a kernel of its own, all on one gather, and the last one closes the region."""
    chunks = Chunks.of(segments.max_rows, x.shape[1] * x.element_size(), group.device)
    jobs = weights.jobs(activation)
    configs = [choose_config(segments, job, x, group.device) for job in jobs]
    launches: list[Command] = []
    arrivals = 1
    for index, (job, config) in enumerate(zip(jobs, configs, strict=True)):
        last = index == len(jobs) - 1
        closes = last and gathered_out is None
        job_pres = pres[index : index + job.count] if pres else []
        launch = _launch(
            group,
            region,
            x,
            job,
            segments,
            chunks,
            config,
            outs[index],
            job_pres,
            activation,
            last,
            closes,
        )
        arrivals = launch.grid if closes else 1
        launches.append(launch)
    program = Program("ag_gemm", members=group.members)
    program.add(open_region(region, arrivals, _OPERATOR))
    program.add(*push_rows(group, region, x, segments, chunks))
    program.add(*launches, StreamWait("main", on="comm"))
    if gathered_out is not None:
        program.add(*collect_rows(group, region, x, segments, gathered_out), close_region(region))
    return program


def _launch(
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
    wait_all: bool,
    finish: bool,
) -> Launch:
    from plait.overlap.ag_gemm.kernels import _ag_gemm_kernel

    num_cols, features = job.num_cols, x.shape[1]
    gathered = gathered_view(region, segments, features, x.dtype)
    num_tiles = num_segmented_tiles(segments.rows, -(-num_cols // config.block_n), config.block_m)
    args = {
        "ctx_ptr": region.ctx,
        "x": row_operand(x, config),
        "gathered": row_operand(gathered.view(-1, features), config),
        "out_ptr": out,
        "pre0_ptr": pres[0] if pres else out,
        "pre1_ptr": pres[-1] if pres else out,
        "table_ptr": segments.table(group.device),
        "num_tiles": num_tiles,
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
        "WAIT_ALL": wait_all,
        "FINISH": finish,
        **job.kernel_args(config, out),
        **block_args(config),
    }
    grid = max(1, min(group.executor.num_sms, num_tiles))
    return Launch(_ag_gemm_kernel, grid, args, config.num_warps, config.num_stages)


__all__ = ["plan_ag_gemm", "run_ag_gemm"]
