"""Measured configs: one JSON file a GPU, the shipped one and the user's own, and how to look in.

A file is `{"format": 1, "gpu": ..., "entries": [...]}`, an entry the fields of `TuningEntry`. The
user's entries hide shipped ones of the same operator, key and shape. Files are read at the first
look-up and kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from plait.errors import SettingError
from plait.settings import settings, user_cache_dir

_FORMAT = 1
# An entry stands in for shapes up to twice as large or small in each size; beyond, another tile
# tends to win. Rows decide most: they move a shape between the decode and the prefill regime.
_WEIGHTS = {"M": 2.0, "N": 1.0, "K": 1.0}
_MAX_FACTOR_LOG2 = 1.0

Found = Literal["exact", "nearest"]


@dataclass(frozen=True)
class TuningEntry:
    """The best config found for one shape of one operator, and how it was measured.

    `key` holds what the config depends on besides the shape, such as dtype and layout; `shape` M, N
    and K; `time_us` and `baseline_us` are medians of the same run.
    """

    operator: str
    key: Mapping[str, Any]
    shape: Mapping[str, int]
    config: Mapping[str, Any]
    time_us: float
    baseline_us: float
    versions: Mapping[str, str]
    date: str


class TuningTable:
    """Entries by operator, key and shape. Later entries replace earlier ones of the same shape."""

    def __init__(self, entries: Iterable[TuningEntry] = ()) -> None:
        self._groups: dict[tuple[Any, ...], dict[tuple[int, ...], TuningEntry]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: TuningEntry) -> None:
        """Put an entry in, in place of one for the same operator, key and shape."""
        group = self._groups.setdefault(_identity(entry.operator, entry.key), {})
        group[_sizes(entry.shape)] = entry

    @property
    def entries(self) -> list[TuningEntry]:
        """All entries, in the order in which their shapes first came."""
        return [entry for group in self._groups.values() for entry in group.values()]

    def find(
        self, operator: str, key: Mapping[str, Any], M: int, N: int, K: int
    ) -> tuple[TuningEntry, Found] | None:
        """The entry of the shape, else the nearest within a factor of 2 in each size, else None."""
        group = self._groups.get(_identity(operator, key), {})
        exact = group.get((M, N, K))
        if exact is not None:
            return exact, "exact"
        distances = ((_distance(sizes, (M, N, K)), sizes) for sizes in group)
        distance, sizes = min(distances, default=(math.inf, ()))
        return None if distance == math.inf else (group[sizes], "nearest")


def _identity(operator: str, key: Mapping[str, Any]) -> tuple[Any, ...]:
    return operator, *sorted(key.items())


def _sizes(shape: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(shape[name] for name in _WEIGHTS)


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Weighted distance of two shapes on a log2 scale; infinite beyond the factor."""
    if min(*a, *b) < 1:
        return math.inf
    logs = [abs(math.log2(x / y)) for x, y in zip(a, b, strict=True)]
    if max(logs) > _MAX_FACTOR_LOG2:
        return math.inf
    return sum(weight * log for weight, log in zip(_WEIGHTS.values(), logs, strict=True))


def gpu_slug(name: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def user_table_path(gpu: str) -> Path:
    """The user's own table of the GPU with this name; may not exist."""
    folder = settings().tuning_dir
    return (Path(folder) if folder else user_cache_dir() / "tuning") / f"{gpu_slug(gpu)}.json"


def read_table(path: Path) -> TuningTable:
    """The table in a file; an empty one if there is no file.

    Raises SettingError, which names the file, if it cannot be read or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return TuningTable()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_file(path, str(error)) from None
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return TuningTable(_entry(each) for each in found["entries"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad_file(path, f"{type(error).__name__}: {error}") from None


def _entry(values: Mapping[str, Any]) -> TuningEntry:
    entry = TuningEntry(**values)
    for name in ("key", "shape", "config", "versions"):
        if not isinstance(getattr(entry, name), dict):
            raise TypeError(f"{name} is no object")
    sizes = _sizes(entry.shape)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"shape {dict(entry.shape)}")
    hash(_identity(entry.operator, entry.key))  # TypeError for lists and objects within the key
    return entry


def _bad_file(path: Path, problem: str) -> SettingError:
    return SettingError(
        "tuning table",
        f"a table of format {_FORMAT} in {path}",
        problem,
        "Delete the file, or write it anew with `plait tune`.",
    )


def write_table(path: Path, table: TuningTable, gpu: str) -> None:
    """Write a table, one entry a line, in one step: a reader sees the old file or the new one."""
    names = [field.name for field in fields(TuningEntry)]
    lines = [
        json.dumps({name: asdict(entry)[name] for name in names}, ensure_ascii=False)
        for entry in table.entries
    ]
    head = f'{{"format": {_FORMAT}, "gpu": {json.dumps(gpu)}, "entries": ['
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(head + "\n" + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    unfinished.replace(path)
    forget_tables()


_lock = threading.Lock()
_tables: dict[tuple[Path, Path], TuningTable] = {}


def tuning_table(gpu: str, shipped_folder: Path) -> TuningTable:
    """All entries for the GPU with this name; read once, until `forget_tables`.

    Raises SettingError if one of the two files is broken.
    """
    paths = (shipped_folder / f"{gpu_slug(gpu)}.json", user_table_path(gpu))
    table = _tables.get(paths)
    if table is None:
        with _lock:
            table = _tables.get(paths)
            if table is None:
                table = TuningTable(each for path in paths for each in read_table(path).entries)
                _tables[paths] = table
    return table


def forget_tables() -> None:
    """Read the files again at the next look-up."""
    with _lock:
        _tables.clear()


__all__ = [
    "TuningEntry",
    "TuningTable",
    "forget_tables",
    "gpu_slug",
    "read_table",
    "tuning_table",
    "user_table_path",
    "write_table",
]
