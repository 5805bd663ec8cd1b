"""Operands of overlapped GEMMs: weights in either layout, descriptors where the hardware takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.ops.matmul.configs import Config

GATED = ("swiglu", "geglu")


@dataclass(frozen=True)
class Weights:
    """One or several weights [N_i, K] (any strides) with their biases [N_i], all or none."""

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...] = ()

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
        return [Weights((w,), self.biases[i : i + 1]) for i, w in enumerate(self.weights)]

    def layout(self) -> str | None:
        """ "nk" or "kn": the dim that is contiguous in memory for all weights; None if mixed or neither."""
        if all(w.stride(1) == 1 for w in self.weights):
            return "nk"
        return "kn" if all(w.stride(0) == 1 for w in self.weights) else None

    def descriptors_allowed(self) -> bool:
        """Whether TMA can read every weight."""
        layout = self.layout()
        if layout is None:
            return False
        return all(tma_readable(w if layout == "nk" else w.t()) for w in self.weights)

    def kernel_args(self, config: Config, out: torch.Tensor) -> dict[str, Any]:
        """Arguments w0, w1, biases and their strides of a kernel over one or two weights."""
        first, last = self.weights[0], self.weights[-1]
        bias0, bias1 = (self.biases[0], self.biases[-1]) if self.biases else (out, out)
        kn = self.layout() == "kn"
        return {
            "w0": _weight_operand(first, kn, config),
            "w1": _weight_operand(last, kn, config),
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


def tma_readable(matrix: torch.Tensor) -> bool:
    """Whether a tensor descriptor can cover a 2-D tensor: contiguous rows at 16-byte steps, not empty."""
    return (
        matrix.numel() > 0
        and matrix.stride(1) == 1
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.stride(0) >= matrix.shape[1]
    )


def row_block_operand(matrix: torch.Tensor, config: Config) -> Any:
    """A [M, K] operand: a descriptor of [block_m, block_k] tiles, or the tensor for pointer loads."""
    return _descriptor(matrix, config.block_m, config.block_k) if config.desc else matrix


def _weight_operand(weight: torch.Tensor, kn: bool, config: Config) -> Any:
    if not config.desc:
        return weight
    if kn:
        return _descriptor(weight.t(), config.block_k, config.block_n)
    return _descriptor(weight, config.block_n, config.block_k)


def _descriptor(matrix: torch.Tensor, block_rows: int, block_cols: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if matrix.numel() == 0:
        # A rank without rows never loads; the descriptor still needs a valid address.
        matrix = matrix.new_empty(1, max(matrix.shape[1], 16))
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_cols]
    )


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


def dot_precision(dtype: torch.dtype) -> str:
    """`tl.dot`'s input precision: exact fp32 unless PyTorch's tf32 switch is on."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


__all__ = [
    "GATED",
    "Weights",
    "block_args",
    "dot_precision",
    "row_block_operand",
    "tma_readable",
    "triton_dtype",
]
