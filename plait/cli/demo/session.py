"""The steps of the demo, without printing: takes an engine, returns everything that is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch

from plait.cli.demo.compare import (
    Comparison,
    compare_blocks,
    compare_embeddings,
    compare_llama,
    embed_plain,
    similarities,
)
from plait.cli.demo.engine import Engine, Traffic
from plait.cli.demo.feed_forward import embed_on_rank, one_block_on_rank
from plait.cli.demo.llama import LlamaInputs, block_on_rank
from plait.cli.demo.model import EmbeddingModel, Tokens
from plait.cli.demo.ops import Ran

TIMELINE_LAYER = 0


@dataclass(frozen=True)
class OperatorRow:
    """One line of the table of operators; `ran` is rank 0's last call."""

    ran: Ran
    comparison: Comparison
    traffic: Traffic | None  # None: cannot be observed on this device


@dataclass(frozen=True)
class Outcome:
    """Everything the demo measured."""

    embeddings: Comparison
    similarity: list[float]
    plain_similarity: list[float]
    operators: list[OperatorRow]
    llama: list[Comparison]
    llama_ran: tuple[Ran, ...]
    llama_dtype: torch.dtype
    llama_traffic: Traffic | None
    timeline: list[Path]

    @property
    def failures(self) -> list[Comparison]:
        """Every comparison beyond twice the error of plain PyTorch."""
        all_of_them = [self.embeddings, *(row.comparison for row in self.operators), *self.llama]
        return [comparison for comparison in all_of_them if not comparison.passed]


def num_steps(model: EmbeddingModel) -> int:
    """How often `run_session` calls `on_step`."""
    return model.config.num_layers + 3


def run_session(
    engine: Engine,
    model: EmbeddingModel,
    tokens: Tokens,
    *,
    out: Path,
    seed: int,
    on_step: Callable[[str], None],
) -> Outcome:
    """Run all steps; `on_step` gets what has just been finished.

    Raises whatever the engine raises: a race, a deadlock, a rank's own exception.
    """
    ops = engine.ops
    plain, exact = embed_plain(model, tokens)
    on_step("plain model in fp32 and fp64")

    done = count(1)

    def block_done() -> None:
        on_step(f"feed-forward block {next(done)} of {model.config.num_layers} on all ranks")

    run = engine.run(
        partial(embed_on_rank, ops=ops, model=model, tokens=tokens, on_block=block_done)
    )
    comparisons = compare_blocks(model, run.results)
    rows = [
        OperatorRow(
            ran, comparisons[ran.operator], run.traffic[ran.operator] if run.traffic else None
        )
        for ran in run.results[0].blocks[-1].ran
    ]

    hidden = run.results[0].blocks[TIMELINE_LAYER].hidden
    block = partial(one_block_on_rank, ops=ops, model=model, hidden=hidden, layer=TIMELINE_LAYER)
    out.mkdir(parents=True, exist_ok=True)
    timeline = engine.record(block, out, "feed_forward_timeline")
    on_step("timeline of one feed-forward block")

    # On a GPU the block runs in the dtype such models have; the interpreter is exact in fp32.
    dtype = torch.float32 if engine.device.type == "cpu" else torch.bfloat16
    inputs = LlamaInputs.random(seed, dtype)
    llama = engine.run(partial(block_on_rank, ops=ops, inputs=inputs))
    on_step("Llama-style block, forward and backward")

    return Outcome(
        embeddings=compare_embeddings(run.results, plain, exact),
        similarity=similarities(run.results[0].embeddings),
        plain_similarity=similarities(plain),
        operators=rows,
        llama=compare_llama(inputs, llama.results),
        llama_ran=llama.results[0].ran,
        llama_dtype=dtype,
        llama_traffic=llama.total,
        timeline=timeline,
    )


__all__ = ["OperatorRow", "Outcome", "num_steps", "run_session"]
