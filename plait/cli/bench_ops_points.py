"""Which calls `plait bench ops` and `plait tune ops` measure: cases, dtypes and sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.cli.bench_ops_cases import CASES, FLOATS, Arrangement, Case
from plait.errors import ArgumentError

_MAX_ROW = 12  # log2 of a row of the size sweep; the sweep's matrices are square below
# Rows of the win table: a head's, two hidden dims, a vocabulary. Most are no powers of two, which
# would be the best case of kernels that pad. Each row of each layout, dtype and size costs a kernel
# to compile for each operator.
TUNED_ROWS = (64, 768, 5120, 80000)
_SIDE = 8  # columns are a multiple of it where there are as many, so that 16 bytes are
_SIZES_HELP = "Exponents of two: 10,16,22 or first-last:step."
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Point:
    """One call: a case in an arrangement and dtype, under the name of its row."""

    name: str
    case: Case
    at: Arrangement
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.at}"


def read_dtypes(text: str) -> tuple[str, ...]:
    """Full names of dtypes from "bf16,fp16"; ArgumentError for others than the three floats."""
    found = tuple(_SHORT.get(each.strip(), each.strip()) for each in text.split(","))
    for each in found:
        if each not in FLOATS:
            raise ArgumentError("--dtype", f"some of {', '.join((*FLOATS, *_SHORT))}", repr(each))
    return found


def read_sizes(text: str) -> tuple[int, ...]:
    """Exponents from "10-26:4", "10,16" or ""."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        try:
            one = int(first)
            found.update(range(one, int(last or one) + 1, int(step or 1)))
        except ValueError:
            raise ArgumentError("--sizes", "powers of two", repr(text), _SIZES_HELP) from None
    if any(not 0 <= each <= 30 for each in found):
        raise ArgumentError("--sizes", "exponents from 0 to 30", repr(text), _SIZES_HELP)
    return tuple(sorted(found))


def sweep(cases: Sequence[Case], dtypes: Sequence[str], sizes: Sequence[int]) -> list[Point]:
    """Each case in its first layout, over sizes 2**exponent."""
    points = []
    for case in cases:
        layout = case.layouts[0]
        for size in sizes:
            row = size if layout == "r" else min(_MAX_ROW, size // 2)
            at = Arrangement(layout, 1 << (size - row), 1 << row)
            points += [Point(case.name, case, at, dtype) for dtype in case.dtypes_of(dtypes)]
    return points


def grid(cases: Sequence[Case], dtypes: Sequence[str], sizes: Sequence[int]) -> list[Point]:
    """Each case in all its layouts, over rows and sizes: what a win table holds."""
    points = []
    for case in cases:
        for layout in case.layouts:
            for at in _arrangements(layout, sizes, single="r" not in case.layouts):
                points += [Point(case.name, case, at, dtype) for dtype in case.dtypes_of(dtypes)]
    return points


def _arrangements(layout: str, sizes: Sequence[int], *, single: bool) -> list[Arrangement]:
    if layout == "r":
        return [Arrangement("r", 1, 1 << size) for size in sizes]
    found = [
        Arrangement(layout, _count((1 << size) // row), row)
        for row in TUNED_ROWS
        for size in sizes
        if row << 1 <= 1 << size
    ]
    if layout != "kr":
        return found
    # Rows of odd lengths, which no wide load fits, in every other size.
    found += [
        Arrangement(layout, _count((1 << size) // row), row + 1)
        for row in TUNED_ROWS
        for size in sizes[::2]
        if row << 1 <= 1 << size
    ]
    # One row alone is a class of its own, which operators without "r" reach here.
    return found + [Arrangement("kr", 1, 1 << size) for size in sizes if single]


def _count(rows: int) -> int:
    return rows - rows % _SIDE if rows > _SIDE else rows


def read_suite(path: Path, cases: Sequence[Case], dtypes: Sequence[str]) -> list[Point]:
    """The rows of a file for these cases, in each dtype; ArgumentError names file and row.

    The file is `{"rows": [{"name":, "case":, "layout":, "rows":, "row":}, ...]}` with the numbers
    of an `Arrangement`.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{path}: {type(error).__name__}: {error}"
        raise ArgumentError("--shapes", "a JSON object with rows", got) from None
    wanted = {each.name: each for each in cases}
    known = {each.name for each in CASES}
    points = []
    for row in rows:
        name, case, at = _suite_row(path, row, known)
        if case in wanted:
            each = wanted[case]
            points += [Point(name, each, at, dtype) for dtype in each.dtypes_of(dtypes)]
    return points


def _suite_row(path: Path, row: Any, known: set[str]) -> tuple[str, str, Arrangement]:
    try:
        at = Arrangement(row["layout"], row["rows"], row["row"])
        if row["case"] not in known:
            raise ValueError(f"no case {row['case']!r}")
        if at.layout not in ("kr", "rk", "r") or min(at.rows, at.row) < 1:
            raise ValueError("no arrangement")
        return str(row["name"]), row["case"], at
    except (KeyError, TypeError, ValueError) as error:
        got = f"{row!r} in {path}: {error}"
        raise ArgumentError("--shapes", "rows with name, case, layout, rows, row", got) from None


__all__ = [
    "TUNED_ROWS",
    "Point",
    "grid",
    "read_dtypes",
    "read_sizes",
    "read_suite",
    "sweep",
]
