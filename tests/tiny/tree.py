"""The files of the working tree, as the house lints see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("plait", "tests", "benchmarks", "examples", "docs", ".ci")
_SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".sh")
_OTHER_NAMES = ("Makefile", ".gitignore", "run")


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """(path from the root, text) of every text file that people write."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in _FOLDERS:
        paths += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    wanted = [p for p in paths if p.suffix in _SUFFIXES or p.name in _OTHER_NAMES]
    return tuple((p.relative_to(ROOT).as_posix(), p.read_text()) for p in sorted(wanted))


@cache
def modules(*folders: str) -> tuple[tuple[str, ast.Module], ...]:
    """(path from the root, syntax tree) of the Python files under `folders`."""
    found = [
        (path, ast.parse(text, path))
        for path, text in texts()
        if path.endswith(".py") and path.split("/")[0] in folders
    ]
    assert found or set(folders) <= {"benchmarks", "examples"}, f"no Python files in {folders}"
    return tuple(found)


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything that the file imports, inside functions as well.

    `from a.b import c` yields `a.b.c`, whether c is a module or a name in one.
    """
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
