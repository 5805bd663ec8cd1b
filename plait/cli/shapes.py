"""Problem sizes from a file: text with `M N K` a line, JSON, or YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import ArgumentError, MissingDependencyError

_HELP = "One `M N K` a line, or a JSON or YAML list of [M, N, K] or of {M:, N:, K:}."


def read_shapes(path: Path) -> list[tuple[int, int, int]]:
    """The (M, N, K) of a file, without duplicates; ArgumentError names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--shapes", "a readable file", f"{path}: {error}", _HELP) from None
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ArgumentError("--shapes", f"JSON in {path}", error, _HELP) from None
    elif path.suffix in (".yaml", ".yml"):
        rows = _read_yaml(path, text)
    else:
        rows = _read_lines(path, text)
    if isinstance(rows, Mapping):
        rows = rows.get("shapes")
    if not isinstance(rows, list) or not rows:
        raise ArgumentError("--shapes", "one shape or more", f"none in {path}", _HELP)
    return list(dict.fromkeys(_shape(path, row) for row in rows))


def _read_lines(path: Path, text: str) -> list[list[int]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            words = re.split(r"[\s,x]+", content)
            if not all(word.isdecimal() for word in words):
                got = f"{content!r} in {path}, line {number}"
                raise ArgumentError("--shapes", "three integers M N K", got, _HELP)
            rows.append([int(word) for word in words])
    return rows


def _read_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError("yaml", str(path), "pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentError("--shapes", f"YAML in {path}", error, _HELP) from None


def _shape(path: Path, row: Any) -> tuple[int, int, int]:
    sizes: Any = [row.get(name) for name in "MNK"] if isinstance(row, Mapping) else row
    if (
        not isinstance(sizes, list)
        or len(sizes) != 3
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ArgumentError("--shapes", "M, N and K above 0", f"{row!r} in {path}", _HELP)
    M, N, K = sizes
    return M, N, K


__all__ = ["read_shapes"]
