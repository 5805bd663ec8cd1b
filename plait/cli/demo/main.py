"""The command `plait demo`: loads the model, runs the session, prints, sets the exit code."""

from __future__ import annotations

from pathlib import Path

from plait.cli.demo.model import EmbeddingModel, model_folder, require, tokenize

QUERY = "Which animals make good pets for children?"
SENTENCES = [
    "Dogs are loyal companions for families with kids.",
    "Rabbits are gentle and easy to keep at home.",
    "A cat sleeps on the warm windowsill.",
    "The veterinarian treats sick horses.",
    "Children learn to read at primary school.",
    "The train to Paris leaves at nine.",
    "Interest rates rose again this quarter.",
    "Matrix products can hide the network's latency.",
]


def command(ranks: int = 4, out: Path = Path("out"), seed: int = 0) -> None:
    """Run a real model's layers tensor-parallel on virtual ranks and check every result.

    Prints errors against fp64, bytes moved, waits and races, and writes a timeline into `out`.
    Exits with 1 if a result deviates beyond twice plain PyTorch's error or a race is found.
    """
    for module in ("rich.console", "safetensors.torch", "tokenizers", "matplotlib"):
        require(module)
    folder = model_folder()

    # Imported here: they need rich and the engine, which the checks above may find missing.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from plait.cli.demo import report
    from plait.cli.demo.session import num_steps, run_session
    from plait.cli.demo.virtual_engine import PlaitEngine
    from plait.errors import DeadlockError, PeerTimeoutError, RaceError

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log has no width of its own; 80 would break the tables
    model = EmbeddingModel.load(folder)
    tokens = tokenize(folder, [QUERY, *SENTENCES])
    engine = PlaitEngine(ranks, seed)
    console.print(report.header(ranks, engine.device, seed, len(tokens.ids)))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting", total=num_steps(model))

        def on_step(done: str) -> None:
            progress.update(task, advance=1, description=done)
            if not console.is_terminal:  # a bar in a log shows only its end
                console.print(f"done: {done}")

        try:
            outcome = run_session(engine, model, tokens, out=out, seed=seed, on_step=on_step)
        except (DeadlockError, PeerTimeoutError, RaceError) as error:
            console.print(f"FAILED, the ranks' protocol is broken:\n{error}", markup=False)
            raise SystemExit(1) from error

    console.print(report.ranking(QUERY, SENTENCES, outcome))
    console.print(report.operators(outcome))
    console.print(report.llama(outcome))
    for path in outcome.timeline:
        console.print(f"timeline of one feed-forward block: {path}", soft_wrap=True)
    console.print(report.verdict(outcome), markup=False)
    if outcome.failures:
        raise SystemExit(1)


__all__ = ["command"]
