"""`plait trace`: what each SM does during one overlapped call, and what the link does beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.errors import MissingDependencyError

if TYPE_CHECKING:
    from plait.cli.bench_overlap import Request
    from plait.overlap.common.trace import Trace

_WARM_CALLS = 4  # both regions have grown, and both have seen the call once
_REPLAYS = 3  # the last one's stamps stay: caches and clocks are warm


def command(
    operator: str,
    m: int,
    n: int,
    k: int,
    tp: int = 8,
    dtype: str = "bfloat16",
    link: str = "paced:360",
    out: Path = Path("trace.json"),
    virtual: bool = False,
) -> None:
    """Write a timeline of one call of ag_gemm, gemm_rs or gemm_ar for https://ui.perfetto.dev.

    M N K are those of all TP ranks together. One live rank on a GPU, its peers emulated over LINK:
    pcie, or paced:GBps, with @us and +traffic if wanted. With --virtual all ranks on the CPU, whose
    clock is invented and whose kernels are interpreted: for small sizes. Prints what SMs did.
    """
    from plait.cli.bench_overlap import Request

    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("rich", "plait trace", 'pip install "plait[cli]"') from None
    request = Request(cast("Any", operator), (m, n, k), tp=tp, dtype=dtype, link=link)
    trace = trace_virtual(request) if virtual else trace_emulated(request)
    trace.write(out)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no width of its own
    console.print(summary_table(trace, _title(request, virtual)))
    if link_line := _link_line(trace):
        console.print(link_line)
    console.print(f"written to {out}; open it at https://ui.perfetto.dev", markup=False)


def trace_emulated(request: Request) -> Trace:
    """One call of the live rank, replayed as a CUDA graph. DeviceError without a GPU."""
    import torch

    from plait.cli.bench_overlap import make_case, open_group
    from plait.cli.bench_overlap_cases import fill_regions
    from plait.runtime.lab import gpu_lab
    from plait.runtime.timing import capture
    from plait.symm.transports.link import Link

    (problem,) = request.problems()
    Link.parse(request.link)  # before anything is allocated; there is no trace over "real" links
    group = open_group(request, gpu_lab().device)
    try:
        case = make_case(request, problem, group)
        for _ in range(_WARM_CALLS):
            case.overlapped("fused")
        fill_regions(group, request.torch_dtype)
        traces: list[Trace] = []
        # As a graph, for the host is slower than the link; before that also eager, to compile.
        graph = capture(lambda: traces.append(_traced(lambda: case.overlapped("fused"))))
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        group.check()
        return traces[-1]
    finally:
        group.close()


def trace_virtual(request: Request) -> Trace:
    """One call on virtual ranks of the CPU, all ranks in one trace."""
    import plait
    from plait.cli.bench_overlap_cases import Case

    (problem,) = request.problems()
    trace = plait.trace()

    def fn(group: Any) -> None:
        case = Case(problem, request.torch_dtype, group, emulated=False)
        with trace:
            case.overlapped("fused")

    plait.run_virtual(fn, request.tp, device="cpu", check=False)
    return trace


def _traced(call: Callable[[], object]) -> Trace:
    import plait

    with plait.trace() as trace:
        call()
    return trace


# --- text
def _title(request: Request, virtual: bool) -> str:
    where = "virtual ranks, invented clock" if virtual else f"{request.link}, emulated peers"
    sizes = "x".join(map(str, request.sizes))
    return f"{request.operator} {sizes}, {request.dtype}, TP{request.tp}, {where}: SM time"


def summary_table(trace: Trace, title: str) -> Any:
    """A row for each traced program: shares of SM time, waves, first and last tile."""
    from rich.table import Table

    from plait.overlap.common.trace_events import STEPS

    table = Table(title=title, title_justify="left")
    for name in ("rank", "slice", "tiles", "blocks", "waves", "us", *STEPS, "idle"):
        table.add_column(name, justify="right")
    for name in ("first tile", "last tile"):
        table.add_column(name)
    for each in trace.summary():
        shares = [f"{each.shares[name]:.1%}" for name in (*STEPS, "idle")]
        ends = [
            f"{tile.tile} of rank {tile.segment}, SM {tile.sm}" for tile in (each.first, each.last)
        ]
        counts = [each.rank, each.call, each.num_tiles, each.num_lanes, each.waves]
        table.add_row(*map(str, counts), f"{each.span_ns / 1000:.1f}", *shares, *ends)
    return table


def _link_line(trace: Trace) -> str:
    transfers, tiles = trace.transfers(), trace.events()
    if not transfers:
        return ""
    begin = min(tile.start_ns for tile in tiles)
    busy = sum(each.end_ns - each.start_ns for each in transfers) / 1000
    last = (max(each.end_ns for each in transfers) - begin) / 1000
    return (
        f"link: {len(transfers)} pieces, {busy:.1f} us of transfers, the last one over "
        f"{last:.1f} us after the first tile began"
    )


__all__ = ["command", "summary_table", "trace_emulated", "trace_virtual"]
