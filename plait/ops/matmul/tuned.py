"""The config that a product runs with: measured on this GPU or a like one, else computed.

Tables for known GPUs are shipped in `tables/` beside this file; `plait tune gemm` writes the
user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from plait.device import DeviceInfo
from plait.ops.matmul.configs import Config, default_config, is_valid, smallest_block
from plait.runtime.tuning_store import TuningEntry, tuning_table

OPERATOR = "matmul"
SHIPPED_TABLES = Path(__file__).parent / "tables"

_FEW_ROWS = 64  # up to here tiles are chosen to read the weight fast, and each batch has its own

Source = Literal["tuned", "nearest", "default"]


def tuning_key(
    dtype: torch.dtype,
    *,
    num_weights: int = 1,
    precision: str = "ieee",
    layout: str = "nk",
    scales: str = "none",
) -> dict[str, Any]:
    """What names a product in a tuning table, besides M, N and K; see `choose_config`."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "precision": precision,
        "layout": layout,
        "num_weights": num_weights,
        "scales": scales,
    }


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
    batch: int = 0,
    use_tables: bool = True,
) -> tuple[Config, Source]:
    """The config for out [M, N] = x [M, K] @ weight [N, K]^T, and where it comes from.

    "tuned": measured for this shape; "nearest": for one within a factor of 2 in each size;
    "default": `default_config`, also where the measured one is not valid here or would read by
    descriptors that the operands do not allow. `layout`: the weight lies as "nk" or "kn";
    `scales`: "none", "tensor", "rows" or "blocks". A `batch` of B products is
    taken as one of B * M rows, whose tiles have no more rows than M asks for.
    """
    if batch > 1:
        return _batched(
            batch, M, N, K, dtype, device_info, descriptors_allowed,
            num_weights=num_weights, precision=precision, layout=layout, scales=scales,
            use_tables=use_tables,
        )  # fmt: skip
    if use_tables and device_info.arch != "cpu" and min(M, N, K) > 0:
        key = tuning_key(
            dtype, num_weights=num_weights, precision=precision, layout=layout, scales=scales
        )
        found = tuning_table(device_info.name, SHIPPED_TABLES).find(OPERATOR, key, M, N, K)
        config = config_of(found[0]) if found else None
        if (
            found
            and config
            and (descriptors_allowed or not config.desc)
            and is_valid(
                config, dtype, device_info.arch, num_weights=num_weights, precision=precision
            )
        ):
            return config, "tuned" if found[1] == "exact" else "nearest"
    config = default_config(
        M,
        N,
        K,
        dtype,
        device_info.arch,
        descriptors_allowed,
        num_weights=num_weights,
        precision=precision,
    )
    return config, "default"


def _batched(
    batch: int, M: int, N: int, K: int, *args: Any, **keywords: Any
) -> tuple[Config, Source]:
    few = M <= _FEW_ROWS
    config, source = choose_config(M if few else batch * M, N, K, *args, **keywords)
    splits = max(1, config.splits // batch) if few else config.splits
    return replace(config, block_m=min(config.block_m, smallest_block(M)), splits=splits), source


_FIELDS = {field.name: field.type for field in fields(Config)}
_TYPES: Mapping[Any, type] = {"int": int, "bool": bool}


def config_of(entry: TuningEntry) -> Config | None:
    """The config of an entry; None if it has other fields than this version's, or other types."""
    if set(entry.config) != set(_FIELDS):
        return None
    for name, kind in _FIELDS.items():
        if type(entry.config[name]) is not _TYPES[kind]:
            return None
    return Config(**entry.config)


def config_dict(config: Config) -> dict[str, int | bool]:
    """A config as an entry keeps it."""
    return asdict(config)


def config_text(config: Config) -> str:
    """All of a config on one short line, such as `128x256x64 w8 s3 g8 desc`."""
    text = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps}"
    text += f" s{config.num_stages} g{config.group_m} {'desc' if config.desc else 'ptr'}"
    text += f" k{config.splits}" if config.splits > 1 else ""
    return text + (f" o{config.blocks_per_sm}" if config.blocks_per_sm > 1 else "")


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
