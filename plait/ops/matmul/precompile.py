"""What `plait tune gemm` compiles in worker processes, by plait/runtime/compile_pool.py."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from plait.ops.matmul.configs import Config
from plait.ops.matmul.problem import Problem, make_operands
from plait.runtime.compile_pool import CRASHED, can_precompile, precompile


@dataclass(frozen=True)
class CompileJob:
    """All kernels of one problem with one config, on a GPU with so many SMs."""

    problem: Problem
    config: Config
    tf32: bool = False
    num_sms: int = 1

    @property
    def key(self) -> Hashable:
        """Equal for jobs that compile the same kernels: Triton knows sizes only by divisibility."""
        problem, config = self.problem, self.config
        sizes = (problem.M, problem.N, problem.K)
        kinds = tuple(0 if size == 1 else math.gcd(size, 16) for size in sizes)
        compiled = replace(config, splits=1, blocks_per_sm=1, split_tail=False)
        kernel = (problem.dtype, problem.layout, problem.scales, problem.fast_accum, self.tf32)
        # Strides of batches may need 64 bits; how fp8 is summed depends on K.
        exact = problem.batch > 0 or problem.dtype.itemsize == 1
        batch = exact and (problem.batch, *sizes)
        return kinds, compiled, self._split, kernel, batch

    @property
    def _split(self) -> str:
        """Which tiles are split: none, those of the last wave, or all."""
        problem, config = self.problem, self.config
        if config.splits == 1:
            return "none"
        if not config.split_tail:
            return "all"
        tiles = -(-problem.M // config.block_m) * -(-problem.N // config.block_n)
        tiles *= max(problem.batch, 1)
        blocks = self.num_sms * config.blocks_per_sm
        return "none" if tiles % blocks == 0 else "tail" if tiles > blocks else "all"

    def compile(self) -> None:
        """Compile all kernels of the product."""
        if self.tf32:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        program = make_operands(self.problem, torch.device("meta")).program(
            self.config, self.num_sms
        )
        for launch in program.launches():
            launch.kernel.warmup(**launch.args, grid=(launch.grid,), **launch.options)


__all__ = ["CRASHED", "CompileJob", "can_precompile", "precompile"]
