"""AG+GEMM as PyTorch operators: schemas with the group's name, shape inference, implementations.

`plait::ag_gemm` returns [outputs..., gathered x if asked, pre-activations if asked].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.symm.group import world_size_of

GATES = ("swiglu", "geglu")

_library = torch.library.Library("plait", "FRAGMENT")
_library.define(
    "ag_gemm(Tensor x, Tensor[] weights, Tensor[] biases, str group, int gather_dim, "
    "SymInt[] rows_per_rank, str activation, ScalarType out_dtype, str impl, "
    "bool return_gathered, bool save_pre, Tensor? x_scale=None, Tensor[]? weight_scales=None) "
    "-> Tensor[]"
)


def _ag_gemm(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    group: str,
    gather_dim: int,
    rows_per_rank: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    impl: str,
    return_gathered: bool,
    save_pre: bool,
    x_scale: torch.Tensor | None = None,
    weight_scales: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    from plait.overlap.ag_gemm.run import forward

    return forward(
        x, list(weights), list(biases), group, gather_dim, list(rows_per_rank), activation,
        out_dtype, impl, return_gathered, save_pre, x_scale, list(weight_scales or []),
    )  # fmt: skip


for _key in ("CPU", "CUDA"):
    _library.impl("ag_gemm", _ag_gemm, _key)


def _gathered_shape(
    x: torch.Tensor, group: str, gather_dim: int, rows_per_rank: Sequence[int]
) -> list[int]:
    shape = list(x.shape)
    shape[gather_dim] = (
        sum(rows_per_rank) if rows_per_rank else shape[gather_dim] * world_size_of(group)
    )
    return shape


@torch.library.register_fake("plait::ag_gemm")
def _ag_gemm_fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    group: str,
    gather_dim: int,
    rows_per_rank: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    impl: str,
    return_gathered: bool,
    save_pre: bool,
    x_scale: torch.Tensor | None = None,
    weight_scales: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    shape = _gathered_shape(x, group, gather_dim, rows_per_rank)
    shapes = [[*shape[:-1], weight.shape[0]] for weight in weights]
    outs = [
        x.new_empty(s, dtype=out_dtype) for s in (shapes[:1] if activation in GATES else shapes)
    ]
    gathered = [x.new_empty(shape)] if return_gathered else []
    pres = [x.new_empty(s) for s in shapes] if save_pre else []
    return outs + gathered + pres


__all__: list[str] = []
