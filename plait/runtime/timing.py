"""The only timer: GPU time of captured graphs, cold L2, contestants interleaved round by round.

Host time is measured separately (`host_us`), as wall time of calls without synchronising.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # more than any L2 cache so far
_BUSY_FLUSHES = 4  # some 300 us


@dataclass(frozen=True)
class Timing:
    """Microseconds of one contestant over all rounds."""

    name: str
    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds_us)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.rounds_us) < 4:
            return 0.0
        quartiles = statistics.quantiles(self.rounds_us, n=4)
        return (quartiles[2] - quartiles[0]) / 2 / self.median_us


def capture(fn: Callable[[], object], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """`fn` as a CUDA graph, after `warmups` eager calls on a side stream (compilation, caches)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def gpu_times(
    contestants: Mapping[str, Callable[[], object] | torch.cuda.CUDAGraph],
    rounds: int = 20,
    *,
    cold_l2: bool = True,
    pause_s: float = 0.0,
) -> dict[str, Timing]:
    """GPU time of each contestant's graph, captured here unless it is one, interleaved, on the
    current device.

    Before every timed replay the L2 cache is overwritten (`cold_l2`); the first round is dropped.
    Each round begins with another contestant, on a device that is kept busy until the host has
    enqueued the first replay: after a synchronisation that takes longer than a small kernel runs.
    With `pause_s` the device rests before every replay: at its power limit, which large products
    reach when they follow one another, contestants that differ by 8 % measure the same.
    """
    graphs = {
        name: fn if isinstance(fn, torch.cuda.CUDAGraph) else capture(fn)
        for name, fn in contestants.items()
    }
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for index in range(rounds + 1):
        events = []
        _keep_busy(flush)
        first = index % len(names) if names else 0
        for name in names[first:] + names[:first]:
            graph = graphs[name]
            if pause_s:
                torch.cuda.synchronize()
                time.sleep(pause_s)
                _keep_busy(flush)
            if cold_l2:
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: Timing(name, tuple(times[1:])) for name, times in samples.items()}


def _keep_busy(flush: torch.Tensor) -> None:
    for _ in range(_BUSY_FLUSHES):
        flush.zero_()


def host_us(fn: Callable[[], object], calls: int = 200, repeats: int = 5) -> float:
    """Wall time of one call that only enqueues, best of `repeats` averages, in microseconds."""
    fn()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return best


__all__ = ["Timing", "capture", "gpu_times", "host_us"]
