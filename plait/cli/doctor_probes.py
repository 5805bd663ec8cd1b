"""Probes of `plait doctor` without torch: Python, packages, compiler, settings and variables.

A probe fills a `Section` line by line, so that what it found before a failure is kept.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from plait.errors import SettingError
from plait.settings import Settings, environment_report, settings

NEEDED = ("plait", "torch", "triton", "numpy", "greenlet")
OPTIONAL = {
    "cuda-bindings": "",
    **dict.fromkeys(("typer", "rich"), 'pip install "plait[cli]" for the other commands'),
    **dict.fromkeys(("matplotlib", "safetensors", "tokenizers"), 'pip install "plait[demo]"'),
}
_LOWEST = {"torch": (2, 11), "triton": (3, 6)}
VARIABLES = ("CC", "CUDA_", "NCCL_", "TORCH_SYMM_MEM_", "TRITON_")


@dataclass(frozen=True)
class Line:
    """One finding: `mark` is ok, info, warn or fail; `todo` says what to do about it."""

    mark: str
    name: str
    value: str
    todo: str = ""


@dataclass
class Section:
    """What one probe found: lines for people, and facts (JSON values) for the table of runs."""

    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, mark: str, name: str, value: object, todo: str = "") -> None:
        """Append a line."""
        self.lines.append(Line(mark, name, str(value), todo))


def one_line(error: BaseException) -> str:
    """An exception as `Type: first line of its message`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def short_path(path: str | os.PathLike[str]) -> str:
    """A path relative to where Python found it: site-packages, or ./ for the current folder."""
    given = os.path.abspath(path)
    roots = [
        os.path.abspath(each) for each in sys.path if os.path.basename(each).endswith("-packages")
    ]
    for root in sorted({*roots, *map(os.path.abspath, (sysconfig.get_path("purelib"),))}):
        if given.startswith(root + os.sep):
            return given[len(root) + 1 :]
    for root, sign in ((os.getcwd(), "."), (os.path.expanduser("~"), "~")):
        if len(root) > 1 and given.startswith(root + os.sep):
            return sign + given[len(root) :]
    return given


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def probe_system(section: Section) -> None:
    """Python, platform and processors."""
    mark = "ok" if sys.version_info >= (3, 10) else "fail"
    inside = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    name = f"{platform.python_version()} ({platform.python_implementation()}), {inside}"
    section.add(mark, "python", name, "" if mark == "ok" else "use Python 3.10 or later")
    linux = sys.platform == "linux"
    todo = (
        "" if linux else "use Linux for kernels and virtual ranks: Triton has no wheels elsewhere"
    )
    section.add("ok" if linux else "warn", "platform", platform.platform(), todo)
    section.add("info", "processors", os.cpu_count() or "unknown")


def installed_copies(name: str) -> dict[str, str]:
    """Where distribution `name` lies on sys.path: folder -> version, the one in use first."""
    found: dict[str, str] = {}
    for each in metadata.distributions(name=name):
        found.setdefault(str(each.locate_file("")), each.version)
    return found


def probe_package(section: Section, name: str) -> None:
    """The version of a package that loads, against the installed one, and where it lies."""
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken package may raise anything
        section.facts[name] = None
        mark = "fail" if name != "triton" or sys.platform == "linux" else "warn"
        lost = isinstance(error, ModuleNotFoundError) and error.name == name
        todo = f"pip install {name}" if lost else f"reinstall {name}: it is there but broken"
        section.add(mark, name, one_line(error), todo)
    else:
        _loaded(section, name, module)


def probe_optional(section: Section) -> None:
    """Packages that some commands need, and pairs of versions that do not go together."""
    for name, todo in OPTIONAL.items():
        copies = list(installed_copies(name).values())
        value = copies[0] if copies else "not installed (optional)"
        section.add("ok" if copies else "info", name, value, "" if copies else todo)
    _check_pairs(section)


def _loaded(section: Section, name: str, module: Any) -> None:
    version = str(getattr(module, "__version__", "") or "unknown")
    section.facts[name] = version
    where = getattr(module, "__file__", None)
    value = f"{version}, loaded from {short_path(where) if where else 'a namespace'}"
    copies = installed_copies(name)
    first = next(iter(copies.values()), "")
    mark, todo = "ok", ""
    if not copies:
        value += ", not installed by a package manager"
    elif version_tuple(first) != version_tuple(version):
        mark, todo = "warn", f"uninstall all copies of {name} and install one"
        value += f", but {first} is installed"
    elif len(copies) > 1:
        mark, todo = "warn", f"keep one copy of {name}"
        value += f"; {len(copies)} copies installed: {', '.join(copies.values())}"
    lowest = _LOWEST.get(name, ())
    if version_tuple(version) < lowest:
        text = ".".join(map(str, lowest))
        mark, todo = "fail", f'pip install "{name}>={text}"'
        value += f", plait needs {text}"
        section.facts[name] = None
    section.add(mark, name, value, todo)


def _version_in_use(name: str) -> tuple[int, ...]:
    loaded = getattr(sys.modules.get(name), "__version__", "")
    return version_tuple(loaded or next(iter(installed_copies(name).values()), ""))


def _check_pairs(section: Section) -> None:
    numpy, triton = _version_in_use("numpy"), _version_in_use("triton")
    clash = numpy >= (2, 4) and triton[:2] == (3, 6)
    section.facts["numpy_clash"] = clash
    if clash:
        text = "the interpreter of Triton 3.6 does not run with numpy 2.4: no virtual CPU ranks"
        section.add("warn", "numpy, triton", text, 'pip install "numpy<2.4"')
    for need in metadata.requires("torch") or () if installed_copies("torch") else ():
        wanted = re.match(r"triton\s*\(?==\s*([\d.]+)", need)
        if wanted and triton and version_tuple(wanted[1]) != triton:
            text = f"this torch was built for Triton {wanted[1]}"
            section.add("warn", "torch, triton", text, f"pip install triton=={wanted[1]}")


def probe_compiler(section: Section) -> None:
    """What Triton's launcher is compiled with, at its first launch on a GPU."""
    asked = environment_report("CC").get("CC")
    command = asked or next(filter(shutil.which, ("gcc", "clang")), None)
    found = shutil.which(command.split()[0]) if command and command.strip() else None
    if found:
        section.add("ok", "C compiler", f"{command}{' (CC)' if asked else ''}")
    elif shutil.which("cc") and not asked:
        text = "only cc, which Triton does not look for"
        section.add("warn", "C compiler", text, "set CC=cc; GPUs need it")
    else:
        text = f"CC={asked} is no program" if asked else "neither gcc nor clang"
        section.add("warn", "C compiler", text, "install gcc, or set CC; GPUs need it")
    scheme = sysconfig.get_default_scheme()  # Debian's own scheme has no headers; Triton knows, too
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    todo = "" if header.exists() else "install Python's headers (python3-dev); GPUs need them"
    value = f"{'found' if header.exists() else 'missing'}: {header.parent.name}/Python.h"
    section.add("warn" if todo else "ok", "Python.h", value, todo)
    section.facts["compiler"] = bool(found) and header.exists()


def probe_settings(section: Section) -> None:
    """The PLAIT_* settings in force; those that differ from their defaults say so."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Settings.from_environ(environment_report("PLAIT_"))
            current = settings()
    except SettingError as error:
        section.add("fail", error.argument, error, "plait raises this at its first use")
        return
    for spec in fields(current):
        value, env = getattr(current, spec.name), spec.metadata["env"]
        changed = f"{value} (default {spec.metadata['shown'] or spec.default})"
        section.add("info", env, value if value == spec.default else changed)
    for text in sorted({str(each.message) for each in caught}):
        section.add("warn", text.split()[0], text, "correct the name, or unset it")


def probe_environment(section: Section) -> None:
    """Variables of CUDA, PyTorch's symmetric memory, NCCL and Triton that are set."""
    found = environment_report(*VARIABLES)
    section.facts["environment"] = found
    home = os.path.expanduser("~")
    notes = {
        "TRITON_INTERPRET": "kernels on a GPU are interpreted: unset it (plait never needs it)",
        "CUDA_LAUNCH_BLOCKING": "kernels that wait for each other cannot be launched: unset it",
    }
    for name, value in found.items():
        bad = notes.get(name, "") if value.strip().lower() not in ("", "0", "false") else ""
        if name == "CUDA_DEVICE_MAX_CONNECTIONS" and value.isdigit() and int(value) < 8:
            bad = "streams of virtual ranks share queues and may wait for each other: set it to 32"
        shown = value.replace(home, "~") if len(home) > 1 else value
        section.add("warn" if bad else "info", name, shown, bad)
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in found:
        todo = "set it to 32 for more than 4 virtual ranks on a GPU"
        section.add("info", "CUDA_DEVICE_MAX_CONNECTIONS", "not set (CUDA takes 8)", todo)


__all__ = [
    "NEEDED",
    "Line",
    "Section",
    "installed_copies",
    "one_line",
    "probe_compiler",
    "probe_environment",
    "probe_optional",
    "probe_package",
    "probe_settings",
    "probe_system",
    "short_path",
    "version_tuple",
]
