"""`plait run script.py`: a program as it is, with plait serving its calls of ATen."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from plait.errors import PlaitError

_FLAGS = ("-m", "--report", "-h", "--help")  # the others have a value


def command(script: str, include: str = "", exclude: str = "", report: bool = False) -> None:
    """Run a Python program with plait enabled, as `python script.py arguments` would.

    Names (with commas between) are those of `plait.enable`. With -m the script is a module's name.
    With --report the counts are printed to stderr at the end.
    """
    options = [f"--include={include}"] if include else []
    options += [f"--exclude={exclude}", *(["--report"] if report else [])]
    raise SystemExit(main([*options, script]))


def main(argv: Sequence[str]) -> int:
    """Enable plait, then run the program that `argv` names, as `python` would.

    `sys.argv`, `sys.path[0]` and `__main__` are the program's own. Its exceptions and its
    `SystemExit` pass through. Returns 0 after it, 2 where options or the file are wrong.
    """
    count = _own(argv)
    parser = _parser()
    options = parser.parse_args(argv[:count])
    if count == len(argv):
        parser.error("the script is missing")
    program = list(argv[count:])
    if not options.m and not os.path.exists(program[0]):
        print(f"plait run: there is no file {program[0]!r}", file=sys.stderr)
        return 2

    from plait.ops.aten.registration import enable
    from plait.ops.aten.report import report

    try:
        enable(_names(options.include), _names(options.exclude) or (), device=options.device)
    except PlaitError as error:
        print(f"plait run: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    try:
        _run(program, module=options.m)
    finally:
        if options.report:
            print(report(), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "plait run",
        usage="plait run [options] script.py [arguments of the script]",
        description="Run a Python program with plait serving its calls of ATen.",
    )
    names = "keys, base names, groups or patterns, with commas between"
    parser.add_argument("-m", action="store_true", help="the script is the name of a module")
    parser.add_argument("--include", metavar="NAMES", help=f"{names}; default: what wins here")
    parser.add_argument("--exclude", metavar="NAMES", help="what stays ATen's")
    parser.add_argument("--device", help="whose calls: cuda or cpu")
    parser.add_argument("--report", action="store_true", help="print the counts to stderr at last")
    return parser


def _own(argv: Sequence[str]) -> int:
    """How many of `argv` are options of `plait run`: all up to the script."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        index += 1 if argv[index] in _FLAGS or "=" in argv[index] else 2
    return min(index, len(argv))


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _run(program: list[str], module: bool) -> None:
    argv, first = sys.argv, sys.path[0]
    sys.argv = program
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first


__all__ = ["command", "main"]
