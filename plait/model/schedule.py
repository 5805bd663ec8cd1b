"""Greedy schedules: tiles in a fixed order, each taken by the SM that is free first.

No interference between computation and communication, no host time: a lower bound for kernels with
the given tile rates. Tiles never span two ranks' rows, as in the shipped kernels. All ranks are
alike, so what a peer sends here arrives when this rank's own transfer of the same step ends.
All times are microseconds from the call's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plait.model.problem import Link, Plan, Problem
from plait.model.rates import Rates
from plait.schedules.partition import ceil_div, num_segmented_tiles

Reduction = Literal["epilogue", "pass"]
Algorithm = Literal["one_shot", "two_shot"]


class Sms:
    """When each SM is free. Groups of tiles must start no earlier than the groups before them."""

    def __init__(self, num_sms: int) -> None:
        self.free_us = [0.0] * num_sms

    def run(self, num_tiles: int, start_us: float, tile_us: float) -> float:
        """Give `num_tiles` equal tiles, none of which may start before `start_us`, to the SMs.

        Returns when the last of them ends (`start_us` without any).
        """
        if num_tiles == 0:
            return start_us
        # An SM that is free earlier waits anyway, as no later group may start earlier either.
        free = sorted(max(each, start_us) for each in self.free_us)
        waves, rest = divmod(num_tiles, len(free))
        free = [each + waves * tile_us for each in free]
        last = free[-1] if waves else 0.0
        if rest:
            last = max(last, free[rest - 1] + tile_us)
            free[:rest] = [each + tile_us for each in free[:rest]]
        self.free_us = free
        return last


class Sender:
    """The link: one transfer after the other."""

    def __init__(self, link: Link) -> None:
        self.link, self.free_us = link, 0.0

    def send(self, nbytes: float, ready_us: float = 0.0) -> float:
        """Send what is ready at `ready_us`; returns when its signal is there."""
        if nbytes:
            self.free_us = max(self.free_us, ready_us) + self.link.transfer_us(nbytes)
        return self.free_us + self.link.latency_us


def num_tiles(problem: Problem, plan: Plan, algorithm: Algorithm = "two_shot") -> int:
    """Tiles of one rank's product; each rank's rows are tiled on their own, except for one shot."""
    one_shot = problem.operator == "gemm_ar" and algorithm == "one_shot"
    segments = (problem.M,) if one_shot else problem.rows_per_rank
    num_cols = ceil_div(problem.local_shape[1], plan.block_n)
    return num_segmented_tiles(segments, num_cols, plan.block_m)


def tile_time_us(
    problem: Problem,
    rates: Rates,
    plan: Plan,
    num_sms: int,
    algorithm: Algorithm = "two_shot",
) -> float:
    """Time of a tile; longer where reading the operands takes longer than all waves of tiles."""
    waves = ceil_div(num_tiles(problem, plan, algorithm), num_sms)
    K = problem.local_shape[2]
    computing = rates.tile_us(plan.block_m, plan.block_n, K, problem.dtype_bytes)
    return max(computing, rates.stream_us(problem.product_bytes) / waves)


def ag_gemm_us(problem: Problem, link: Link, rates: Rates, plan: Plan, num_sms: int) -> float:
    """AG+GEMM: own rows at once, then a row of tiles when the chunk of its last row is there."""
    tile_us = tile_time_us(problem, rates, plan, num_sms)
    num_cols = ceil_div(problem.local_shape[1], plan.block_n)
    sms, sender, end = Sms(num_sms), Sender(link), 0.0
    for step, rows in enumerate(problem.segments):
        chunk_rows = max(1, ceil_div(rows, plan.chunks))
        arrivals = [
            0.0 if step == 0 else sender.send(min(chunk_rows, rows - first) * problem.row_bytes)
            for first in range(0, rows, chunk_rows)
        ]
        for first in range(0, rows, plan.block_m):
            last_row = min(first + plan.block_m, rows) - 1
            end = max(end, sms.run(num_cols, arrivals[last_row // chunk_rows], tile_us))
    return end


def gemm_rs_us(
    problem: Problem,
    link: Link,
    rates: Rates,
    plan: Plan,
    num_sms: int,
    *,
    reduction: Reduction = "epilogue",
) -> float:
    """GEMM+RS: other ranks' rows first, each chunk sent when its tiles are done, own rows last.

    `reduction`: the own tiles add the partial sums that have arrived ("epilogue"), or a kernel
    after everything does ("pass").
    """
    sms, sender = Sms(num_sms), Sender(link)
    ends = _scatter(problem, sender, rates, plan, sms, reduction)
    return max(ends) + (sum_us(problem, rates) if reduction == "pass" else 0.0)


def gemm_ar_two_shot_us(
    problem: Problem, link: Link, rates: Rates, plan: Plan, num_sms: int
) -> float:
    """GEMM+AR by owners: as GEMM+RS, then each summed chunk goes to every peer."""
    sms, sender = Sms(num_sms), Sender(link)
    ends = _scatter(problem, sender, rates, plan, sms, "epilogue")
    if problem.world_size == 1:
        return max(ends)
    own_bytes = problem.rows_per_rank[0] * problem.row_bytes
    there = 0.0
    for done in ends:
        there = sender.send((problem.world_size - 1) * own_bytes / len(ends), done)
    # The last chunk of everybody is copied from the region to the result.
    last_chunk = 2 * problem.M * problem.row_bytes / len(ends)
    return max(max(ends), there) + rates.copy_us(last_chunk)


def gemm_ar_one_shot_us(
    problem: Problem, link: Link, rates: Rates, plan: Plan, num_sms: int
) -> float:
    """GEMM+AR by everybody: each chunk of partial sums goes to every peer, and all add them up."""
    sms, sender = Sms(num_sms), Sender(link)
    total = problem.M * problem.row_bytes
    counts = list(_chunks(problem.M, problem, plan))
    arrivals, computed = [], 0.0
    tile_us = tile_time_us(problem, rates, plan, num_sms, "one_shot")
    for count in counts:
        computed = max(computed, sms.run(count, 0.0, tile_us))
        sent = (problem.world_size - 1) * total / len(counts)
        arrivals.append(sender.send(sent, computed))
    if problem.world_size == 1:
        return computed
    summed = computed
    for arrival in arrivals:
        reads_and_write = (problem.world_size + 1) * total / len(counts)
        summed = max(summed, arrival) + rates.copy_us(reads_and_write)
    return summed


def _scatter(
    problem: Problem, sender: Sender, rates: Rates, plan: Plan, sms: Sms, reduction: Reduction
) -> list[float]:
    """When each chunk of the own rows is done: summed ("epilogue") or computed and arrived."""
    own, *others = problem.segments
    tile_us = tile_time_us(problem, rates, plan, len(sms.free_us))
    arrivals: list[float] = []
    for rows in others:
        counts = list(_chunks(rows, problem, plan))
        sent = [
            sender.send(rows * problem.row_bytes / len(counts), sms.run(count, 0.0, tile_us))
            for count in counts
        ]
        # The last sender's chunks are what the own tiles wait for. It may have fewer.
        arrivals = sent or arrivals
    if others and not arrivals:
        arrivals = [sender.send(0.0)]  # fewer rows than ranks: the others still send theirs here
    if reduction == "pass":
        return [max([sms.run(sum(_chunks(own, problem, plan)), 0.0, tile_us), *arrivals])]
    tile_bytes = plan.block_m * plan.block_n * (problem.travel_bytes or problem.dtype_bytes)
    add_us = rates.copy_us((problem.world_size - 1) * tile_bytes * rates.num_sms)
    ends = []
    for chunk, count in enumerate(_chunks(own, problem, plan)):
        arrival = arrivals[min(chunk, len(arrivals) - 1)] if arrivals else 0.0
        # The wait is in the epilogue: the product itself may come before the arrival.
        ends.append(sms.run(count, max(0.0, arrival - tile_us), tile_us + add_us))
    return [*ends[:-1], max([ends[-1], *arrivals])]


def _chunks(rows: int, problem: Problem, plan: Plan) -> Iterator[int]:
    """Tiles of each chunk of `rows` rows: equal shares, each at least one."""
    total = ceil_div(rows, plan.block_m) * ceil_div(problem.local_shape[1], plan.block_n)
    chunks = min(plan.chunks, total)
    for chunk in range(chunks):
        yield total * (chunk + 1) // chunks - total * chunk // chunks


def link_us(problem: Problem, link: Link, algorithm: Algorithm = "two_shot") -> float:
    """Communication alone: the same transfers, one to each peer, with nothing to wait for or sum.

    `algorithm` is GEMM+AR's; its sums go out while the last partial sums are still on their way.
    """
    own, *others = problem.segments
    if not others:
        return 0.0
    sender, there = Sender(link), 0.0
    if problem.operator == "gemm_ar" and algorithm == "one_shot":
        return sender.send(len(others) * problem.M * problem.row_bytes)
    for rows in others:
        there = sender.send(rows * problem.row_bytes)
    if problem.operator == "gemm_ar":
        there = sender.send(len(others) * own * problem.row_bytes, link.latency_us)
    return there


def sum_us(problem: Problem, rates: Rates, algorithm: Algorithm = "two_shot") -> float:
    """A kernel of its own that adds the partial sums of the own rows, or of all (one shot)."""
    if problem.world_size == 1 or problem.operator == "ag_gemm":
        return 0.0
    whole = problem.operator == "gemm_ar" and algorithm == "one_shot"
    rows = problem.M if whole else problem.rows_per_rank[0]
    moved = (problem.world_size + 1) * rows * problem.row_bytes
    return rates.copy_us(moved) + rates.launch_us


__all__ = [
    "Algorithm",
    "Reduction",
    "Sender",
    "Sms",
    "ag_gemm_us",
    "gemm_ar_one_shot_us",
    "gemm_ar_two_shot_us",
    "gemm_rs_us",
    "link_us",
    "num_tiles",
    "sum_us",
    "tile_time_us",
]
