"""From checked 2-D operands to the `Program` of `plait.matmul`. Pure: builds, does not run.

Shapes: x [M, K], weights [N, K], biases [N], out and pre [M, N]; any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from plait.backends.commands import Launch, Program
from plait.ops.matmul import kernels
from plait.ops.matmul.configs import Config, has_descriptors

_DESCRIPTOR_ALIGNMENT_BYTES = 16


def descriptor_allowed(tensor: torch.Tensor) -> bool:
    """Whether a 2-D tensor can be read through a tensor descriptor as it lies in memory.

    Its rows must be contiguous, not overlap, and start at multiples of 16 bytes.
    """
    rows, columns = tensor.shape
    row_bytes = tensor.stride(0) * tensor.element_size()
    return (
        rows > 0
        and columns > 0
        and tensor.stride(1) == 1
        and tensor.stride(0) >= columns
        and row_bytes % _DESCRIPTOR_ALIGNMENT_BYTES == 0
        and tensor.data_ptr() % _DESCRIPTOR_ALIGNMENT_BYTES == 0
    )


def weights_are_kn(weights: Sequence[torch.Tensor]) -> bool:
    """Whether all weights [N, K] lie in memory as [K, N], such as `stored.t()`."""
    return all(weight.stride(0) == 1 and weight.stride(1) != 1 for weight in weights)


def descriptors_allowed(x: torch.Tensor, weights: Sequence[torch.Tensor], arch: str) -> bool:
    """Whether x and all weights can be read through tensor descriptors on `arch`."""
    stored = [weight.t() for weight in weights] if weights_are_kn(weights) else weights
    return has_descriptors(arch) and all(descriptor_allowed(each) for each in (x, *stored))


def weight_operand(weight: torch.Tensor, config: Config, kn: bool) -> Any:
    """What the tile loop reads a weight [N, K] through: a descriptor, or the tensor's address."""
    if not config.desc:
        return weight
    if kn:
        return TensorDescriptor.from_tensor(weight.t(), [config.block_k, config.block_n])
    return TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of fp32 products: "tf32" where torch is told to allow it, else "ieee"."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype is torch.float32 and tf32 else "ieee"


def plan_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
    pre: Sequence[torch.Tensor] = (),
    *,
    activation: str,
    config: Config,
    num_sms: int,
    precision: str | None = None,
) -> Program:
    """One persistent launch that writes `out`, and `pre` where it is not empty.

    `weights` holds one tensor or, for a gate, two; `biases` and `pre` are empty or as long. The
    tensors of `pre` share their strides. `config.desc` needs `descriptors_allowed(...)`.
    """
    M, N = out.shape
    program = Program("matmul")
    if M == 0 or N == 0:
        return program
    kn = config.desc and weights_are_kn(weights)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    args = {
        **_operands(x, weights, config, kn),
        **_epilogue_tensors(biases, out, pre),
        "M": M,
        "N": N,
        "K": x.shape[1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "NUM_WEIGHTS": len(weights),
        "ACT": activation,
        "HAS_BIAS": bool(biases),
        "STORE_PRE": bool(pre),
        "DESC": config.desc,
        "B_KN": kn,
        "PRECISION": precision or dot_precision(x.dtype),
    }
    return program.add(
        Launch(
            kernels._matmul_kernel,
            grid=min(tiles, num_sms),
            args=args,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            stream="main",
        )
    )


def _operands(
    x: torch.Tensor, weights: Sequence[torch.Tensor], config: Config, kn: bool
) -> dict[str, Any]:
    w0, w1 = weights[0], weights[-1]
    block_x = [config.block_m, config.block_k]
    return {
        "x": TensorDescriptor.from_tensor(x, block_x) if config.desc else x,
        "w0": weight_operand(w0, config, kn),
        "w1": weight_operand(w1, config, kn),
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_w0n": w0.stride(0),
        "stride_w0k": w0.stride(1),
        "stride_w1n": w1.stride(0),
        "stride_w1k": w1.stride(1),
    }


def _epilogue_tensors(
    biases: Sequence[torch.Tensor], out: torch.Tensor, pre: Sequence[torch.Tensor]
) -> dict[str, Any]:
    # `out` stands in for what the kernel does not touch: an address is needed, any will do.
    bias0, bias1 = (biases[0], biases[-1]) if biases else (out, out)
    pre0, pre1 = (pre[0], pre[-1]) if pre else (out, out)
    return {
        "bias0_ptr": bias0,
        "bias1_ptr": bias1,
        "out_ptr": out,
        "pre0_ptr": pre0,
        "pre1_ptr": pre1,
        "stride_bias0": bias0.stride(0),
        "stride_bias1": bias1.stride(0),
        "stride_om": out.stride(0),
        "stride_on": out.stride(1),
        "stride_pm": pre0.stride(0),
        "stride_pn": pre0.stride(1),
    }


__all__ = [
    "descriptor_allowed",
    "descriptors_allowed",
    "dot_precision",
    "plan_matmul",
    "weight_operand",
    "weights_are_kn",
]
