"""From checked 2-D operands to the `Program` of `plait.matmul`. Pure: builds, does not run.

Shapes: x [M, K], weights [N, K], biases [N], out and pre [M, N]; any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from plait.backends.commands import Launch, Program
from plait.ops.matmul.configs import Config
from plait.ops.matmul.operands import (
    FP8_DTYPES,
    batch_rows,
    dot_precision,
    merge_batches,
    row_operand,
    weight_operand,
    weights_are_kn,
)

# What the kernel does not touch is None, or a stride of 1: Triton drops both from the launch.
_UNUSED = 1

_PRECISE_FP8_STEP = 128  # products that the short accumulator may add before fp32 takes over


@dataclass(frozen=True)
class Scaling:
    """Scales of quantized operands, fp32.

    Kind "rows": x [M] or [1], weight [N] or [1]. Kind "blocks": x [M, K / 128], weight [N / 128,
    K / 128], both rounded up. With B in front for batches, except [1].
    """

    kind: Literal["rows", "blocks"]
    x: torch.Tensor
    weight: torch.Tensor


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
    scaling: Scaling | None = None,
    addend: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> Program:
    """One persistent launch that writes `out`, and `pre` where it is not empty; with splits two.

    `weights` holds one tensor or, for a gate, two; `biases` and `pre` are empty or as long. The
    tensors of `pre` share their strides. x [M, K] or [B, M, K], weight and out alike; `addend`
    like out is added before the activation. `config.desc` needs `descriptors_allowed(...)`.
    `fast_accum`: fp8 sums stay in the tensor core's short accumulator.
    """
    from plait.ops.matmul.gemm_kernels import _matmul_kernel

    M, N = out.shape[-2:]
    program = Program("matmul")
    if out.numel() == 0:
        return program
    if config.splits > 1 and (len(weights) > 1 or (scaling and scaling.kind == "blocks")):
        config = replace(config, splits=1)
    num_batches = out.shape[0] if out.dim() == 3 else 1
    K = x.shape[-1]
    split_k = -(-max(K, 1) // config.splits // config.block_k) * config.block_k
    integer = x.dtype is torch.int8
    parts = None
    if config.splits > 1:
        parts_dtype = torch.int32 if integer else torch.float32
        parts = out.new_empty((config.splits, num_batches, M, N), dtype=parts_dtype)
    epilogue = _epilogue(biases, out, pre, addend, scaling, activation)
    args = {
        **_operands(x, weights, config),
        **epilogue,
        "parts_ptr": parts,
        "num_batches": num_batches,
        "M": M,
        "N": N,
        "K": K,
        "split_k": split_k,
        "num_splits": config.splits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "NUM_WEIGHTS": len(weights),
        "BATCHED": out.dim() == 3,
        "SPLIT": config.splits > 1,
        "INTEGER": integer,
        "DESC": config.desc,
        "PRECISION": precision or dot_precision(x.dtype),
        "IMPRECISE_ACC": _imprecise_acc(x.dtype, fast_accum, config.block_k),
    }
    tiles = -(-M // config.block_m) * -(-N // config.block_n) * num_batches * config.splits
    grid = min(tiles, num_sms * config.blocks_per_sm)
    program.add(Launch(_matmul_kernel, grid, args, config.num_warps, config.num_stages))
    if parts is not None:
        program.add(_sum_splits(parts, num_batches, M, N, config.splits, epilogue))
    return program


def _sum_splits(
    parts: torch.Tensor, num_batches: int, M: int, N: int, splits: int, epilogue: dict[str, Any]
) -> Launch:
    from plait.ops.matmul.gemm_kernels import _sum_splits_kernel

    block_m = 1 if M == 1 else 4
    block_n = 256 if M == 1 else 128
    shared = (
        "x_scale_ptr", "w_scale_ptr", "addend_ptr", "out_ptr",
        "stride_xsb", "stride_xsm", "stride_wsb", "stride_wsn", "stride_ab",
        "stride_am", "stride_an", "stride_ob", "stride_om", "stride_on",
        "stride_pb", "stride_pm", "stride_pn",
        "SCALES", "ACT", "HAS_BIAS", "HAS_ADDEND", "STORE_PRE",
    )  # fmt: skip
    args = {
        **{name: epilogue[name] for name in shared},
        "parts_ptr": parts,
        "bias_ptr": epilogue["bias0_ptr"],
        "stride_bias": epilogue["stride_bias0"],
        "pre_ptr": epilogue["pre0_ptr"],
        "num_batches": num_batches,
        "M": M,
        "N": N,
        "num_splits": splits,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    grid = num_batches * -(-M // block_m) * -(-N // block_n)
    return Launch(_sum_splits_kernel, grid, args, num_warps=4, num_stages=1)


def _imprecise_acc(dtype: torch.dtype, fast_accum: bool, block_k: int) -> int | None:
    if dtype not in FP8_DTYPES or fast_accum:
        return None
    return min(_PRECISE_FP8_STEP, block_k)  # Triton takes no more than one step of K


def _operands(x: torch.Tensor, weights: Sequence[torch.Tensor], config: Config) -> dict[str, Any]:
    w0, w1 = weights[0], weights[-1]
    kn = config.desc and weights_are_kn(weights)
    return {
        "x": row_operand(merge_batches(x) if config.desc else x, config),
        "w0": weight_operand(_merged_weight(w0, kn) if config.desc else w0, config, kn),
        "w1": None if len(weights) == 1 else weight_operand(w1, config, kn),
        "stride_xb": _batch_stride(x),
        "stride_xm": x.stride(-2),
        "stride_xk": x.stride(-1),
        "stride_w0b": _batch_stride(w0),
        "stride_w0n": w0.stride(-2),
        "stride_w0k": w0.stride(-1),
        "stride_w1n": _UNUSED if len(weights) == 1 else w1.stride(-2),
        "stride_w1k": _UNUSED if len(weights) == 1 else w1.stride(-1),
        "x_batch_rows": batch_rows(x) if x.dim() == 3 else _UNUSED,
        "w_batch_rows": batch_rows(w0.transpose(-1, -2) if kn else w0)
        if w0.dim() == 3
        else _UNUSED,
        "B_KN": kn,
    }


def _merged_weight(weight: torch.Tensor, kn: bool) -> torch.Tensor:
    return merge_batches(weight.transpose(-1, -2)).t() if kn else merge_batches(weight)


def _epilogue(
    biases: Sequence[torch.Tensor],
    out: torch.Tensor,
    pre: Sequence[torch.Tensor],
    addend: torch.Tensor | None,
    scaling: Scaling | None,
    activation: str,
) -> dict[str, Any]:
    bias0, bias1 = (biases[0], biases[-1]) if biases else (None, None)
    pre0, pre1 = (pre[0], pre[-1]) if pre else (None, None)
    x_scale, w_scale = (None, None) if scaling is None else (scaling.x, scaling.weight)
    if addend is not None:
        addend = addend.expand(out.shape)  # one matrix may serve all batches
    return {
        "x_scale_ptr": x_scale,
        "w_scale_ptr": w_scale,
        "bias0_ptr": bias0,
        "bias1_ptr": bias1,
        "addend_ptr": addend,
        "out_ptr": out,
        "pre0_ptr": pre0,
        "pre1_ptr": pre1,
        **_scale_strides("xs", "m", x_scale, scaling),
        **_scale_strides("ws", "n", w_scale, scaling),
        "stride_bias0": _UNUSED if bias0 is None else bias0.stride(-1),
        "stride_bias1": _UNUSED if bias1 is None else bias1.stride(-1),
        **_matrix_strides("a", "mn", addend),
        **_matrix_strides("o", "mn", out),
        **_matrix_strides("p", "mn", pre0),
        "SCALES": "none" if scaling is None else scaling.kind,
        "ACT": activation,
        "HAS_BIAS": bool(biases),
        "HAS_ADDEND": addend is not None,
        "STORE_PRE": bool(pre),
    }


def _batch_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(0) if tensor.dim() == 3 else _UNUSED


def _matrix_strides(name: str, dims: str, matrix: torch.Tensor | None) -> dict[str, int]:
    """Strides of batch, row and column."""
    if matrix is None:
        return dict.fromkeys((f"stride_{name}b", *(f"stride_{name}{dim}" for dim in dims)), _UNUSED)
    return {
        f"stride_{name}b": _batch_stride(matrix),
        f"stride_{name}{dims[0]}": matrix.stride(-2),
        f"stride_{name}{dims[1]}": matrix.stride(-1),
    }


def _scale_strides(
    name: str, row: str, scale: torch.Tensor | None, scaling: Scaling | None
) -> dict[str, int]:
    """Strides of batch, row and block of K; 0 along a dim of size 1, or that is not there."""
    if scale is None or scaling is None:
        return dict.fromkeys((f"stride_{name}b", f"stride_{name}{row}", f"stride_{name}k"), _UNUSED)
    dims = [scale.stride(i) if scale.shape[i] > 1 else 0 for i in range(scale.dim())]
    if scaling.kind == "rows":
        dims = [*dims, 0]
    batch, rows, blocks = [*[0] * (3 - len(dims)), *dims]
    return {f"stride_{name}b": batch, f"stride_{name}{row}": rows, f"stride_{name}k": blocks}


__all__ = ["Scaling", "plan_matmul"]
