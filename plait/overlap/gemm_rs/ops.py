"""GEMM+RS as a PyTorch operator: schema with the group's name, shape inference, implementation.

`plait::gemm_rs` returns [this rank's rows], and with `gather` also its rows of every rank, gathered
along scatter_dim while the GEMM runs (the backward of AG+GEMM).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.collectives.sizes import inferred_share

_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "gemm_rs(Tensor x, Tensor weight, Tensor? bias, str group, int scatter_dim, "
    "SymInt[] rows_per_rank, ScalarType reduce_dtype, ScalarType out_dtype, str impl, "
    "Tensor? gather, Tensor? x_scale=None, Tensor? weight_scale=None, str algorithm='auto') "
    "-> Tensor[]"
)


def _gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    scatter_dim: int,
    rows_per_rank: Sequence[int],
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    impl: str,
    gather: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> list[torch.Tensor]:
    from plait.overlap.gemm_rs.run import forward

    return forward(
        x, weight, bias, group, scatter_dim, list(rows_per_rank), reduce_dtype, out_dtype, impl,
        gather, x_scale, weight_scale, algorithm,
    )  # fmt: skip


for _key in ("CPU", "CUDA"):
    _library.impl("gemm_rs", _gemm_rs, _key)


@torch.library.register_fake("plait::gemm_rs")
def _gemm_rs_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    scatter_dim: int,
    rows_per_rank: Sequence[int],
    reduce_dtype: torch.dtype,
    out_dtype: torch.dtype,
    impl: str,
    gather: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> list[torch.Tensor]:
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[scatter_dim] = inferred_share(shape[scatter_dim], group, rows_per_rank)
    outs = [x.new_empty(shape, dtype=out_dtype)]
    if gather is not None:
        whole = list(gather.shape)
        whole[scatter_dim] = x.shape[scatter_dim]
        outs.append(gather.new_empty(whole))
    return outs


__all__: list[str] = []
