"""`plait bench models`: small models of transformers, eager, with and without plait."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    import typer

_METHOD = (
    "wall time of eager steps, random weights, in turns of plain PyTorch (nothing of plait "
    "registered), plait.enable() and plait.enable('*'); median of turns"
)
_WARM_STEPS = 4  # after a switch: plans are made anew
_PROMPT = 64
_SEED = 1


@dataclass(frozen=True)
class Model:
    """A model and one step of it: `begin()` makes a state, `step(state)` a new one and a result."""

    name: str
    dtype: str
    steps: int
    begin: Callable[[], Any]
    step: Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step by each contestant; `served` counts plait's calls of one step."""

    model: str
    dtype: str
    times: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    served: Mapping[str, int] = field(default_factory=dict)
    wrong: str = ""

    def ms(self, name: str) -> float:
        """Median over turns."""
        return statistics.median(self.times[name])

    def ratio(self, name: str) -> float:
        """Plain PyTorch's time over that of `name`: above 1 plait is faster."""
        return self.ms("plain") / self.ms(name)


def add_models_command(app: typer.Typer) -> None:
    """Give the app the command."""
    import typer

    @app.command("models")
    def models(
        names: list[str] | None = typer.Argument(None, metavar="[llama|bert|bert16]..."),
        turns: int = typer.Option(7, min=1, help="Turns of each contestant."),
        json_file: Path | None = typer.Option(
            None, "--json", metavar="FILE", help="Append one JSON object a line."
        ),
    ) -> None:
        """Time a step of small models, eager: plain PyTorch, and plait by default and forced."""
        bench_models(tuple(names or MODELS), turns=turns, json_file=json_file)


def bench_models(names: tuple[str, ...], *, turns: int = 7, json_file: Path | None = None) -> None:
    """Measure, print and write; exits with 1 if a model's result is wrong."""
    for name in names:
        if name not in MODELS:
            raise ArgumentError("names", f"some of {', '.join(MODELS)}", repr(name))
    try:
        import transformers  # type: ignore[import-not-found]
    except ImportError:
        raise MissingDependencyError(
            "transformers", "plait bench models", "pip install transformers"
        ) from None
    from plait.cli.bench_ops import Output, facts_of, title_of
    from plait.runtime.lab import gpu_lab

    lab = gpu_lab()
    out = Output(json_file)
    facts = facts_of(lab, turns, _METHOD)
    facts["versions"]["transformers"] = transformers.__version__
    results = []
    for name in names:
        measured = measure(MODELS[name](lab.device), turns)
        results.append(measured)
        out.write(_row(measured, facts))
    out.print(_table(results, title_of(lab, "models, eager")))
    wrong = [f"WRONG: {each.model}: {each.wrong}" for each in results if each.wrong]
    for line in wrong:
        out.print(line)
    if wrong:
        raise SystemExit(1)


def measure(models: tuple[Model, Model], turns: int) -> Measured:
    """Check one model against its fp64 twin, then time it in turns."""
    import torch

    import plait
    from plait.testing.compare import assert_close_to_fp64

    model, exact = models
    base = Measured(model.name, model.dtype)
    switches = _switches(_device_of(model))
    with torch.no_grad():
        results, served = {}, {}
        for name, switch in switches.items():
            switch()
            state = model.begin()
            with plait.report() as counted:
                results[name] = model.step(state)[1]
            served[name] = counted.served
        plait.uninstall()
        wide = exact.step(exact.begin())[1]
        for name in ("default", "forced"):
            try:
                assert_close_to_fp64(results[name], wide, results["plain"], name)
            except AssertionError as error:
                return Measured(base.model, base.dtype, wrong=str(error))
        found: dict[str, list[float]] = {name: [] for name in switches}
        for _ in range(turns):
            for name, switch in switches.items():
                switch()
                found[name].append(_turn_ms(model))
        plait.uninstall()
    times = {name: tuple(each) for name, each in found.items()}
    return Measured(model.name, model.dtype, times, served)


def _device_of(model: Model) -> Any:
    """Where the model's result is."""
    return model.step(model.begin())[1].device


def _switches(device: Any) -> dict[str, Callable[[], None]]:
    import plait

    def plain() -> None:
        plait.uninstall()

    def default() -> None:
        plait.uninstall()
        plait.enable(device=device)

    def forced() -> None:
        plait.uninstall()
        plait.enable("*", device=device)

    return {"plain": plain, "default": default, "forced": forced}


def _turn_ms(model: Model) -> float:
    state = model.begin()
    for _ in range(_WARM_STEPS):
        state, _ = model.step(state)
    _synchronize()
    begin = time.perf_counter()
    for _ in range(model.steps):
        state, _ = model.step(state)
    _synchronize()
    return (time.perf_counter() - begin) / model.steps * 1e3


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- models
def llama_decode(
    device: Any, layers: int = 8, hidden: int = 2048, steps: int = 48, vocab: int = 32000
) -> Any:
    """Batch 1, one token a step, after a prompt of 64; grouped-query attention, bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
        vocab_size=vocab,
        max_position_embeddings=2048,
    )
    low = LlamaForCausalLM(config).eval().to(device, torch.bfloat16)
    prompt = torch.randint(config.vocab_size, (1, _PROMPT), device=device)
    token = torch.randint(config.vocab_size, (1, 1), device=device)

    def decoding(network: Any) -> Model:
        def begin() -> Any:
            return network(prompt, use_cache=True).past_key_values

        def step(cache: Any) -> Any:
            found = network(token, past_key_values=cache, use_cache=True)
            return found.past_key_values, found.logits

        name = f"Llama decode, batch 1, {layers} layers of {hidden}"
        return Model(name, "bfloat16", steps, begin, step)

    return decoding(low), decoding(copy.deepcopy(low).double())


def bert_forward(
    device: Any, batch: int = 1, length: int = 128, layers: int = 12, steps: int = 16
) -> Any:
    """BERT-base's encoder on `batch` sequences of `length`, bf16."""
    import torch
    from transformers import BertConfig, BertModel  # type: ignore[import-not-found]

    torch.manual_seed(_SEED)
    config = BertConfig(num_hidden_layers=layers)
    low = BertModel(config).eval().to(device, torch.bfloat16)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)

    def forward(network: Any) -> Model:
        def step(state: Any) -> Any:
            return state, network(tokens).last_hidden_state

        name = f"BERT forward, batch {batch} of {length}, {layers} layers"
        return Model(name, "bfloat16", steps, lambda: None, step)

    return forward(low), forward(copy.deepcopy(low).double())


def _bert_large_batch(device: Any) -> Any:
    return bert_forward(device, batch=16, length=512)


MODELS: dict[str, Callable[[Any], Any]] = {
    "llama": llama_decode,
    "bert": bert_forward,
    "bert16": _bert_large_batch,
}


# --- text
def _row(measured: Measured, facts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"benchmark": "models", "model": measured.model}
    found["dtype"] = measured.dtype
    for name in measured.times:
        found[f"{name}_ms"] = round(measured.ms(name), 4)
        found[f"{name}_turns_ms"] = [round(each, 4) for each in measured.times[name]]
        if name != "plain":
            found[f"{name}_ratio"] = round(measured.ratio(name), 4)
            found[f"{name}_served"] = measured.served[name]
    return {**found, "wrong": measured.wrong, **facts}


def _table(results: list[Measured], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("model")
    names = ("plain ms", "default ms", "plain/default", "served", "forced ms", "plain/forced")
    for name in (*names, "served "):
        table.add_column(name, justify="right")
    for each in results:
        if each.wrong:
            table.add_row(each.model, "WRONG")
            continue
        cells = [f"{each.ms('plain'):.3f}"]
        for name in ("default", "forced"):
            cells += [f"{each.ms(name):.3f}", f"{each.ratio(name):.3f}", str(each.served[name])]
        table.add_row(each.model, *cells)
    return table


__all__ = ["MODELS", "Measured", "add_models_command", "bench_models", "measure"]
