"""One rank's share of a BERT feed-forward: AG+GEMM with GELU, GEMM+RS, AllGather of the rows.

Tokens are split over the ranks (sequence parallel), the intermediate features too (tensor
parallel). Attention needs all tokens and is replicated, hence the AllGather at the end.
Shapes: T tokens, T_r of them on this rank, H hidden, I_r intermediate features of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plait.cli.demo.model import EmbeddingModel, Tokens
from plait.cli.demo.ops import Ops, Ran, RankGroup, dims, own_rows, shard_range


@dataclass(frozen=True)
class BlockRecord:
    """What one feed-forward read and wrote on one rank (on the CPU), and which kernels ran."""

    layer: int
    hidden: torch.Tensor  # [T, H], the same on every rank
    inner: torch.Tensor  # [T, I_r], after GELU
    rows: torch.Tensor  # [T_r, H]
    gathered: torch.Tensor  # [T, H]
    ran: tuple[Ran, Ran, Ran]


@dataclass(frozen=True)
class RankEmbeddings:
    """One rank's result: `embeddings` [S, H] on the CPU and a record of every block."""

    embeddings: torch.Tensor
    blocks: list[BlockRecord]


class ParallelFeedForward:
    """`(layer, hidden [T, H]) -> [T, H]` of one rank; fits `EmbeddingModel.embed`."""

    def __init__(
        self,
        model: EmbeddingModel,
        ops: Ops,
        group: RankGroup,
        on_block: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.ops, self.group = model, ops, group
        self.on_block = on_block
        self.blocks: list[BlockRecord] = []

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run one feed-forward on this rank and record it."""
        ops, group = self.ops, self.group
        w_in, b_in, w_out, b_out = self._shard(layer)
        rows_per_rank, mine = own_rows(hidden.shape[0], group)
        own = hidden[mine].contiguous()

        inner = ops.ag_gemm(
            own, w_in, b_in, group=group, activation="gelu", rows_per_rank=rows_per_rank
        )
        gather_shape = f"{dims(own)} @ {dims(w_in)}T -> {dims(inner)}"
        gather = Ran.last(ops, "ag_gemm", gather_shape)

        # The bias goes in once: gemm_rs adds it to a rank's rows after the sum over ranks.
        rows = ops.gemm_rs(inner, w_out, b_out, group=group, rows_per_rank=rows_per_rank)
        scatter_shape = f"{dims(inner)} @ {dims(w_out)}T -> {dims(rows)}"
        scatter = Ran.last(ops, "gemm_rs", scatter_shape)

        gathered = ops.all_gather(rows, group=group, rows_per_rank=rows_per_rank)
        last = Ran.last(ops, "all_gather", f"{dims(rows)} -> {dims(gathered)}")

        kept = [t.detach().cpu() for t in (hidden, inner, rows, gathered)]
        self.blocks.append(BlockRecord(layer, *kept, ran=(gather, scatter, last)))
        if self.on_block is not None:
            self.on_block()
        return gathered

    def _shard(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(w_in [I_r, H], b_in [I_r], w_out [H, I_r], b_out [H])` of this rank."""
        w_in, b_in, w_out, b_out = self.model.feed_forward_weights(layer)
        part = shard_range(w_in.shape[0], self.group)
        return w_in[part].contiguous(), b_in[part].contiguous(), w_out[:, part].contiguous(), b_out


def embed_on_rank(
    group: RankGroup,
    *,
    ops: Ops,
    model: EmbeddingModel,
    tokens: Tokens,
    on_block: Callable[[], None] | None = None,
) -> RankEmbeddings:
    """The whole embedding model on one rank; call it on every rank of `group`.

    `on_block` is called on rank 0 after every feed-forward.
    """
    with torch.no_grad():
        local = model.to(device=group.device)
        report = on_block if group.rank == 0 else None
        feed_forward = ParallelFeedForward(local, ops, group, report)
        embeddings = local.embed(tokens.to(group.device), feed_forward)
        return RankEmbeddings(embeddings.cpu(), feed_forward.blocks)


def one_block_on_rank(
    group: RankGroup, *, ops: Ops, model: EmbeddingModel, hidden: torch.Tensor, layer: int
) -> BlockRecord:
    """One feed-forward on one rank, for the timeline; `hidden` is [T, H]."""
    with torch.no_grad():
        feed_forward = ParallelFeedForward(model.to(device=group.device), ops, group)
        feed_forward(layer, hidden.to(group.device))
        return feed_forward.blocks[0]


__all__ = [
    "BlockRecord",
    "ParallelFeedForward",
    "RankEmbeddings",
    "embed_on_rank",
    "one_block_on_rank",
]
