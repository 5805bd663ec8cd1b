"""The config that a product runs with: measured on this GPU or a like one, else computed.

Tables for known GPUs are shipped in `tables/` beside this file; `plait tune gemm` writes the
user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch

from plait.device import DeviceInfo
from plait.ops.matmul.configs import Config, default_config, is_valid
from plait.runtime.tuning_store import TuningEntry, tuning_table

OPERATOR = "matmul"
SHIPPED_TABLES = Path(__file__).parent / "tables"


Source = Literal["tuned", "nearest", "default"]

_SAME_SPEED = {torch.float16: torch.bfloat16}  # where no entry has the dtype itself


def tuning_key(
    dtype: torch.dtype,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
    layout: str = "nk",
    scales: str = "none",
    fast_accum: bool = False,
    batch: int = 0,
) -> dict[str, Any]:
    """What names a product in a tuning table, besides M, N and K; see `choose_config`.

    `fast_accum` and a `batch` of more than one are in it only where they are set.
    """
    key: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "precision": precision,
        "layout": layout,
        "num_weights": num_weights,
        "scales": scales,
    }
    if fast_accum:
        key["fast_accum"] = True
    if batch > 1:
        key["batch"] = batch
    return key


def choose_config(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device_info: DeviceInfo,
    descriptors_allowed: bool,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
    layout: str = "nk",
    scales: str = "none",
    fast_accum: bool = False,
    batch: int = 0,
    use_tables: bool = True,
) -> tuple[Config, Source]:
    """The config for out [M, N] = x [M, K] @ weight [N, K]^T, and where it comes from.

    "tuned": measured for this shape; "nearest": for one within a factor of 2 in each size;
    "default": `default_config`, also where the measured one is not valid here or would read by
    descriptors that the operands do not allow. `layout`: the weight lies as "nk" or "kn";
    `scales`: "none", "tensor", "rows" or "blocks"; `fast_accum`: fp8 sums stay in the short
    accumulator. `batch` products at once look for entries of as many, then of the powers of two
    around.
    """

    def measured(batch: int) -> tuple[Config, Source] | None:
        if not use_tables or device_info.arch == "cpu" or min(M, N, K) < 1:
            return None
        for like in dict.fromkeys((dtype, _SAME_SPEED.get(dtype, dtype))):
            key = tuning_key(
                like, num_weights=num_weights, precision=precision, layout=layout, scales=scales,
                fast_accum=fast_accum, batch=batch,
            )  # fmt: skip
            found = tuning_table(device_info.name, SHIPPED_TABLES).find(OPERATOR, key, M, N, K)
            config = config_of(found[0]) if found else None
            if not found or not config or (config.desc and not descriptors_allowed):
                continue
            if is_valid(
                config, dtype, device_info.arch, num_weights=num_weights, precision=precision
            ):
                return config, "tuned" if found[1] == "exact" else "nearest"
        return None

    def default_for(batch: int) -> Config:
        return default_config(
            M, N, K, dtype, device_info.arch, descriptors_allowed,
            num_weights=num_weights, precision=precision, batch=batch,
        )  # fmt: skip

    if batch <= 1:
        return measured(0) or (default_for(1), "default")
    for like in dict.fromkeys((batch, *_powers_of_two(batch))):
        found = measured(like)
        if found is not None:
            return found if like == batch else (found[0], "nearest")
    return default_for(batch), "default"


def _powers_of_two(batch: int) -> tuple[int, int]:
    """The two around a batch of more than one; neither is twice as large or half as small."""
    above = 1 << (batch - 1).bit_length()
    return above, max(2, above // 2)


_FIELDS = {field.name: field.type for field in fields(Config)}
_SHOWN = ("splits", "blocks_per_sm", "split_tail")  # in short by `config_text`; others by name
_NEEDED = {field.name for field in fields(Config) if field.default is MISSING}
_TYPES: Mapping[Any, type] = {"int": int, "bool": bool}


def config_of(entry: TuningEntry) -> Config | None:
    """The config of an entry; None if it has fields that this version lacks, or other types.

    A field that came later has its default in older entries.
    """
    if not _NEEDED <= set(entry.config) <= set(_FIELDS):
        return None
    for name, value in entry.config.items():
        if type(value) is not _TYPES[_FIELDS[name]]:
            return None
    return Config(**entry.config)


def config_dict(config: Config) -> dict[str, int | bool]:
    """A config as an entry keeps it."""
    return asdict(config)


def config_text(config: Config) -> str:
    """All of a config on one short line, such as `128x256x64 w8 s3 g8 desc k2t`."""
    text = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps}"
    text += f" s{config.num_stages} g{config.group_m} {'desc' if config.desc else 'ptr'}"
    if config.splits > 1:
        text += f" k{config.splits}{'t' if config.split_tail else ''}"
    text += f" o{config.blocks_per_sm}" if config.blocks_per_sm > 1 else ""
    for field in fields(Config):
        value = getattr(config, field.name)
        if field.name not in (*_NEEDED, *_SHOWN) and value != field.default:
            text += f" {field.name}" + ("" if value is True else f"={value}")
    return text


__all__ = [
    "OPERATOR",
    "SHIPPED_TABLES",
    "Source",
    "choose_config",
    "config_dict",
    "config_of",
    "config_text",
    "tuning_key",
]
