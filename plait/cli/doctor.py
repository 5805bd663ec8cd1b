"""`plait doctor`: what this machine offers, what is broken, and what will run.

Starts with the standard library alone and never fails: each probe is guarded, and all of them run
in a child process, so that a package that crashes or hangs becomes a line, too. To look at a
running program (its overrides of ATen, for one), call there `as_text(collect(isolated=False))`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import plait
from plait.cli import doctor_probes, doctor_torch
from plait.cli.doctor_probes import NEEDED, Line, Section, one_line
from plait.cli.doctor_runs import Run, what_runs

_Function = Callable[[Section], None]
_IMPORT, _PACKAGE = "import ", "package "  # probes of these names import what follows
# In this order: the heading, the probe, and whether plait cannot work where it raises.
PROBES: dict[str, tuple[str, _Function, bool]] = {
    "system": ("Python and platform", doctor_probes.probe_system, False),
    **{
        _PACKAGE + name: ("Packages", partial(doctor_probes.probe_package, name=name), True)
        for name in NEEDED
    },
    "packages": ("Packages", doctor_probes.probe_optional, False),
    "gpus": ("GPUs", doctor_torch.probe_gpus, True),
    "links": ("Links", doctor_torch.probe_links, False),
    "processes": ("Processes", doctor_torch.probe_processes, False),
    "compiler": ("Compiler for Triton's launcher", doctor_probes.probe_compiler, False),
    "kernels": ("Kernels on ATen's keys", doctor_torch.probe_kernels, False),
    "settings": ("Settings", doctor_probes.probe_settings, False),
    "environment": ("Environment", doctor_probes.probe_environment, False),
    "virtual ranks": ("Virtual ranks on the CPU", doctor_torch.probe_virtual_ranks, False),
}
_MARK = "plait-doctor "  # begins the child's own lines: packages print, too
_CHILD = "import sys; sys.path[:] = {path!r}; from plait.cli.doctor import child; child{args!r}"
CHILD_SECONDS = 120.0  # importing torch from a cold network disk takes a minute
_WIDTH = 100


@dataclass
class Report:
    """Everything found. `ok` says that nothing is broken that plait needs."""

    version: str
    sections: list[Section]
    runs: list[Run]

    @property
    def ok(self) -> bool:
        """No line is marked fail, and no run is broken."""
        failed = any(line.mark == "fail" for each in self.sections for line in each.lines)
        return not failed and not any(run.broken for run in self.runs)


def collect(imports: Sequence[str] = (), *, isolated: bool = True) -> Report:
    """Run all probes, after importing the packages named by `imports`; raises nothing.

    With `isolated` they run in a child process, else in this one, where a crash is a crash.
    """
    names = [*(_IMPORT + name for name in imports), *PROBES]
    sections = _in_children(names) if isolated else [run_probe(name) for name in names]
    facts: dict[str, Any] = {"linux": sys.platform == "linux"}
    merged: list[Section] = []
    for section in sections:
        facts.update(section.facts)
        if merged and merged[-1].title == section.title:
            merged[-1].lines += section.lines
            merged[-1].facts.update(section.facts)
        else:
            merged.append(section)
    return Report(plait.__version__, merged, what_runs(facts))


def run_probe(name: str) -> Section:
    """One probe's section; whatever it raises becomes its last line."""
    heading, probe, needed = PROBES.get(name, (_IMPORT.strip(), partial(_import, name), False))
    section = Section(heading)
    try:
        probe(section)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        mark = "fail" if needed else "warn"
        section.add(mark, f"probe of {name}", f"failed with {one_line(error)}")
    return section


def _import(name: str, section: Section) -> None:
    package = name[len(_IMPORT) :]
    importlib.import_module(package)
    section.add("ok", package, "imported before everything below")


def child(names: Sequence[str], deadly: Sequence[str]) -> None:
    """Run probes and print their sections; `collect` calls this in another process.

    Packages in `deadly` ended an earlier child when they were imported: they are refused here.
    """
    sys.meta_path.insert(0, _Refuse(deadly))
    for name in names:
        print(f"\n{_MARK}{json.dumps(asdict(run_probe(name)))}", flush=True)


class _Refuse:
    """A finder that raises for some packages."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.names:
            raise ImportError(f"{name} ends Python when it is imported")


def _in_children(names: Sequence[str]) -> list[Section]:
    """All sections. A child that ends early costs one of them; another child does the rest."""
    sections: list[Section] = []
    deadly: list[str] = []
    while len(sections) < len(names):
        rest = list(names[len(sections) :])
        try:
            found, end = _one_child(rest, deadly)
        except OSError:  # no child or no temporary file can be made
            return sections + [run_probe(name) for name in rest]
        sections += found
        if len(found) < len(rest):
            name = rest[len(found)]
            section = Section(PROBES[name][0] if name in PROBES else _IMPORT.strip())
            section.add("fail", name, f"ended Python: {end}")
            sections.append(section)
            deadly += [name.split(" ", 1)[1]] if name.startswith((_PACKAGE, _IMPORT)) else []
    return sections


def _one_child(names: list[str], deadly: list[str]) -> tuple[list[Section], str]:
    """The sections that one child finished, and how it ended."""
    code = _CHILD.format(path=sys.path, args=(names, deadly))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                [sys.executable or "python3", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                timeout=CHILD_SECONDS,
                check=False,
            )
            end = f"exit code {done.returncode}"
            if done.returncode < 0:
                end = f"signal {-done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"no answer for {CHILD_SECONDS:g} s"
        out.seek(0)
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:]
        lines = [line[len(_MARK) :] for line in out if line.startswith(_MARK)]
    values = [json.loads(line) for line in lines]
    sections = [
        Section(each["title"], [Line(**line) for line in each["lines"]], each["facts"])
        for each in values
    ]
    return sections, ": ".join([end, *said])


def as_text(report: Report) -> str:
    """The report for people: ASCII, aligned, marks in words."""
    parts = [f"plait {report.version}"]
    for section in report.sections:
        rows = [(line.mark, line.name, line.value, line.todo) for line in section.lines]
        parts += ["", section.title, *_table(rows)]
    rows = [("yes" if run.runs else "no", run.what, run.reason, run.todo) for run in report.runs]
    parts += ["", "What will run", *_table(rows), ""]
    broken = "nothing that plait needs is broken"
    parts.append(f"result: {broken if report.ok else 'something that plait needs is broken'}")
    return "\n".join(parts).encode("ascii", "replace").decode()


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    wide = max((len(name) for _, name, _, _ in rows), default=0)
    lines = []
    for mark, name, value, todo in rows:
        first = f"  {mark:<4}  {name:<{wide}}  "
        blank = " " * len(first)
        lines += textwrap.wrap(
            value, _WIDTH, initial_indent=first, subsequent_indent=blank, break_long_words=False
        ) or [first.rstrip()]
        lines += textwrap.wrap(
            todo, _WIDTH, initial_indent=blank + "-> ", subsequent_indent=blank + "   "
        )
    return lines


def as_json(report: Report) -> str:
    """The same report as JSON: version, ok, sections (title, lines, facts) and runs."""
    return json.dumps({"ok": report.ok, **asdict(report)}, indent=2)


def command(json: bool = False, strict: bool = False, imports: str = "") -> None:
    """Report versions, GPUs, links, compilers and settings, what is broken, and what will run.

    Works without the packages that the other commands need. IMPORTS (names with commas between)
    are imported first, to see what they change. With --strict exits with 1 if something is broken.
    """
    raise SystemExit(_print_report(json, strict, imports))


def _print_report(want_json: bool, strict: bool, imports: str) -> int:
    report = collect([name.strip() for name in imports.split(",") if name.strip()])
    try:
        print(as_json(report) if want_json else as_text(report), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(strict and not report.ok)


def main(argv: Sequence[str] | None = None) -> int:
    """The program without Typer: 0, or 1 with --strict if something that plait needs is broken."""
    parser = argparse.ArgumentParser("plait doctor", description="What is here, and what will run.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if something is broken")
    parser.add_argument(
        "--imports", default="", metavar="NAMES", help="packages to import first, with commas"
    )
    given = parser.parse_args(argv)
    return _print_report(given.json, given.strict, given.imports)


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["PROBES", "Report", "as_json", "as_text", "child", "collect", "command", "main"]
