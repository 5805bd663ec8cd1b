"""Times of one call from rates, link and sizes: the product, the transfers, both, overlapped.

    predict(Problem("ag_gemm", 4096, 49152, 12288, 8), Link(360.0), H200).explain()

What the numbers mean, and what they leave out: docs/design/model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from plait.errors import ArgumentError
from plait.model import metrics
from plait.model.problem import Link, Plan, Problem
from plait.model.rates import Rates
from plait.model.schedule import (
    Algorithm,
    Reduction,
    ag_gemm_us,
    gemm_ar_one_shot_us,
    gemm_ar_two_shot_us,
    gemm_rs_us,
    link_us,
    num_tiles,
    sum_us,
    tile_time_us,
)
from plait.schedules.partition import ceil_div

_CHUNKS = (1, 2, 4)  # more signals a shard make copies too small for a link
_LOWEST_CHUNK = 128  # rows below which a shard is not cut further: a row of tiles
_SMALLEST_BLOCK = 16
_MAX_CACHED = 4096


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one call on rank 0.

    Attributes:
        gemm_us: the rank's product by the best plain GEMM.
        kernel_us: the tiles of `plan` without waiting for anything.
        comm_us: the transfers alone.
        unfused_us: one after the other, with the sum.
        overlapped_us: the greedy schedule of `plan`.
        streaming: whether reading the operands, not multiplying, takes the product's time.
        algorithm: of GEMM+AR, else "".
    """

    problem: Problem
    link: Link
    rates: Rates
    plan: Plan
    algorithm: Literal["", "one_shot", "two_shot"]
    gemm_us: float
    kernel_us: float
    comm_us: float
    unfused_us: float
    overlapped_us: float
    streaming: bool

    @property
    def bound_us(self) -> float:
        """The longer of product and transfers: nothing can be faster."""
        return max(self.gemm_us, self.comm_us)

    @property
    def bound_ratio(self) -> float:
        """Overlapped time over the bound."""
        return metrics.bound_ratio(self.overlapped_us, self.gemm_us, self.comm_us)

    @property
    def efficiency(self) -> float:
        """Overlap efficiency of the greedy schedule; NaN for one rank."""
        return metrics.overlap_efficiency(self.overlapped_us, self.gemm_us, self.comm_us)

    @property
    def dominant(self) -> Literal["communication", "computation", "memory"]:
        """Which term the bound is."""
        if self.comm_us > self.gemm_us:
            return "communication"
        return "memory" if self.streaming else "computation"

    def explain(self) -> str:
        """A few lines: the terms, which one dominates, and where the rest goes."""
        M, N, K = self.problem.local_shape
        tiles = num_tiles(self.problem, self.plan, self.algorithm or "two_shot")
        # What is over the bound: tiles that are slower than the best GEMM, then waiting.
        slower = max(0.0, self.kernel_us - self.bound_us)
        waiting = self.overlapped_us - self.bound_us - slower
        algorithm = f" {self.algorithm}" if self.algorithm else ""
        return "\n".join(
            [
                f"{self.problem.operator}{algorithm} {self.problem.shape_text} on "
                f"{self.problem.world_size} ranks of {self.rates.name}: {self.dominant} dominates",
                f"  product {M} {N} {K}: {self.gemm_us:.1f} us; as {tiles} tiles of {self.plan}: "
                f"{tiles / self.rates.num_sms:.2f} waves, {self.kernel_us:.1f} us",
                f"  transfers at {self.link.bandwidth_gb_s:g} GB/s: {self.comm_us:.1f} us; "
                f"one after the other {self.unfused_us:.1f} us",
                f"  overlapped {self.overlapped_us:.1f} us, {self.bound_ratio:.2f} of the bound: "
                f"{slower:.1f} us more for the tiles, {waiting:.1f} us for waiting and sums",
            ]
        )


def predict(
    problem: Problem,
    link: Link,
    rates: Rates,
    *,
    plan: Plan | None = None,
    algorithm: Algorithm | None = None,
    reduction: Reduction = "epilogue",
    num_sms: int | None = None,
) -> Prediction:
    """Predicted times of one call. Pure and cached.

    Args:
        problem: the call. link: what the ranks send through. rates: the GPU.
        plan: tiles and chunks; None takes those with the shortest overlapped time.
        algorithm: of gemm_ar; None takes the faster one.
        reduction: of gemm_rs: where partial sums are added.
        num_sms: SMs of the overlapped kernel, where others hold some; default all.

    Raises:
        ArgumentError: an algorithm for another operator, or an impossible number of SMs.
    """
    if algorithm is not None and problem.operator != "gemm_ar":
        raise ArgumentError("algorithm", "None, except for gemm_ar", repr(algorithm))
    sms = rates.num_sms if num_sms is None else num_sms
    if not 1 <= sms <= rates.num_sms:
        raise ArgumentError("num_sms", f"from 1 to the GPU's {rates.num_sms}", sms)
    return _predict(problem, link, rates, plan, algorithm, reduction, sms)


@lru_cache(_MAX_CACHED)
def _predict(
    problem: Problem,
    link: Link,
    rates: Rates,
    plan: Plan | None,
    algorithm: Algorithm | None,
    reduction: Reduction,
    num_sms: int,
) -> Prediction:
    stream_us = rates.stream_us(problem.product_bytes)
    gemm_us = plain_gemm_us(problem, rates)
    names: tuple[Algorithm, ...] = (algorithm,) if algorithm else ("two_shot", "one_shot")
    if problem.operator != "gemm_ar":
        names = ("two_shot",)
    options: list[tuple[float, Algorithm, Plan]] = [
        (_overlapped_us(problem, link, rates, each, name, reduction, num_sms), name, each)
        for name in names
        for each in ([plan] if plan else candidate_plans(problem, rates, name))
    ]
    overlapped_us, name, best = min(options, key=lambda option: option[0])
    comm_us = min(link_us(problem, link, each) for each in names)
    return Prediction(
        problem=problem,
        link=link,
        rates=rates,
        plan=best,
        algorithm=name if problem.operator == "gemm_ar" else "",
        gemm_us=gemm_us,
        kernel_us=_kernel_us(problem, rates, best, name, num_sms),
        comm_us=comm_us,
        unfused_us=gemm_us
        + min(link_us(problem, link, each) + sum_us(problem, rates, each) for each in names),
        overlapped_us=overlapped_us,
        streaming=gemm_us <= stream_us,
    )


def _overlapped_us(
    problem: Problem,
    link: Link,
    rates: Rates,
    plan: Plan,
    algorithm: Algorithm,
    reduction: Reduction,
    num_sms: int,
) -> float:
    if problem.operator == "ag_gemm":
        return ag_gemm_us(problem, link, rates, plan, num_sms)
    if problem.operator == "gemm_rs":
        return gemm_rs_us(problem, link, rates, plan, num_sms, reduction=reduction)
    if algorithm == "one_shot":
        return gemm_ar_one_shot_us(problem, link, rates, plan, num_sms)
    return gemm_ar_two_shot_us(problem, link, rates, plan, num_sms)


def plain_gemm_us(problem: Problem, rates: Rates) -> float:
    """The rank's product by a good library: the best of the measured tiles and lower ones.

    A library splits work more finely than whole tiles, so half of the last wave's idle time counts.
    """
    M, N, K = problem.local_shape
    best = math.inf
    for tile in rates.tiles:
        block_m = tile.block_m
        while block_m >= _SMALLEST_BLOCK:
            waves = ceil_div(M, block_m) * ceil_div(N, tile.block_n) / rates.num_sms
            tile_us = rates.tile_us(block_m, tile.block_n, K, problem.dtype_bytes)
            best = min(best, (math.ceil(waves) + waves) / 2 * tile_us)
            block_m //= 2
    return max(rates.stream_us(problem.product_bytes), best * rates.library_share)


def candidate_plans(
    problem: Problem, rates: Rates, algorithm: Algorithm = "two_shot"
) -> Iterator[Plan]:
    """Measured tiles, no higher than a rank's rows need, each with 1, 2 and 4 chunks a shard."""
    one_shot = problem.operator == "gemm_ar" and algorithm == "one_shot"
    rows = problem.M if one_shot else problem.rows_per_rank[0]
    seen: set[Plan] = set()
    for tile in rates.tiles:
        block_m = min(tile.block_m, max(_SMALLEST_BLOCK, 1 << (rows - 1).bit_length()))
        for chunks in _CHUNKS:
            plan = Plan(block_m, tile.block_n, chunks)
            enough = chunks == 1 or rows // chunks >= min(block_m, _LOWEST_CHUNK)
            if enough and plan not in seen:
                seen.add(plan)
                yield plan


def _kernel_us(
    problem: Problem, rates: Rates, plan: Plan, algorithm: Algorithm, num_sms: int
) -> float:
    waves = ceil_div(num_tiles(problem, plan, algorithm), num_sms)
    return waves * tile_time_us(problem, rates, plan, num_sms, algorithm)


def calibrated(rates: Rates, problem: Problem, gemm_us: float) -> Rates:
    """Rates under which this problem's plain GEMM takes `gemm_us`, as measured.

    Takes out what the tile rates do not know (clocks, power, this shape), so that a schedule can be
    compared with a measured one. Unchanged where reading the operands takes the time.
    """
    predicted = plain_gemm_us(problem, replace(rates, start_us=0.0, read_tb_s=math.inf))
    if gemm_us <= rates.stream_us(problem.product_bytes):
        return rates
    return rates.scaled(gemm_us / predicted)


__all__ = ["Prediction", "calibrated", "candidate_plans", "plain_gemm_us", "predict"]
