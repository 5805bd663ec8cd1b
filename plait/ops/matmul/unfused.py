"""`plait.matmul` by torch's own kernels: a product, then what the fused kernel has inside.

Shapes: flat operands, x [M, K], weight [N, K], result [M, N], or all of them with B in front.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.operands import FP8_DTYPES
from plait.ops.matmul.product import Product
from plait.ops.matmul.reference import activation_reference, dequantize, integer_product

_ALIGNMENT = 16  # torch's fp8 kernels take sizes and strides that this many elements divide
_INT_MM_ALIGNMENT = 8
_INT_MM_ROWS = 17


def unfused_matmul(product: Product) -> torch.Tensor:
    """The result of `product`, without `out`."""
    flat = product.flat()
    if not product.quantized:
        return _float_matmul(flat).to(product.out_dtype).reshape(product.shape)
    pre = [_quantized_product(flat, index) for index in range(len(flat.weights))]
    if flat.biases:
        pre = [value + bias for value, bias in zip(pre, flat.biases, strict=True)]
    if flat.addend is not None:
        pre = [value + flat.addend for value in pre]
    result = activation_reference(pre, product.activation)
    return result.to(product.out_dtype).reshape(product.shape)


def _float_matmul(flat: Product) -> torch.Tensor:
    x = flat.x
    wide_bias = any(bias.dtype != x.dtype for bias in flat.biases)
    if flat.addend is not None:
        return activation_reference([_add_matrix(flat)], flat.activation)
    if flat.batched or wide_bias:
        pre = [torch.matmul(x, weight.mT) for weight in flat.weights]
        if flat.biases:
            pre = [value + bias for value, bias in zip(pre, flat.biases, strict=True)]
    else:
        pre = [
            F.linear(x, weight, flat.biases[i] if flat.biases else None)
            for i, weight in enumerate(flat.weights)
        ]
    return activation_reference(pre, flat.activation)


def _add_matrix(flat: Product) -> torch.Tensor:
    """x @ weight^T + addend + bias, by one torch call where the dtypes allow it."""
    (weight,), addend = flat.weights, flat.addend
    assert addend is not None, "only called with an addend"
    if flat.biases:
        addend = addend.to(flat.sum_dtype) + flat.biases[0]
    if addend.dtype != flat.x.dtype:
        return torch.matmul(flat.x, weight.mT).to(flat.sum_dtype) + addend
    if flat.batched:
        return torch.baddbmm(addend, flat.x, weight.mT)
    return torch.addmm(addend, flat.x, weight.mT)


def _quantized_product(flat: Product, index: int) -> torch.Tensor:
    """scale * (x @ weight^T): int32 without scales, else fp32 or as torch rounds it."""
    x, weight = flat.x, flat.weights[index]
    if not flat.scalings:
        return _int_mm(x, weight) if _int_mm_takes(x, weight) else integer_product(x, weight)
    scaling = flat.scalings[index]
    if _scaled_mm_takes(flat, scaling, weight):
        return _scaled_mm(flat, scaling, weight)
    if x.dtype is torch.int8 and scaling.kind == "rows":
        scale = scaling.x.unsqueeze(-1) * scaling.weight.unsqueeze(-2)
        takes = _int_mm_takes(x, weight)
        exact = _int_mm(x, weight) if takes else torch.matmul(x.double(), weight.double().mT)
        return (exact * scale).float()
    left, right = dequantize(x, weight, scaling.kind, scaling.x, scaling.weight)
    return torch.matmul(left, right.mT)


def _int_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, weight.t())  # pyright: ignore[reportPrivateImportUsage]


def _scaled_mm(flat: Product, scaling: Scaling, weight: torch.Tensor) -> torch.Tensor:
    """In the dtype of the result if nothing is added to it later, else in fp32 where torch can."""
    x, x_scale, w_scale = flat.x, scaling.x, scaling.weight
    last = not flat.biases and flat.addend is None and flat.activation == "none"
    out_dtype = flat.out_dtype if last else torch.float32
    if _has_row_scales(scaling):
        x_scale = x_scale.expand(x.shape[0])[:, None].contiguous()
        w_scale = w_scale.expand(weight.shape[0])[None, :].contiguous()
        out_dtype = torch.bfloat16
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x,
        weight.t(),
        x_scale,
        w_scale,
        out_dtype=out_dtype,
        use_fast_accum=flat.fast_accum,
    )


def _has_row_scales(scaling: Scaling) -> bool:
    return scaling.x.numel() > 1 or scaling.weight.numel() > 1


def torch_has_kernel(product: Product) -> bool:
    """Whether torch multiplies these operands without converting them first."""
    if not product.quantized:
        return True
    flat = product.flat()
    if not flat.scalings:
        return all(_int_mm_takes(flat.x, weight) for weight in flat.weights)
    pairs = zip(flat.scalings, flat.weights, strict=True)
    return all(_scaled_mm_takes(flat, scaling, weight) for scaling, weight in pairs)


def _int_mm_takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and x.dim() == weight.dim() == 2
        and x.shape[0] >= _INT_MM_ROWS
        and x.shape[1] > 0
        and x.shape[1] % _INT_MM_ALIGNMENT == 0
        and weight.shape[0] > 0
        and weight.shape[0] % _INT_MM_ALIGNMENT == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def _scaled_mm_takes(flat: Product, scaling: Scaling, weight: torch.Tensor) -> bool:
    """fp8 with one scale, or one a row and a bf16 result, on a GPU, aligned, not e5m2 twice."""
    x = flat.x
    return (
        x.is_cuda
        and x.dtype in FP8_DTYPES
        and scaling.kind == "rows"
        and (flat.out_dtype is torch.bfloat16 or not _has_row_scales(scaling))
        and not flat.batched
        and not (x.dtype is weight.dtype is torch.float8_e5m2)
        and min(flat.flat_shape) > 0
        and x.shape[1] > 0
        and x.shape[1] % _ALIGNMENT == 0
        and weight.shape[0] % _ALIGNMENT == 0
        and all(
            each.stride(1) == 1
            and each.stride(0) % _ALIGNMENT == 0
            and each.data_ptr() % _ALIGNMENT == 0
            for each in (x, weight)
        )
    )


__all__ = ["torch_has_kernel", "unfused_matmul"]
