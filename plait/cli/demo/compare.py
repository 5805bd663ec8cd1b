"""Errors against fp64, beside the error that plain PyTorch makes in the same dtype.

Every error is the largest deviation from the fp64 result divided by the largest value of that
result, so tensors of different scale can stand in one table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plait.cli.demo.feed_forward import BlockRecord, RankEmbeddings
from plait.cli.demo.llama import TENSORS, LlamaInputs, LlamaRecord, join_ranks, plain_block
from plait.cli.demo.model import EmbeddingModel, Tokens


@dataclass(frozen=True)
class Comparison:
    """`error` of plait and `plain_error` of plain PyTorch against fp64, both relative."""

    name: str
    error: float
    plain_error: float
    floor: float  # half an ulp: what rounding the result alone may cost

    @property
    def passed(self) -> bool:
        """At most twice the plain error; false for NaN."""
        return self.error <= 2 * max(self.plain_error, self.floor)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """max |actual - exact| / max |exact|; inf if `actual` holds a NaN or has another shape."""
    if actual.shape != exact.shape or bool(actual.isnan().any()):
        return float("inf")
    exact = exact.double()
    return float((actual.double() - exact).abs().max() / exact.abs().max())


def compared(
    name: str, actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor
) -> Comparison:
    """Compare `actual` and `plain` (one dtype) with `exact` (fp64)."""
    floor = torch.finfo(actual.dtype).eps / 2
    return Comparison(name, relative_error(actual, exact), relative_error(plain, exact), floor)


def worst(comparisons: list[Comparison]) -> Comparison:
    """The one nearest to, or furthest beyond, its limit."""
    return max(comparisons, key=lambda c: c.error / max(c.plain_error, c.floor))


def compare_embeddings(
    ranks: list[RankEmbeddings], plain: torch.Tensor, exact: torch.Tensor
) -> Comparison:
    """The worst rank's embeddings [S, H] against fp64; every rank computes all of them."""
    return worst([compared("embeddings", r.embeddings, plain, exact) for r in ranks])


def compare_blocks(model: EmbeddingModel, ranks: list[RankEmbeddings]) -> dict[str, Comparison]:
    """The worst block of each operator, judged on the inputs which that operator itself got."""
    found: dict[str, list[Comparison]] = {"ag_gemm": [], "gemm_rs": [], "all_gather": []}
    for blocks in zip(*(r.blocks for r in ranks), strict=True):
        for comparison in _compare_block(model, list(blocks)):
            found[comparison.name].append(comparison)
    return {operator: worst(comparisons) for operator, comparisons in found.items()}


def _compare_block(model: EmbeddingModel, blocks: list[BlockRecord]) -> list[Comparison]:
    weights = model.feed_forward_weights(blocks[0].layer)
    w_in, b_in, w_out, b_out = weights
    w_in64, b_in64, w_out64, b_out64 = (w.double() for w in weights)
    hidden = blocks[0].hidden
    inner = torch.cat([b.inner for b in blocks], dim=1)
    rows = torch.cat([b.rows for b in blocks], dim=0)
    gather = compared(
        "ag_gemm",
        inner,
        F.gelu(F.linear(hidden, w_in, b_in)),
        F.gelu(F.linear(hidden.double(), w_in64, b_in64)),
    )
    scatter = compared(
        "gemm_rs",
        rows,
        F.linear(inner, w_out, b_out),
        F.linear(inner.double(), w_out64, b_out64),
    )
    # AllGather only moves data, so anything but equal bits is wrong.
    moved = all(torch.equal(b.gathered, rows) for b in blocks)
    error = 0.0 if moved else float("inf")
    return [gather, scatter, Comparison("all_gather", error, 0.0, sys.float_info.min)]


def compare_llama(inputs: LlamaInputs, ranks: list[LlamaRecord]) -> list[Comparison]:
    """Output and gradients of the Llama-style block, in the order of TENSORS."""
    exact, plain = plain_block(inputs.to(torch.float64)), plain_block(inputs)
    actual = join_ranks(ranks)
    return [compared(name, actual[name], plain[name], exact[name]) for name in TENSORS]


def similarities(embeddings: torch.Tensor) -> list[float]:
    """Cosine similarity of sentence 0 with each of the others; embeddings [S, H] are normalised."""
    return (embeddings[1:] @ embeddings[0]).tolist()


def embed_plain(model: EmbeddingModel, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [S, H] of the plain model in its own dtype and in fp64, on the CPU."""
    with torch.no_grad():
        return model.embed(tokens), model.to(dtype=torch.float64).embed(tokens)


__all__ = [
    "Comparison",
    "compare_blocks",
    "compare_embeddings",
    "compare_llama",
    "embed_plain",
    "relative_error",
    "similarities",
    "worst",
]
