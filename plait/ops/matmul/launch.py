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
    out_descriptor,
    out_descriptor_allowed,
    row_operand,
    weight_operand,
    weights_are_kn,
)

# What the kernel does not touch is None, or a stride of 1: Triton drops both from the launch.
_UNUSED = 1

# How many fp8 products the tensor cores may add in their short accumulator before fp32 takes over.
# Relative error of a random product on one H200 (torch's own: 1.3e-4 in fp32, 1.66e-3 in bf16,
# where rounding the result dominates): 128 products 1.3e-4, 256 2.1e-4, 2048 8.5e-4, 4096 1.3e-3.
_FP8_STEP = 128
_FP8_STEP_BF16 = 4096


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
    chained: bool = False,
) -> Program:
    """One persistent launch that writes `out`, and `pre` where it is not empty; with splits two.

    `weights` holds one tensor or, for a gate, two; `biases` and `pre` are empty or as long. The
    tensors of `pre` share their strides. x [M, K] or [B, M, K], weight and out alike; `addend`
    like out is added before the activation. `config.desc` needs `descriptors_allowed(...)`.
    `fast_accum`: fp8 sums stay in the tensor core's short accumulator. `chained`: an early launch
    that follows may start as soon as all blocks of this one have.
    """
    from plait.ops.matmul.gemm_kernels import _matmul_kernel

    M, N = out.shape[-2:]
    program = Program("matmul")
    if out.numel() == 0:
        return program
    if config.splits > 1 and (len(weights) > 1 or (scaling and scaling.kind == "blocks")):
        config = replace(config, splits=1)
    if addend is not None and config.block_m * config.block_n > 128 * 128:
        # Its tile passes through shared memory as well.
        config = replace(config, num_stages=min(config.num_stages, 3))
    blocks = num_sms * config.blocks_per_sm
    num_batches = out.shape[0] if out.dim() == 3 else 1
    K = x.shape[-1]
    split_k = -(-max(K, 1) // config.splits // config.block_k) * config.block_k
    integer = x.dtype is torch.int8
    tiles = -(-M // config.block_m) * -(-N // config.block_n) * num_batches
    whole_tiles = tiles // blocks * blocks if config.split_tail else 0
    split_tiles = tiles - whole_tiles if config.splits > 1 else 0
    parts = None
    if split_tiles:
        parts_dtype = torch.int32 if integer else torch.float32
        shape = (config.splits, split_tiles, config.block_m, config.block_n)
        parts = out.new_empty(shape, dtype=parts_dtype)
    epilogue = _epilogue(biases, out, pre, addend, scaling, activation)
    out_desc = (
        config.desc_store and out_descriptor_allowed(out) and (whole_tiles > 0 or not split_tiles)
    )
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
        "whole_tiles": whole_tiles,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "NUM_WEIGHTS": len(weights),
        "BATCHED": out.dim() == 3,
        "SPLIT": "none" if not split_tiles else "tail" if whole_tiles else "all",
        "INTEGER": integer,
        "DESC": config.desc,
        "OUT_DESC": out_desc,
        "FLATTEN": config.flatten,
        "PRECISION": precision or dot_precision(x.dtype),
        "EARLY": chained or (config.desc and split_tiles > 0),
        "FP8_STEP": fp8_step(x, out, fast_accum, config),
    }
    if out_desc:
        args["out_ptr"] = out_descriptor(out, config, len(weights))
    grid = min(tiles - split_tiles + split_tiles * config.splits, blocks)
    program.add(Launch(_matmul_kernel, grid, args, config.num_warps, config.num_stages))
    if parts is not None:
        program.add(_sum_splits(parts, whole_tiles, M, N, config, epilogue))
    return program


def _sum_splits(
    parts: torch.Tensor, whole_tiles: int, M: int, N: int, config: Config, epilogue: dict[str, Any]
) -> Launch:
    from plait.ops.matmul.gemm_kernels import _sum_splits_kernel

    sum_m, sum_n = (1 if M == 1 else 4), min(config.block_n, 128)
    num_tiles = parts.shape[1]
    rows_per_tile = min(config.block_m, M)
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
        "num_tiles": num_tiles,
        "M": M,
        "N": N,
        "num_splits": config.splits,
        "whole_tiles": whole_tiles,
        "rows_per_tile": rows_per_tile,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SUM_M": sum_m,
        "SUM_N": sum_n,
        "GROUP_M": config.group_m,
        "EARLY": config.desc,
    }
    grid = num_tiles * -(-rows_per_tile // sum_m) * (config.block_n // sum_n)
    return Launch(_sum_splits_kernel, grid, args, num_warps=4, num_stages=1, early=config.desc)


def fp8_step(x: torch.Tensor, out: torch.Tensor, fast_accum: bool, config: Config) -> int:
    """After how many products fp8 sums move to fp32, a multiple of block_k; 0: never."""
    if x.dtype not in FP8_DTYPES or fast_accum:
        return 0
    step = _FP8_STEP_BF16 if out.dtype is torch.bfloat16 else _FP8_STEP
    step = max(step, config.block_k)
    return 0 if x.shape[-1] <= step else step


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


__all__ = ["Scaling", "fp8_step", "plan_matmul"]
