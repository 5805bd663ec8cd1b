"""One frozen `Settings` object: every `PLAIT_*` variable, its type, default and meaning.

The environment is read once, at the first `settings()`; nothing else in plait reads it. Tests use
`override()`. A new setting is one field here; `docs/settings.md` is generated from the fields by
`python -m plait.settings > docs/settings.md`, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import SettingError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class _Kind:
    """How values of one type are read from text, checked, and described."""

    name: str
    expected: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]


def _parse_bytes(text: str) -> int:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(digits) :].lower()
    return int(digits) * _UNITS[unit]


def _parse_bool(text: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ValueError(text)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


_BYTES = _Kind(
    "bytes",
    "a number of bytes above 0, such as 1048576, 64MiB or 2GiB",
    _parse_bytes,
    lambda value: _is_int(value) and value > 0,
)
_BOOL = _Kind("bool", "1 or 0", _parse_bool, lambda value: isinstance(value, bool))
_COUNT = _Kind("int", "an integer, 0 or more", int, lambda value: _is_int(value) and value >= 0)
_POSITIVE = _Kind("int", "an integer above 0", int, lambda value: _is_int(value) and value > 0)
_SECONDS = _Kind(
    "float", "a number of seconds above 0", float, lambda value: _is_number(value) and value > 0
)
_MICROSECONDS = _Kind(
    "float",
    "a number of microseconds, 0 or more",
    float,
    lambda value: _is_number(value) and value >= 0,
)
_WHEN = _Kind(
    "word", "sync or background", str.strip, lambda value: value in ("sync", "background")
)
_FOLDER = _Kind(
    "folder",
    "the path of a folder",
    str,
    lambda value: isinstance(value, str) and "\0" not in value,
)


def _setting(env: str, kind: _Kind, default: Any, meaning: str, shown: str = "") -> Any:
    """One field: the variable `env`, and `shown` as the default where its number reads badly."""
    metadata = {"env": env, "kind": kind, "meaning": meaning, "shown": shown}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """All settings of the process. `SettingError` names the field if a value does not fit."""

    workspace_bytes: int = _setting(
        "PLAIT_WORKSPACE_BYTES",
        _BYTES,
        2**30,
        "Cap of a group's symmetric workspace on each rank; larger calls run in slices.",
        shown="1GiB",
    )
    deadline_s: float = _setting(
        "PLAIT_DEADLINE_S",
        _SECONDS,
        30.0,
        "How long a wait for a peer may last, in seconds, before the group is given up.",
    )
    debug: bool = _setting(
        "PLAIT_DEBUG",
        _BOOL,
        False,
        "Every call publishes its sequence number, operator and shapes; ranks that disagree "
        "all raise.",
    )
    free_sms: int = _setting(
        "PLAIT_FREE_SMS",
        _COUNT,
        8,
        "SMs that the waiting blocks of all virtual ranks on one GPU leave free together.",
    )
    cpu_blocks: int = _setting(
        "PLAIT_CPU_BLOCKS", _POSITIVE, 2, "Blocks per kernel and virtual rank on the CPU."
    )
    prologue_delay_us: float = _setting(
        "PLAIT_PROLOGUE_DELAY_US",
        _MICROSECONDS,
        0.0,
        "Delay in microseconds that the prologue kernel adds before it signals; for tests.",
    )
    tuning_dir: str = _setting(
        "PLAIT_TUNING_DIR",
        _FOLDER,
        "",
        "Folder of the tables that `plait tune` writes, one JSON file a GPU.",
        shown="in the user's cache folder",
    )

    compile: str = _setting(
        "PLAIT_COMPILE",
        _WHEN,
        "sync",
        "When an operator's kernel is compiled: in the call that needs it (sync), or by a worker "
        "process while ATen serves such calls (background).",
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            kind: _Kind = spec.metadata["kind"]
            value = getattr(self, spec.name)
            if not kind.accepts(value):
                raise SettingError(
                    spec.name, kind.expected, repr(value), f"It is also {spec.metadata['env']}."
                )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """The settings that `environ` asks for; absent variables have their defaults.

        A `PLAIT_*` name that is no setting only warns: it may be meant for a newer plait.
        """
        values = {}
        known = {spec.metadata["env"]: spec for spec in dataclasses.fields(cls)}
        for name, spec in known.items():
            if name in environ:
                values[spec.name] = _read(name, spec.metadata["kind"], environ[name])
        for name in sorted(environ):
            if name.startswith("PLAIT_") and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warnings.warn(f"{name} is no setting of plait{hint}", stacklevel=2)
        return cls(**values)


def _read(name: str, kind: _Kind, text: str) -> Any:
    try:
        value = kind.parse(text)
    except (ValueError, KeyError):
        value = None
    if not kind.accepts(value):
        raise SettingError(name, kind.expected, repr(text), f"Change or unset {name}.")
    return value


_lock = threading.RLock()
_current: Settings | None = None


def settings() -> Settings:
    """The current settings. The first call reads the environment, later ones never do."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = Settings.from_environ(os.environ)
    return _current


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Replace fields while the block runs, for all threads of the process (ranks are threads).

    Overrides nest; two threads that override at the same time would undo each other's.
    """
    global _current
    names = [spec.name for spec in dataclasses.fields(Settings)]
    for name in values:
        if name not in names:
            raise SettingError(name, f"one of {', '.join(names)}", "another name", "")
    with _lock:
        before = settings()
        _current = dataclasses.replace(before, **values)
        changed = _current
    try:
        yield changed
    finally:
        with _lock:
            _current = before


def user_cache_dir() -> Path:
    """Where this platform wants the user's caches, with plait's own folder in it; may not exist."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "plait"


def environment_report(*prefixes: str) -> dict[str, str]:
    """Variables of the environment whose names start so, as they are now; for `plait doctor`."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def markdown_table() -> str:
    """The text of `docs/settings.md`."""
    lines = [
        "# Settings",
        "",
        "Read from the environment once, at the first use of plait. Generated from",
        "`plait/settings.py`; a test compares the two.",
        "",
        "| variable | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for spec in dataclasses.fields(Settings):
        kind: _Kind = spec.metadata["kind"]
        default = int(spec.default) if isinstance(spec.default, bool) else spec.default
        shown = spec.metadata["shown"] or default
        lines.append(
            f"| `{spec.metadata['env']}` | {kind.name} | {shown} | {spec.metadata['meaning']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())


__all__ = [
    "Settings",
    "environment_report",
    "markdown_table",
    "override",
    "settings",
    "user_cache_dir",
]
