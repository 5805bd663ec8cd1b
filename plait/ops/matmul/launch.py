"""From checked 2-D operands to the `Program` of `plait.matmul`. Pure: builds, does not run.

Shapes: x [M, K], weights [N, K], biases [N], out and pre [M, N]; any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.backends.commands import Launch, Program
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import dot_precision, row_operand, weight_operand, weights_are_kn


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
    from plait.ops.matmul.kernels import _matmul_kernel

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
            _matmul_kernel,
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
    return {
        "x": row_operand(x, config),
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


__all__ = ["plan_matmul"]
