"""The MLP half of a Llama block, forward and backward: y = x + down(silu(gate(n)) * up(n)).

n is RMSNorm(x). Gate and up share one gather (AG+GEMM with two weights and SwiGLU); down is a
GEMM+RS.
Shapes: T tokens, T_r on this rank, D hidden, I intermediate, I_r on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plait.cli.demo.ops import Ops, Ran, RankGroup, dims, own_rows, shard_range

NORM_EPS = 1e-5
TENSORS = ("y", "dx", "dw_gate", "dw_up", "dw_down")


@dataclass(frozen=True)
class LlamaInputs:
    """Inputs of the block on the CPU: `x` and `dy` [T, D], gate and up [I, D], down [D, I]."""

    x: torch.Tensor
    dy: torch.Tensor
    w_gate: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor

    @classmethod
    def random(
        cls, seed: int, dtype: torch.dtype, *, tokens: int = 48, hidden: int = 128, inner: int = 256
    ) -> LlamaInputs:
        """Normal inputs, weights scaled so that every layer keeps its input's variance."""
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

        return cls(
            x=normal(tokens, hidden, 1.0),
            dy=normal(tokens, hidden, 1.0),
            w_gate=normal(inner, hidden, hidden**-0.5),
            w_up=normal(inner, hidden, hidden**-0.5),
            w_down=normal(hidden, inner, inner**-0.5),
        )

    def to(self, dtype: torch.dtype) -> LlamaInputs:
        """The same values in another dtype."""
        parts = (self.x, self.dy, self.w_gate, self.w_up, self.w_down)
        return LlamaInputs(*(part.to(dtype) for part in parts))


@dataclass(frozen=True)
class LlamaRecord:
    """One rank's part of the results, by the names in TENSORS, and which kernels ran forward."""

    tensors: dict[str, torch.Tensor]
    ran: tuple[Ran, Ran]


def plain_block(inputs: LlamaInputs) -> dict[str, torch.Tensor]:
    """The block and its gradients on one device, in the dtype of `inputs`, by name."""
    parts = (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)
    x, w_gate, w_up, w_down = (part.clone().requires_grad_() for part in parts)
    normed = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
    y = x + F.linear(F.silu(F.linear(normed, w_gate)) * F.linear(normed, w_up), w_down)
    gradients = torch.autograd.grad(y, (x, w_gate, w_up, w_down), inputs.dy)
    return dict(zip(TENSORS, (y.detach(), *gradients), strict=True))


def block_on_rank(group: RankGroup, *, ops: Ops, inputs: LlamaInputs) -> LlamaRecord:
    """The block forward and backward on one rank; call it on every rank of `group`.

    Returns `y` and `dx` [T_r, D], `dw_gate` and `dw_up` [I_r, D], `dw_down` [D, I_r] on the CPU.
    """
    rows_per_rank, mine = own_rows(inputs.x.shape[0], group)
    part = shard_range(inputs.w_gate.shape[0], group)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(group.device).clone(memory_format=torch.contiguous_format)

    x = local(inputs.x[mine]).requires_grad_()
    w_gate = local(inputs.w_gate[part]).requires_grad_()
    w_up = local(inputs.w_up[part]).requires_grad_()
    w_down = local(inputs.w_down[:, part]).requires_grad_()

    normed = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
    weights = [w_gate, w_up]
    inner = ops.ag_gemm(
        normed, weights, group=group, activation="swiglu", rows_per_rank=rows_per_rank
    )
    gather = Ran.last(ops, "ag_gemm", f"{dims(normed)} @ 2x({dims(w_gate)})T -> {dims(inner)}")
    down = ops.gemm_rs(inner, w_down, group=group, rows_per_rank=rows_per_rank)
    scatter = Ran.last(ops, "gemm_rs", f"{dims(inner)} @ {dims(w_down)}T -> {dims(down)}")
    y = x + down
    gradients = torch.autograd.grad(y, (x, w_gate, w_up, w_down), local(inputs.dy[mine]))
    values = [value.detach().cpu() for value in (y, *gradients)]
    return LlamaRecord(dict(zip(TENSORS, values, strict=True)), (gather, scatter))


def join_ranks(records: list[LlamaRecord]) -> dict[str, torch.Tensor]:
    """The full tensors from the parts of all ranks, in rank order."""
    dim_of = {"y": 0, "dx": 0, "dw_gate": 0, "dw_up": 0, "dw_down": 1}
    return {name: torch.cat([r.tensors[name] for r in records], d) for name, d in dim_of.items()}


__all__ = ["TENSORS", "LlamaInputs", "LlamaRecord", "block_on_rank", "join_ranks", "plain_block"]
