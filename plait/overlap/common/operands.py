"""Operands of overlapped GEMMs: weights in either layout, by descriptor where that is possible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from plait.ops.matmul.configs import Config
from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.operands import descriptor_allowed, weight_operand, weights_are_kn

GATED = ("swiglu", "geglu")


@dataclass(frozen=True)
class Weights:
    """One or several weights [N_i, K] (any strides) with their biases [N_i], all or none.

    `scalings`: of fp8 and int8 operands one for each weight, whose scales of x are flat.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...] = ()
    scalings: tuple[Scaling, ...] = ()

    @property
    def count(self) -> int:
        """Number of weights."""
        return len(self.weights)

    @property
    def num_cols(self) -> int:
        """Columns that one kernel computes: N of the (first) weight."""
        return self.weights[0].shape[0]

    def jobs(self, activation: str) -> list[Weights]:
        """What each kernel computes: both weights of a gated activation, or one weight."""
        if activation in GATED:
            return [self]
        return [
            Weights((w,), self.biases[i : i + 1], self.scalings[i : i + 1])
            for i, w in enumerate(self.weights)
        ]

    @property
    def by_blocks(self) -> bool:
        """Whether scales are those of blocks, so that one step of K is one block."""
        return any(scaling.kind == "blocks" for scaling in self.scalings)

    def of_rows(self, first: int, count: int) -> Weights:
        """The same for `count` rows of x from `first` on: only scales of single rows differ."""
        scalings = tuple(
            each if each.x.numel() == 1 else replace(each, x=each.x[first : first + count])
            for each in self.scalings
        )
        return replace(self, scalings=scalings)

    def descriptors_allowed(self) -> bool:
        """Whether tensor descriptors can read every weight as it lies in memory."""
        stored = [w.t() for w in self.weights] if weights_are_kn(self.weights) else self.weights
        return all(descriptor_allowed(each) for each in stored)

    def kernel_args(self, config: Config, out: torch.Tensor) -> dict[str, Any]:
        """Arguments w0, w1, biases and their strides of a kernel over one or two weights."""
        first, last = self.weights[0], self.weights[-1]
        bias0, bias1 = (self.biases[0], self.biases[-1]) if self.biases else (out, out)
        kn = config.desc and weights_are_kn(self.weights)
        return {
            "w0": weight_operand(first, config, kn),
            "w1": weight_operand(last, config, kn),
            "bias0_ptr": bias0,
            "bias1_ptr": bias1,
            "stride_w0n": first.stride(0),
            "stride_w0k": first.stride(1),
            "stride_w1n": last.stride(0),
            "stride_w1k": last.stride(1),
            "stride_bias0": bias0.stride(-1),
            "stride_bias1": bias1.stride(-1),
            "NUM_WEIGHTS": self.count,
            "HAS_BIAS": bool(self.biases),
            "B_KN": kn,
        }


def block_args(config: Config) -> dict[str, Any]:
    """Tile sizes of a configuration as kernel constants."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "DESC": config.desc,
    }


def triton_dtype(dtype: torch.dtype) -> Any:
    """The `triton.language` dtype of a floating torch dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


__all__ = ["GATED", "Weights", "block_args", "triton_dtype"]
