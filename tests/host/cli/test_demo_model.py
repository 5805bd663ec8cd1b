"""The demo's model against transformers, its tensor-parallel maths with pure torch operators, and
its report. Ranks are threads here, so nothing of plait's engine is needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from plait.cli.demo.compare import (
    Comparison,
    compare_blocks,
    compare_embeddings,
    compare_llama,
    embed_plain,
)
from plait.cli.demo.feed_forward import embed_on_rank
from plait.cli.demo.llama import LlamaInputs, block_on_rank
from plait.cli.demo.main import QUERY, SENTENCES, command
from plait.cli.demo.model import (
    MODEL_PACKAGE,
    BertConfig,
    EmbeddingModel,
    Tokens,
    model_folder,
    require,
    tokenize,
)
from plait.cli.demo.ops import own_rows, shard_range, split_evenly
from plait.cli.demo.session import num_steps, run_session
from plait.errors import MissingDependencyError, RaceError
from tests.host.cli.demo_fakes import FakeEngine

CONFIG = BertConfig(
    num_layers=2, num_heads=3, hidden_size=24, intermediate_size=48, layer_norm_eps=1e-12
)


def small_model() -> EmbeddingModel:
    """A BERT with random weights in the packaged model's naming: 2 layers, hidden 24."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def linear(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns)
        add(f"{name}.bias", rows)

    def norm(name: str) -> None:
        add(f"{name}.LayerNorm.weight", hidden)
        add(f"{name}.LayerNorm.bias", hidden)

    for table, rows in (("word", 50), ("position", 16), ("token_type", 2)):
        add(f"embeddings.{table}_embeddings.weight", rows, hidden)
    norm("embeddings")
    for layer in range(CONFIG.num_layers):
        prefix = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{prefix}.attention.{name}", hidden, hidden)
        norm(f"{prefix}.attention.output")
        linear(f"{prefix}.intermediate.dense", inner, hidden)
        linear(f"{prefix}.output.dense", hidden, inner)
        norm(f"{prefix}.output")
    return EmbeddingModel(CONFIG, weights)


def small_tokens() -> Tokens:
    """Three sentences, 11 tokens: not divisible by 2, 3 or 4 ranks."""
    return Tokens.pack([[1, 7, 9, 2], [1, 30, 2], [1, 4, 49, 2]])


@pytest.fixture(scope="module")
def packaged() -> Path:
    """The folder of the real model's files."""
    if importlib.util.find_spec(MODEL_PACKAGE) is None:
        pytest.skip(f"needs the package {MODEL_PACKAGE}, which `make demo` installs")
    return model_folder()


# --- the plain model


def test_embeddings_match_transformers(packaged: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers to compare with")
    bert = transformers.BertModel.from_pretrained(packaged, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged, local_files_only=True)
    batch = tokenizer([QUERY, *SENTENCES], padding=True, return_tensors="pt")

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            hidden = bert.to(dtype)(**batch).last_hidden_state
        mask = batch["attention_mask"].to(dtype)[:, :, None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    model = EmbeddingModel.load(packaged)
    tokens = tokenize(packaged, [QUERY, *SENTENCES])
    assert tokens.ids.tolist() == batch["input_ids"][batch["attention_mask"].bool()].tolist()
    ours, ours_exact = embed_plain(model, tokens)
    plain, exact = theirs(torch.float32), theirs(torch.float64)

    # In fp64 both must be the same function: rounding leaves about 1e-15.
    assert (ours_exact - exact).abs().max() < 1e-12
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_ranking_means_something(packaged: Path) -> None:
    tokens = tokenize(packaged, [QUERY, *SENTENCES])
    with torch.no_grad():
        embeddings = EmbeddingModel.load(packaged).embed(tokens)
    order = (embeddings[1:] @ embeddings[0]).argsort(descending=True).tolist()
    assert order[:2] == [0, 1]  # dogs and rabbits before trains and interest rates
    assert len(tokens.ids) <= 96  # keeps the interpreter quick


def test_a_sentence_does_not_see_its_neighbours() -> None:
    model = small_model().to(dtype=torch.float64)
    together = model.embed(small_tokens())
    alone = model.embed(Tokens.pack([[1, 30, 2]]))
    torch.testing.assert_close(together[1], alone[0], rtol=1e-12, atol=1e-12)


def test_missing_package_names_make_demo() -> None:
    with pytest.raises(MissingDependencyError, match="plait_no_such_package: run `make demo`"):
        require("plait_no_such_package.part")


# --- tensor-parallel maths


def test_split_and_shards_cover_everything() -> None:
    assert split_evenly(10, 4) == [3, 3, 2, 2]
    assert split_evenly(2, 4) == [1, 1, 0, 0]
    for world_size in range(1, 9):
        groups = FakeEngine(world_size).groups()
        rows = [own_rows(11, g)[1] for g in groups]
        features = [shard_range(50, g) for g in groups]
        assert [i for s in rows for i in range(s.start, s.stop)] == list(range(11))
        assert [i for s in features for i in range(s.start, s.stop)] == list(range(50))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parallel_embeddings_match_plain(world_size: int) -> None:
    engine, model, tokens = FakeEngine(world_size), small_model(), small_tokens()
    plain, exact = embed_plain(model, tokens)
    ranks = engine.run(
        lambda group: embed_on_rank(group, ops=engine.ops, model=model, tokens=tokens)
    ).results
    assert compare_embeddings(ranks, plain, exact).passed
    comparisons = compare_blocks(model, ranks)
    assert list(comparisons) == ["ag_gemm", "gemm_rs", "all_gather"]
    assert all(c.passed for c in comparisons.values()), comparisons
    assert len(ranks[0].blocks) == CONFIG.num_layers


@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs", "all_gather"])
def test_a_wrong_operator_fails_its_comparison(operator: str) -> None:
    engine, model, tokens = FakeEngine(3, wrong=operator), small_model(), small_tokens()
    plain, exact = embed_plain(model, tokens)
    ranks = engine.run(
        lambda group: embed_on_rank(group, ops=engine.ops, model=model, tokens=tokens)
    ).results
    assert not compare_embeddings(ranks, plain, exact).passed
    failed = [name for name, c in compare_blocks(model, ranks).items() if not c.passed]
    assert failed == [operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_llama_block_and_gradients(world_size: int, dtype: torch.dtype) -> None:
    engine, inputs = FakeEngine(world_size), LlamaInputs.random(0, dtype)
    ranks = engine.run(lambda group: block_on_rank(group, ops=engine.ops, inputs=inputs)).results
    comparisons = compare_llama(inputs, ranks)
    assert [c.name for c in comparisons] == ["y", "dx", "dw_gate", "dw_up", "dw_down"]
    assert all(c.passed for c in comparisons), comparisons


def test_swapped_gate_and_up_fail() -> None:
    engine, inputs = FakeEngine(2), LlamaInputs.random(0, torch.float32)
    ranks = engine.run(lambda group: block_on_rank(group, ops=engine.ops, inputs=inputs)).results
    swapped = dataclasses.replace(inputs, w_gate=inputs.w_up, w_up=inputs.w_gate)
    assert not any(c.passed for c in compare_llama(swapped, ranks))


def test_nan_never_passes() -> None:
    assert not Comparison("x", float("nan"), 1e-7, 1e-7).passed


# --- the session and what it prints


def printed(engine: FakeEngine, out: Path) -> str:
    console_module = pytest.importorskip("rich.console", reason="needs rich, extra `demo`")
    report = importlib.import_module("plait.cli.demo.report")
    model, tokens, steps = small_model(), small_tokens(), []
    outcome = run_session(engine, model, tokens, out=out, seed=0, on_step=steps.append)
    assert len(steps) == num_steps(model)
    console = console_module.Console(width=160, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.header(engine.world_size, engine.device, 0, len(tokens.ids)))
        console.print(report.ranking("query", ["first", "second"], outcome))
        console.print(report.operators(outcome))
        console.print(report.llama(outcome))
        console.print(report.verdict(outcome), markup=False)
    return capture.get()


def test_report_of_a_good_run(tmp_path: Path) -> None:
    text = printed(FakeEngine(4), tmp_path)
    assert "4 virtual ranks" in text
    assert "3x24 @ 12x24T -> 11x12" in text  # shape per rank of the AG+GEMM
    assert "bitwise equal" in text  # the AllGather
    assert "2.0 KiB" in text
    assert "dw_down" in text
    assert "All results are within twice" in text


def test_report_of_a_wrong_run(tmp_path: Path) -> None:
    text = printed(FakeEngine(3, wrong="gemm_rs"), tmp_path)
    assert "FAILED" in text
    assert "TOO LARGE" in text
    assert "gemm_rs: error" in text


# --- the command


def run_command(
    monkeypatch: pytest.MonkeyPatch, out: Path, wrong: str | None = None, race: bool = False
) -> None:
    """`plait demo` with the fake engine in place of virtual ranks."""
    for module in ("rich.console", "safetensors.torch", "tokenizers", "matplotlib"):
        pytest.importorskip(module, reason=f"needs {module}, extra `demo`")

    class Engine(FakeEngine):
        def run(self, fn):
            if race:
                raise RaceError(["rank 0 and rank 1 wrote the same word"])
            return super().run(fn)

    module = ModuleType("plait.cli.demo.virtual_engine")
    module.PlaitEngine = lambda ranks, seed: Engine(ranks, wrong)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command(ranks=3, out=out / "new", seed=1)


def test_command_prints_the_ranking(packaged, monkeypatch, tmp_path, capsys) -> None:
    run_command(monkeypatch, tmp_path)
    text = capsys.readouterr().out
    assert "3 virtual ranks" in text
    assert text.index(SENTENCES[0]) < text.index(SENTENCES[1]) < text.index(SENTENCES[5])
    assert "feed_forward_timeline.json" in text
    assert (tmp_path / "new").is_dir()


def test_command_exits_with_1_on_a_wrong_result(packaged, monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(monkeypatch, tmp_path, wrong="gemm_rs")
    assert stop.value.code == 1
    assert "embeddings: error" in capsys.readouterr().out


def test_command_exits_with_1_on_a_race(packaged, monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(monkeypatch, tmp_path, race=True)
    assert stop.value.code == 1
    assert "rank 0 and rank 1 wrote the same word" in capsys.readouterr().out
