"""The win table: where plait's kernels have been measured to be faster than ATen's, GPU by GPU.

`enable()` without names follows it. A file is plain JSON, one rule a line:

    {"format": 1, "gpu": "NVIDIA H200", "measured": {...}, "rules": [
    {"operator": "sum", "dtype": "bfloat16", "layout": "kr", "row": 12, "ratios": {"14": 0.98, ...}}
    ]}

`operator` is the name of an `OpSpec`, `layout` that of plait/ops/aten/classes.py, `row` the log2 of
the elements that are reduced together (0 where layout is "r": the size says it), and `ratios` maps
the log2 of the main operand's elements to ATen's GPU time over plait's, less their spread.
`measured` says with what, when and how.

A call between measured rows and sizes is plait's if all of its neighbours win; float16 follows
bfloat16 where it has no rules. The user's file, made by `plait tune ops`, hides shipped rules of
the same operator, dtype and layout.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from plait.device import device_info
from plait.errors import SettingError
from plait.ops.aten import spec
from plait.ops.aten.classes import UNALIGNED, CallClass
from plait.runtime.tuning_store import gpu_slug, user_table_path
from plait.settings import settings

SHIPPED_TABLES = Path(__file__).parent / "tables"

# Reasons of default mode; the counts have one entry a reason.
ATEN_FASTER = "ATen is faster here on this GPU"
NOT_MEASURED = "not measured on this GPU"
ASKED = "being measured"  # never remembered

_FORMAT = 1
_SAME_SPEED = {"float16": "bfloat16"}  # where a dtype has no rules itself
# What is no faster beyond the noise of two runs gains nothing.
_WINS = 1.02
# How far beyond the outermost measured row or size that one still speaks: two doublings. Below the
# smallest size a launch takes as long as there.
_REACH = 2.0


@dataclass(frozen=True)
class Rule:
    """Measured ratios of one operator, dtype, layout and row; fields as in the file."""

    operator: str
    dtype: str
    layout: str
    row: int
    ratios: Mapping[int, float] = field(default_factory=dict)


class WinTable:
    """Rules of one GPU, and what they say about a call. Later rules replace earlier ones."""

    def __init__(
        self, rules: Iterable[Rule] = (), measured: Mapping[str, Any] | None = None
    ) -> None:
        self.measured = dict(measured or {})
        self._groups: dict[tuple[str, str, str], dict[int, dict[int, float]]] = {}
        for rule in rules:
            group = self._groups.setdefault((rule.operator, rule.dtype, rule.layout), {})
            group[rule.row] = dict(rule.ratios)

    @property
    def rules(self) -> list[Rule]:
        """All rules, sorted."""
        return [
            Rule(*name, row, dict(sorted(rows[row].items())))
            for name, rows in sorted(self._groups.items())
            for row in sorted(rows)
        ]

    def add(self, operator: str, call: CallClass, ratio: float) -> None:
        """Put a measured call in; of two in the same place the smaller ratio stays."""
        group = self._groups.setdefault((operator, call.dtype, call.layout), {})
        ratios = group.setdefault(0 if _is_whole(call) else round(call.row), {})
        size = round(call.size)
        ratios[size] = min(ratio, ratios.get(size, ratio))

    def merged(self, other: WinTable) -> WinTable:
        """This table with all groups of `other` in place of its own of the same name."""
        found = WinTable(measured=other.measured or self.measured)
        found._groups = {**self._groups, **other._groups}
        return found

    def why_not(self, operator: str, call: CallClass) -> str:
        """Why a call is ATen's, one of the two reasons, or ""."""
        dtypes = (call.dtype, _SAME_SPEED.get(call.dtype, call.dtype))
        found = (self._groups.get((operator, dtype, call.layout)) for dtype in dtypes)
        rows = next(filter(None, found), None)
        if not rows or not call.layout:
            return NOT_MEASURED
        row = 0.0 if _is_whole(call) else call.row
        corners = [
            rows[near][size]
            for near in neighbours(rows, row)
            for size in neighbours(rows[near], call.size, endless_below=True)
        ]
        if not corners:
            return NOT_MEASURED
        return "" if min(corners) >= _WINS else ATEN_FASTER

    def winners(self) -> frozenset[str]:
        """The operators that win somewhere."""
        return frozenset(
            name[0]
            for name, rows in self._groups.items()
            if any(ratio >= _WINS for ratios in rows.values() for ratio in ratios.values())
        )


def _is_whole(call: CallClass) -> bool:
    return call.layout.removesuffix(UNALIGNED) == "r"


def neighbours(
    measured: Iterable[int], place: float, *, endless_below: bool = False
) -> tuple[int, ...]:
    """The nearest measured places on both sides; one beyond the ends, none far beyond them."""
    below = max((each for each in measured if each <= place), default=None)
    above = min((each for each in measured if each >= place), default=None)
    if below is None and above is None:
        return ()
    if below is None:
        assert above is not None
        return (above,) if endless_below or above - place <= _REACH else ()
    if above is None:
        return (below,) if place - below <= _REACH else ()
    return (below,) if below == above else (below, above)


# --- files
def user_wins_path(gpu: str) -> Path:
    """The user's own table of the GPU with this name; may not exist."""
    path = user_table_path(gpu)
    return path.with_name(f"{path.stem}.ops.json")


def read_wins(path: Path) -> WinTable:
    """The table in a file; an empty one if there is no file.

    Raises SettingError, which names the file, if it cannot be read or is no table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return WinTable((_rule(each) for each in found["rules"]), found["measured"])
    except FileNotFoundError:
        return WinTable()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            "win table",
            f"a table of format {_FORMAT} in {path}",
            f"{type(error).__name__}: {error}",
            "Delete the file, or write it anew with `plait tune ops`.",
        ) from None


def _rule(values: Mapping[str, Any]) -> Rule:
    ratios = {int(size): float(ratio) for size, ratio in values["ratios"].items()}
    rule = Rule(**{**values, "ratios": ratios})
    if not all(isinstance(each, str) for each in (rule.operator, rule.dtype, rule.layout)):
        raise TypeError("operator, dtype and layout are strings")
    if type(rule.row) is not int:
        raise TypeError(f"row {rule.row!r}")
    return rule


def write_wins(path: Path, table: WinTable, gpu: str) -> None:
    """Write a table, one rule a line, in one step: a reader sees the old file or the new one."""
    head = json.dumps({"format": _FORMAT, "gpu": gpu, "measured": table.measured})
    lines = ",\n".join(json.dumps(asdict(rule)) for rule in table.rules)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f'{head[:-1]}, "rules": [\n{lines}\n]}}\n', encoding="utf-8")
    unfinished.replace(path)
    forget_wins()


_lock = threading.Lock()
_tables: dict[tuple[Path, Path], WinTable] = {}
_only: list[WinTable] = []


def win_table(gpu: str) -> WinTable:
    """What is known of the GPU with this name; read once, until `forget_wins`.

    Raises SettingError if one of the two files is broken.
    """
    if _only:
        return _only[-1]
    paths = (SHIPPED_TABLES / f"{gpu_slug(gpu)}.json", user_wins_path(gpu))
    table = _tables.get(paths)
    if table is None:
        with _lock:
            table = _tables.get(paths)
            if table is None:
                table = read_wins(paths[0]).merged(read_wins(paths[1]))
                _tables[paths] = table
    return table


@contextmanager
def only(table: WinTable) -> Iterator[None]:
    """A block in which this is every device's table, in all threads; for tests and benchmarks."""
    _only.append(table)
    spec.decide_anew()
    try:
        yield
    finally:
        _only.pop()
        spec.decide_anew()


def forget_wins() -> None:
    """Read the files again at the next look-up, and choose anew."""
    with _lock:
        _tables.clear()
    spec.decide_anew()


# --- choice
def default_keys(dispatch_key: str) -> frozenset[str]:
    """The keys that win somewhere on a GPU of this process; asks PyTorch which GPUs there are."""
    names = {device_info("cpu").name}
    if dispatch_key == "CUDA":
        names = {device_info(f"cuda:{index}").name for index in range(torch.cuda.device_count())}
    operators = frozenset().union(*(win_table(name).winners() for name in names))
    return frozenset(key for key in spec.served() if _operator_of(key) in operators)


def _operator_of(key: str) -> str:
    found = spec.find(key)
    return found.name if found is not None else ""


def tables_in_use() -> str:
    """What `default_keys` depends on beside the machine."""
    return settings().tuning_dir


@dataclass(frozen=True)
class Asked:
    """A question to the table: which overload of which operator, its class, its arguments."""

    key: str
    operator: str
    call: CallClass
    named: Mapping[str, Any]


class _Recording(threading.local):
    """Where this thread's questions go instead of to the table, for measuring."""

    asked: list[Asked] | None = None


_recording = _Recording()


@contextmanager
def recording() -> Iterator[list[Asked]]:
    """A block in which this thread's calls of default mode are ATen's, and told in the list."""
    before, _recording.asked = _recording.asked, []
    try:
        yield _recording.asked
    finally:
        _recording.asked = before


def why_not(
    found: spec.OpSpec, key: str, call: CallClass, named: Mapping[str, Any], device: torch.device
) -> str:
    """Why default mode leaves a call to ATen, or "". A pure function of class, GPU and settings."""
    if _recording.asked is not None:
        _recording.asked.append(Asked(key, found.name, call, named))
        return ASKED
    return win_table(_gpu_name(device)).why_not(found.name, call)


@cache
def _gpu_name(device: torch.device) -> str:
    return device_info(device).name


__all__ = [
    "ASKED",
    "ATEN_FASTER",
    "NOT_MEASURED",
    "SHIPPED_TABLES",
    "Asked",
    "Rule",
    "WinTable",
    "default_keys",
    "forget_wins",
    "neighbours",
    "only",
    "read_wins",
    "recording",
    "tables_in_use",
    "user_wins_path",
    "why_not",
    "win_table",
    "write_wins",
]
