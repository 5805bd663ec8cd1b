"""One product of `plait.matmul` after its arguments were checked, and its operands laid flat.

Shapes: x [..., K] with weight [N, K], or x [B, M, K] with weight [B, N, K]; flat x is [M, K] or
[B, M, K].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from plait.ops.matmul.configs import Config
from plait.ops.matmul.launch import Scaling
from plait.ops.matmul.operands import FP8_DTYPES

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED_DTYPES = (*FP8_DTYPES, torch.int8)


@dataclass(frozen=True)
class Product:
    """out = activation(scale * (x @ weight^T) + bias + addend + out if accumulate).

    `weights` holds one tensor, or two for a gate; `biases` (vectors) is empty or as long.
    `addend` is a bias of the shape of the result. `scalings` is as long as `weights`, or empty
    where nothing is scaled. `config` None: chosen.
    """

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...]
    activation: str
    out_dtype: torch.dtype
    out: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    scalings: tuple[Scaling, ...] = ()
    accumulate: bool = False
    fast_accum: bool = False
    config: Config | None = None

    @property
    def batched(self) -> bool:
        """Whether every batch has a weight of its own."""
        return self.weights[0].dim() == 3

    @property
    def quantized(self) -> bool:
        """Whether the operands are fp8 or int8."""
        return self.x.dtype in QUANTIZED_DTYPES

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.x.shape[:-1], self.weights[0].shape[-2])

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """Shape of the result with all rows in one dim, [M, N]; [B, M, N] if batched."""
        if self.batched:
            return self.shape
        return (math.prod(self.x.shape[:-1]), self.weights[0].shape[-2])

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors that are read, `x` and `weights` first, without `out`."""
        added = () if self.addend is None else (self.addend,)
        scales = [scale for each in self.scalings for scale in (each.x, each.weight)]
        return (self.x, *self.weights, *self.biases, *added, *scales)

    @property
    def sum_dtype(self) -> torch.dtype:
        """What the products are summed in, and addends with them."""
        if self.out_dtype is torch.int32:
            return torch.int32
        return torch.promote_types(torch.float32, self.out_dtype)

    def flat(self) -> Product:
        """The same with x and addend (`out` too, to accumulate) of `flat_shape`, without `out`.

        Whoever computes decides whether `out` can be written in place.
        """
        # A negated view (the imaginary part of a conjugate) would be read without its sign.
        x = self.x.resolve_neg()
        addend = self._added()
        if addend is not None:
            addend = addend.resolve_neg()
            if addend.shape == self.shape:
                addend = addend.reshape(self.flat_shape)
        return replace(
            self,
            x=x if self.batched else x.reshape(self.flat_shape[0], x.shape[-1]),
            weights=tuple(each.resolve_neg() for each in self.weights),
            biases=tuple(each.resolve_neg() for each in self.biases),
            addend=addend,
            accumulate=False,
            out=None,
        )

    def _added(self) -> torch.Tensor | None:
        if not self.accumulate or self.out is None:
            return self.addend
        if self.addend is None:
            return self.out
        return self.out.to(self.sum_dtype) + self.addend.to(self.sum_dtype)


__all__ = ["FLOAT_DTYPES", "QUANTIZED_DTYPES", "Product"]
