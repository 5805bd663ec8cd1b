"""Problem sizes from a file: text with `M N K` or `B M N K` a line, JSON, or YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import ArgumentError, MissingDependencyError

_HELP = (
    "One `M N K` a line, or a JSON or YAML list of [M, N, K] or of {M:, N:, K:}; "
    "for batches `B M N K`."
)


def read_shapes(path: Path) -> list[tuple[int, int, int]]:
    """The (M, N, K) of a file, without duplicates; ArgumentError names the file and the line."""
    found = read_batched_shapes(path)
    for B, M, N, K in found:
        if B:
            got = f"{[B, M, N, K]} in {path}"
            raise ArgumentError("--shapes", "three numbers M N K", got, "Leave out the batch.")
    return [(M, N, K) for _, M, N, K in found]


def read_batched_shapes(path: Path) -> list[tuple[int, int, int, int]]:
    """The (B, M, N, K) of a file, without duplicates; B is 0 where the file has three numbers.

    ArgumentError names the file and the line.
    """
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
                raise ArgumentError("--shapes", "integers M N K or B M N K", got, _HELP)
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


def _shape(path: Path, row: Any) -> tuple[int, int, int, int]:
    names = ("B", "M", "N", "K")
    sizes: Any = row
    if isinstance(row, Mapping) and set(row) <= set(names):
        sizes = [row.get(name) for name in names if name != "B" or "B" in row]
    if (
        not isinstance(sizes, list)
        or len(sizes) not in (3, 4)
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        expected = "M, N and K above 0, with or without B"
        raise ArgumentError("--shapes", expected, f"{row!r} in {path}", _HELP)
    B, M, N, K = sizes if len(sizes) == 4 else (0, *sizes)
    return B, M, N, K


def with_batch(shapes: Iterable[Sequence[int]], batch: int) -> list[tuple[int, int, int, int]]:
    """(B, M, N, K), each B 0 replaced by `batch`; ArgumentError where both are there."""
    found = []
    for B, M, N, K in shapes:
        if B and batch:
            remedy = "Leave out --batch, or the first number of each shape."
            raise ArgumentError("--batch", "0 beside shapes with a batch", batch, remedy)
        found.append((B or batch, M, N, K))
    return found


__all__ = ["read_batched_shapes", "read_shapes", "with_batch"]
