"""Writes docs/reference.md from the signatures and docstrings of plait's public names.

Run `python docs/generate_reference.py` after a change of either; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plait
from plait.runtime.record import RunRecord

PAGE = Path(__file__).with_name("reference.md")
WIDTH = 100  # of a signature on one line, as in the sources

SECTIONS = {
    "Overlapped operators": ("ag_gemm", "gemm_rs", "gemm_ar"),
    "Collectives": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    "Matrix product": ("matmul",),
    "Norms with a residual stream": ("rms_norm", "layer_norm"),
    "Serving calls of ATen": (
        "enable",
        "disable",
        "use",
        "explain",
        "report",
        "warmup",
        "uninstall",
    ),
    "Virtual ranks": ("run_virtual",),
    "What ran": ("last_run", "trace"),
}
GROUP_METHODS = (
    "from_process_group",
    "emulated",
    "new_group",
    "empty",
    "peer_tensor",
    "memory",
    "barrier",
    "synchronize",
    "check",
    "close",
)

_HEAD = """\
# Reference

Public names of plait, generated from their docstrings by `docs/generate_reference.py`; a test
compares the two. Everything here is an attribute of the package `plait`. The environment variables
are in [settings.md](settings.md).
"""
_SECTION = re.compile(r"^(Args|Returns|Raises):$")
_ENTRY = re.compile(r"^(\w+): (.*)$")


def signature_of(name: str, function: Callable[..., Any], *, method: bool = False) -> str:
    """`name(parameters) -> type`, one parameter a line where one line would be too long."""
    signature = inspect.signature(function)
    parts: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if method and parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        kind = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"{kind}{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        star = star or kind == "*"
        parts.append(text)
    result = f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def prose_of(documented: Any) -> str:
    """A docstring as Markdown: Args become a list, Returns and Raises paragraphs."""
    lines: list[str] = []
    section = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading.group(1)
            lines += [f"**{section}**", ""]
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            lines.append(line)
        else:
            lines.append(_in_section(section, line[4:]))
    return "\n".join(lines).rstrip()


def _in_section(section: str, line: str) -> str:
    if section != "Args":
        return line
    entry = _ENTRY.match(line)
    if entry:
        return f"- `{entry.group(1)}`: {entry.group(2)}"
    return f"  {line.strip()}"


def _function(name: str, function: Callable[..., Any], *, method: bool = False) -> str:
    code = signature_of(name, function, method=method)
    return f"### `{name}`\n\n```python\n{code}\n```\n\n{prose_of(function)}\n"


def _group() -> str:
    parts = ["## Group\n", f"{prose_of(plait.Group)}\n"]
    for name in GROUP_METHODS:
        parts.append(_function(f"Group.{name}", getattr(plait.Group, name), method=True))
    return "\n".join(parts)


def _record() -> str:
    fields = ", ".join(f"`{name}`" for name in RunRecord.__dataclass_fields__)
    return f"`RunRecord` has {fields}. {prose_of(RunRecord)}\n"


def _errors() -> str:
    rows = ["## Errors\n", "All are in `plait.errors`.\n", "| class | derives from | meaning |"]
    rows.append("|---|---|---|")
    for name in plait.errors.__all__:
        value = getattr(plait.errors, name)
        if isinstance(value, type):
            bases = ", ".join(f"`{base.__name__}`" for base in value.__mro__[1:] if _is_named(base))
            first = prose_of(value).split("\n\n")[0].replace("\n", " ")
            rows.append(f"| `{name}` | {bases or '`Exception`'} | {first} |")
    return "\n".join(rows) + "\n"


def _is_named(base: type) -> bool:
    """Whether users may catch it: neither private nor above `Exception`."""
    return base not in (Exception, BaseException, object) and not base.__name__.startswith("_")


def _settings() -> str:
    parts = ["## Settings\n", "In `plait.settings`.\n"]
    for name in ("settings", "override"):
        parts.append(_function(name, inspect.unwrap(getattr(plait.settings, name))))
    return "\n".join(parts)


def render() -> str:
    """The text of docs/reference.md."""
    parts = [_HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_function(name, getattr(plait, name)) for name in names]
        if title == "What ran":
            parts.append(_record())
    return "\n".join([*parts, _group(), _settings(), _errors()])


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
