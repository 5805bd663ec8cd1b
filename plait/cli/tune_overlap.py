"""`plait tune overlap`: puts measured calls into the table that `impl="auto"` looks in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import ArgumentError

if TYPE_CHECKING:
    import typer

    from plait.runtime.tuning_store import TuningEntry

_REMEDY = "Write one with `plait bench ag_gemm M N K --json FILE`, gemm_rs or gemm_ar."


def add_overlap_command(app: typer.Typer) -> None:
    """Give the app the command."""
    import typer

    @app.command("overlap")
    def overlap(
        results: list[Path] = typer.Option(..., help="JSON lines of plait bench; repeatable."),
        out: Path | None = typer.Option(None, help="The table; by default the user's own."),
    ) -> None:
        """Keep fused and unfused times for impl="auto" of ag_gemm, gemm_rs and gemm_ar.

        Measures nothing: reads the files that `plait bench ag_gemm ... --json FILE` wrote. Later
        lines replace earlier ones of the same call.
        """
        tune_overlap(results, out)


def tune_overlap(results: Sequence[Path], out: Path | None = None) -> None:
    """Write the entries of the files' GPU, or GPUs; ArgumentError if there is nothing to write."""
    from plait.overlap.common.chooser import forget_choices
    from plait.runtime.tuning_store import read_table, user_table_path, write_table

    rows = [row for path in results for row in read_rows(path)]
    found: dict[str, list[TuningEntry]] = {}
    for row in rows:
        reason = obstacle(row)
        if reason:
            print(f"left out: {row['benchmark']} {row['M']} {row['N']} {row['K']}: {reason}")
        else:
            found.setdefault(row["gpu"], []).append(entry_of(row))
    if not found:
        raise ArgumentError("--results", "a measured call or more", f"{len(rows)} lines", _REMEDY)
    if out is not None and len(found) > 1:
        remedy = "Give the results of one GPU, or leave out --out."
        raise ArgumentError("--out", "results of one GPU", ", ".join(found), remedy)
    for gpu, entries in found.items():
        path = out or user_table_path(gpu)
        table = read_table(path)
        for entry in entries:
            table.add(entry)
        write_table(path, table, gpu)
        print(f"{len(entries)} calls for {gpu}: {path}")
    forget_choices()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; ArgumentError names the file and the line of what is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--results", "a readable file", f"{path}: {error}", _REMEDY) from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except ValueError as error:
                got = f"{error} in line {number} of {path}"
                raise ArgumentError("--results", "results of plait bench", got, _REMEDY) from None
    return rows


def _row(row: Any) -> dict[str, Any]:
    from plait.model.problem import OPERATORS

    if not isinstance(row, dict) or row.get("benchmark") not in OPERATORS:
        raise ValueError(f"no overlapped call ({', '.join(OPERATORS)})")
    missing = _missing(row, ("M", "N", "K", "tp", "dtype", "link", "gpu", "versions", "date"))
    if missing:
        raise ValueError(f"no {missing[0]!r}")
    return row


def _missing(row: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [name for name in names if not row.get(name)]


def obstacle(row: Mapping[str, Any]) -> str:
    """Why a line is no entry; "" if it is one."""
    if row.get("wrong"):
        return f"a wrong result ({row['wrong']})"
    if _missing(row, ("fused_us", "unfused_us")):
        return "not timed"
    if row.get("pass", "forward") != "forward":
        return "a backward pass, which is no call of its own"
    if not row["link"].startswith(("paced", "pcie")):
        return f"nobody knows the speed of link {row['link']!r}"
    if row["link"].endswith("+traffic"):
        return "background traffic; entries are of the link without it"
    return ""


def entry_of(row: Mapping[str, Any]) -> TuningEntry:
    """The table's entry: `time_us` is fused, `baseline_us` unfused as `impl="unfused"` runs it.

    Lines that do not have that time give the benchmark's own unfused time, which has no copies.
    """
    from plait.overlap.common.chooser import table_key
    from plait.runtime.tuning_store import TuningEntry
    from plait.symm.transports.link import Link

    link = Link.parse(row["link"])
    return TuningEntry(
        operator=row["benchmark"],
        key=table_key(row["dtype"], row["tp"], link.gb_s, link.latency_us),
        shape={name: row[name] for name in ("M", "N", "K")},
        config=row.get("config") or {},
        time_us=round(row["fused_us"], 2),
        baseline_us=round(row.get("plait_unfused_us") or row["unfused_us"], 2),
        versions=row["versions"],
        date=row["date"][:10],
    )


__all__ = ["add_overlap_command", "entry_of", "obstacle", "read_rows", "tune_overlap"]
