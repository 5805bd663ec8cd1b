"""`plait.rms_norm` and `plait.layer_norm`: norms that add to a residual stream on the way.

Shapes: x, residual [..., size], weight, bias [size].
"""

from __future__ import annotations

import torch

from plait.checks import check_one_of
from plait.errors import DeviceError, DtypeError, ShapeError
from plait.ops.norm import residual_ops

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm of x + residual over the last dim, and that sum, in one kernel.

    With h = x + residual, rounded to its dtype: (h / sqrt(mean(h * h) + eps) * weight, h), the mean
    taken in fp32 (fp64 for fp64). Differentiable, and one operator under `torch.compile`. A block
    of a transformer calls `y, residual = plait.rms_norm(x, weight, eps, residual=residual)`.
    Method: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        x: [..., size], any strides; bfloat16, float16, float32 or float64.
        weight: [size], any floating dtype; None for 1.
        eps: added to the mean of squares.
        residual: of the shape and dtype of x, any strides; None for 0.
        impl: "auto", or "reference" for the same composed of PyTorch's operators.

    Returns:
        The normalised tensor, contiguous, and the new residual: h, contiguous, or x itself without
        a residual.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: naming the argument that does not fit.
    """
    return _residual_norm(x, weight, None, eps, residual, rms=True, impl=impl)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm of x + residual over the last dim, and that sum, in one kernel.

    With h = x + residual, rounded to its dtype:
    ((h - mean(h)) / sqrt(var(h) + eps) * weight + bias, h), statistics taken in fp32 (fp64 for
    fp64). Differentiable, and one operator under `torch.compile`.
    Method: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Args:
        x: [..., size], any strides; bfloat16, float16, float32 or float64.
        weight: [size], any floating dtype; None for 1.
        bias: [size], any floating dtype; None for 0.
        eps: added to the variance.
        residual: of the shape and dtype of x, any strides; None for 0.
        impl: "auto", or "reference" for the same composed of PyTorch's operators.

    Returns:
        The normalised tensor, contiguous, and the new residual: h, contiguous, or x itself without
        a residual.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: naming the argument that does not fit.
    """
    return _residual_norm(x, weight, bias, eps, residual, rms=False, impl=impl)


def residual_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    *,
    rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of both, in PyTorch alone."""
    total = x if residual is None else x + residual
    wide = total.to(residual_ops.stats_dtype(x))
    if not rms:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight.to(y.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype), total


def _residual_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    *,
    rms: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_one_of("impl", impl, ("auto", "reference"))
    _check(x, weight, bias, residual)
    if impl == "reference":
        return residual_norm_reference(x, weight, bias, eps, residual, rms=rms)
    y, total, _, _ = torch.ops.plait.residual_norm(x, residual, weight, bias, eps, rms)
    return y, x if residual is None else total


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError("x", "a last dim with elements", tuple(x.shape))
    if x.dtype not in _DTYPES:
        raise DtypeError("x", "bfloat16, float16, float32 or float64", x.dtype)
    for name, each in (("weight", weight), ("bias", bias)):
        if each is None:
            continue
        if tuple(each.shape) != (x.shape[-1],):
            raise ShapeError(name, f"[{x.shape[-1]}], the last dim of x", tuple(each.shape))
        if each.dtype not in _DTYPES:
            raise DtypeError(name, "bfloat16, float16, float32 or float64", each.dtype)
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(
            "residual",
            f"the shape of x, {tuple(x.shape)}",
            tuple(residual.shape),
            "Expand it first.",
        )
    if residual is not None and residual.dtype != x.dtype:
        raise DtypeError("residual", f"the dtype of x, {x.dtype}", residual.dtype)
    for name, each in (("weight", weight), ("bias", bias), ("residual", residual)):
        if each is not None and each.device != x.device:
            raise DeviceError(name, f"the device of x, {x.device}", each.device)


__all__ = ["layer_norm", "residual_norm_reference", "rms_norm"]
