"""How GEMM kernels read their operands: tensor descriptors where the hardware takes them.

Shapes: x [M, K], weights [N, K] in either layout. Needs no Triton until an operand is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ops.matmul.configs import Config, finish_columns, has_descriptors

_DESCRIPTOR_ALIGNMENT_BYTES = 16


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def descriptor_allowed(tensor: torch.Tensor) -> bool:
    """Whether a tensor [..., rows, columns] can be read through a 2-D descriptor where it lies.

    Its rows must be contiguous, not overlap, and start at multiples of 16 bytes; batches must lie
    whole rows apart.
    """
    columns = tensor.shape[-1]
    row_stride = tensor.stride(-2)
    row_bytes = row_stride * tensor.element_size()
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and row_stride >= columns
        and row_bytes % _DESCRIPTOR_ALIGNMENT_BYTES == 0
        and tensor.data_ptr() % _DESCRIPTOR_ALIGNMENT_BYTES == 0
        and (tensor.dim() == 2 or (tensor.stride(0) % row_stride == 0 and tensor.stride(0) > 0))
    )


def merge_batches(tensor: torch.Tensor) -> torch.Tensor:
    """All batches of [B, rows, columns] as the rows of one matrix, batches `batch_rows` apart."""
    if tensor.dim() == 2:
        return tensor
    rows = (tensor.shape[0] - 1) * batch_rows(tensor) + tensor.shape[1]
    return tensor.as_strided((rows, tensor.shape[2]), (tensor.stride(1), 1))


def batch_rows(tensor: torch.Tensor) -> int:
    """Rows from one batch to the next in `merge_batches`; 0 for a matrix or overlapping rows."""
    if tensor.dim() == 2 or tensor.stride(1) == 0:
        return 0
    return tensor.stride(0) // tensor.stride(1)


def weights_are_kn(weights: Sequence[torch.Tensor]) -> bool:
    """Whether all weights [..., N, K] lie in memory as [..., K, N], such as `stored.mT`."""
    return all(weight.stride(-2) == 1 and weight.stride(-1) != 1 for weight in weights)


def descriptors_allowed(
    x: torch.Tensor, weights: Sequence[torch.Tensor], arch: str, block_k: int = 1
) -> bool:
    """Whether x and all weights can be read through tensor descriptors on `arch`.

    Batches of [K, N] weights need a K that `block_k` divides: a tile that reaches beyond would
    read the next batch, which x's zeros cancel unless it is infinite or NaN.
    """
    kn = weights_are_kn(weights)
    if kn and x.dim() == 3 and x.shape[-1] % block_k:
        return False
    stored = [weight.mT for weight in weights] if kn else weights
    return has_descriptors(arch) and all(descriptor_allowed(each) for each in (x, *stored))


def row_operand(matrix: torch.Tensor, config: Config) -> Any:
    """What the tile loop reads x [M, K] through: a descriptor, or the tensor's address."""
    return _descriptor(matrix, config.block_m, config.block_k) if config.desc else matrix


def weight_operand(weight: torch.Tensor, config: Config, kn: bool) -> Any:
    """What the tile loop reads a weight [N, K] through; `kn`: it lies in memory as [K, N]."""
    if not config.desc:
        return weight
    if kn:
        return _descriptor(weight.t(), config.block_k, config.block_n)
    return _descriptor(weight, config.block_n, config.block_k)


def _descriptor(matrix: torch.Tensor, block_rows: int, block_columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if matrix.numel() == 0:
        # A rank without rows never loads; the descriptor still needs a valid address.
        matrix = matrix.new_empty(1, max(matrix.shape[1], _DESCRIPTOR_ALIGNMENT_BYTES))
    return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])


def out_descriptor_allowed(out: torch.Tensor) -> bool:
    """Whether out [M, N] or [B, M, N] can be written through a descriptor where it lies.

    Its last dim must be contiguous, and all else start at multiples of 16 bytes.
    """
    strides = [stride * out.element_size() for stride in out.stride()[:-1]]
    return (
        out.numel() > 0
        and out.stride(-1) == 1
        and all(stride > 0 and stride % _DESCRIPTOR_ALIGNMENT_BYTES == 0 for stride in strides)
        and out.data_ptr() % _DESCRIPTOR_ALIGNMENT_BYTES == 0
    )


def out_descriptor(out: torch.Tensor, config: Config, num_weights: int) -> Any:
    """What `finish_tile` stores out [M, N] or [B, M, N] through with OUT_DESC."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [config.block_m, finish_columns(config, num_weights)]
    return TensorDescriptor.from_tensor(out, block if out.dim() == 2 else [1, *block])


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of fp32 products: "tf32" where torch is told to allow it, else "ieee"."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype is torch.float32 and tf32 else "ieee"


__all__ = [
    "FP8_DTYPES",
    "batch_rows",
    "descriptor_allowed",
    "descriptors_allowed",
    "dot_precision",
    "merge_batches",
    "out_descriptor",
    "out_descriptor_allowed",
    "row_operand",
    "weight_operand",
    "weights_are_kn",
]
