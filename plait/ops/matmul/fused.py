"""The fused kernel under `plait.matmul`: its config, one run of it, and gradients.

Shapes: flat operands, x [M, K], weight [N, K], result [M, N], or all of them with B in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from plait.backends.base import executor_for
from plait.device import DeviceInfo, device_info
from plait.errors import ArgumentError
from plait.ops.matmul.configs import Config, is_valid
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.operands import (
    FP8_DTYPES,
    descriptors_allowed,
    dot_precision,
    weights_are_kn,
)
from plait.ops.matmul.product import Product
from plait.ops.matmul.reference import SCALE_BLOCK, activation_backward_reference
from plait.ops.matmul.tuned import Source, choose_config

_LEAST_BLOCK = 16
_ELEMENTS_OF_TWO_TILES = 2048  # of a tile, for each warp: twice 64 registers of a thread


def config_for(product: Product, info: DeviceInfo) -> Config:
    """The config asked for, if the kernel can run a flat `product` with it, or one that it can."""
    if product.config is None:
        return chosen_config(product, info)[0]
    _check_config(product.config, product, info, dot_precision(product.x.dtype))
    return product.config


def chosen_config(
    product: Product, info: DeviceInfo, *, use_tables: bool = True
) -> tuple[Config, Source]:
    """A config that the kernel can run a flat `product` with, and where it comes from.

    With `use_tables` False it is computed, never looked up.
    """
    x, weights = product.x, product.weights
    num_m, num_n = product.flat_shape[-2:]
    allowed = descriptors_allowed(x, weights, info.arch)
    while True:
        config, source = choose_config(
            num_m,
            num_n,
            x.shape[-1],
            x.dtype,
            info,
            allowed,
            num_weights=len(weights),
            precision=dot_precision(x.dtype),
            layout="kn" if weights_are_kn(weights) else "nk",
            scales=_kind_of_scales(product),
            fast_accum=product.fast_accum,
            batch=x.shape[0] if product.batched else 0,
            use_tables=use_tables,
        )
        config = _fit(config, product, info, measured=source != "default")
        if not config.desc or descriptors_allowed(x, weights, info.arch, config.block_k):
            return config, source
        allowed = False


def _kind_of_scales(product: Product) -> str:
    if not product.scalings:
        return "none"
    scaling = product.scalings[0]
    single = scaling.kind == "rows" and scaling.x.numel() == scaling.weight.numel() == 1
    return "tensor" if single else scaling.kind


def _fit(config: Config, product: Product, info: DeviceInfo, *, measured: bool) -> Config:
    """`config` with what scales ask for beyond the sizes."""
    dtype = product.x.dtype
    by_blocks = _kind_of_scales(product) == "blocks"
    if by_blocks:  # one step of K has one scale
        config = replace(config, block_k=SCALE_BLOCK, splits=1)
    second_tile = by_blocks or (dtype in FP8_DTYPES and not product.fast_accum)
    if second_tile and not measured and info.arch != "cpu":
        # What one step of K gave is a tile of its own, which is then added to the sum in fp32.
        limit = _ELEMENTS_OF_TWO_TILES * config.num_warps
        while config.block_m * config.block_n > limit and config.block_n > _LEAST_BLOCK:
            config = replace(config, block_n=config.block_n // 2)
    while config.num_stages > 1 and not is_valid(config, dtype, info.arch):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _check_config(config: Config, product: Product, info: DeviceInfo, precision: str) -> None:
    x, weights = product.x, product.weights
    valid = is_valid(config, x.dtype, info.arch, num_weights=len(weights), precision=precision)
    reason = ""
    if not valid:
        reason = f"a config that is valid for {x.dtype} on {info.arch}"
    elif config.desc and not descriptors_allowed(x, weights, info.arch, config.block_k):
        reason = "desc=False for these strides and addresses"
    elif _kind_of_scales(product) == "blocks" and (config.block_k, config.splits) != (
        SCALE_BLOCK,
        1,
    ):
        reason = f"block_k={SCALE_BLOCK} and splits=1 with block scales"
    elif len(weights) > 1 and config.splits != 1:
        reason = "splits=1 with two weights"
    if reason:
        remedy = "Change it, or pass config=None to have one chosen."
        raise ArgumentError("config", reason, config, remedy)


def run_kernel(product: Product, out: torch.Tensor, pre: Sequence[torch.Tensor] = ()) -> None:
    """Plan and run the kernel for a flat `product` into `out` and `pre`, of `flat_shape`."""
    info = device_info(product.x.device)
    program = plan_matmul(
        product.x,
        product.weights,
        product.biases,
        out,
        pre,
        activation=product.activation,
        config=config_for(product, info),
        num_sms=info.num_sms,
        precision=dot_precision(product.x.dtype),
        scaling=product.scalings[0] if product.scalings else None,
        addend=product.addend,
        fast_accum=product.fast_accum,
    )
    executor_for(product.x.device).run(program)


class _FusedMatmul(torch.autograd.Function):
    """The kernel forward; gradients by torch from the saved pre-activations."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Product,
        x: torch.Tensor,
        addend: torch.Tensor | None,
        *weights_and_biases: torch.Tensor,
    ) -> torch.Tensor:
        count = len(product.weights)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        out = x.new_empty(product.flat_shape, dtype=product.out_dtype)
        keeps_pre = product.activation != "none" and any(ctx.needs_input_grad)
        pre = [x.new_empty(product.flat_shape) for _ in weights] if keeps_pre else []
        run_kernel(replace(product, x=x, weights=weights, biases=biases, addend=addend), out, pre)
        ctx.activation = product.activation
        ctx.num_weights = count
        ctx.addend_form = None if addend is None else (addend.shape, addend.dtype)
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        ctx.save_for_backward(x, *weights, *pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        weights, pre = saved[: ctx.num_weights], saved[ctx.num_weights :]
        wide = [value.float() for value in pre]
        grads = activation_backward_reference(grad.float(), wide, ctx.activation)
        _, needs_x, needs_addend, *needs = ctx.needs_input_grad
        needs_w, needs_b = needs[: ctx.num_weights], needs[ctx.num_weights :]
        grad_addend = None
        if needs_addend:
            shape, dtype = ctx.addend_form
            grad_addend = grads[0].sum_to_size(shape).to(dtype)
        grad_bias = [
            each.flatten(0, -2).sum(0).to(dtype) if need else None
            for each, need, dtype in zip(grads, needs_b, ctx.bias_dtypes, strict=False)
        ]
        narrow = [each.to(x.dtype) for each in grads]
        grad_x = None
        if needs_x:
            grad_x = narrow[0] @ weights[0]
            for each, weight in zip(narrow[1:], weights[1:], strict=True):  # a gate: no batches
                grad_x = torch.addmm(grad_x, each, weight)
        grad_weight = [
            each.mT @ x if need else None for each, need in zip(narrow, needs_w, strict=True)
        ]
        return None, grad_x, grad_addend, *grad_weight, *grad_bias


def fused_matmul(product: Product) -> torch.Tensor:
    """Run the kernel; writes `product.out` where it can, and returns it then."""
    flat = product.flat()
    out = product.out
    if out is None and not product.quantized:
        result = _FusedMatmul.apply(flat, flat.x, flat.addend, *flat.weights, *flat.biases)
        return result.reshape(product.shape)
    target = None if out is None else _writable(product, out)
    if target is not None:
        run_kernel(flat, target)
        return out if out is not None else target
    result = flat.x.new_empty(product.flat_shape, dtype=product.out_dtype)
    run_kernel(flat, result)
    return result.reshape(product.shape)


def _writable(product: Product, out: torch.Tensor) -> torch.Tensor | None:
    """`out` in `flat_shape` if the kernel may write there while it reads its operands."""
    place = out.untyped_storage().data_ptr()
    if out.is_neg() or any(each.untyped_storage().data_ptr() == place for each in product.inputs):
        return None
    try:
        return out.view(product.flat_shape)
    except RuntimeError:  # strides that no view has
        return None


__all__ = ["chosen_config", "config_for", "fused_matmul", "run_kernel"]
