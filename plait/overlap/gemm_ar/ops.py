"""GEMM+AR as a PyTorch operator: schema with the group's name, shape inference, implementation."""

from __future__ import annotations

import torch

_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "gemm_ar(Tensor x, Tensor weight, Tensor? bias, str group, ScalarType reduce_dtype, "
    "ScalarType out_dtype, str algorithm, str impl, Tensor? x_scale=None, "
    "Tensor? weight_scale=None) -> Tensor"
)


def _gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    algorithm: str,
    impl: str,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    from plait.overlap.gemm_ar.run import forward

    return forward(
        x, weight, bias, group, reduce_dtype, out_dtype, algorithm, impl, x_scale, weight_scale
    )


for _key in ("CPU", "CUDA"):
    _library.impl("gemm_ar", _gemm_ar, _key)


@torch.library.register_fake("plait::gemm_ar")
def _gemm_ar_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    algorithm: str,
    impl: str,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]], dtype=out_dtype)


__all__: list[str] = []
