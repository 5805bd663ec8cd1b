"""The `plait` program: finds its commands in a table and imports only the one that runs.

A command is one file in this folder with a function `command(...)` whose parameters are Typer
options, plus one row of `COMMANDS`. One with commands of its own has `add_commands(app)` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import plait
from plait.errors import DeviceError, MissingDependencyError, PlaitError

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "bench": "plait.cli.bench",
    "check": "plait.cli.check",
    "demo": "plait.cli.demo",
    "doctor": "plait.cli.doctor",
    "run": "plait.cli.run",
    "trace": "plait.cli.trace",
    "tune": "plait.cli.tune",
}
_GROUPS = {"bench": "Measure plait against torch.", "tune": "Find the fastest configs."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the process's arguments); returns the exit code.

    2 for a usage error and where a package or a GPU is missing, 1 for another `PlaitError`, which
    is printed to stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # the rest is the script's, and so are its errors
        from plait.cli.run import main as run

        return run(arguments[1:])
    try:
        if arguments[:1] == ["doctor"]:  # also where Typer is missing or broken
            from plait.cli.doctor import main as doctor

            return doctor(arguments[1:])
        app = build_app(arguments)
        app(arguments, prog_name="plait")
    except MissingDependencyError as error:
        print(f"plait: {error}", file=sys.stderr)
        return 2
    except DeviceError as error:
        print(f"plait: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except PlaitError as error:
        print(f"plait: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The Typer app with the command that `arguments` name, or with all of them."""
    try:
        import typer
    except ImportError:
        raise MissingDependencyError(
            "typer", "the command line", 'pip install "plait[cli]"'
        ) from None

    app = typer.Typer(
        help="Tensor-parallel GEMMs with hidden communication.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        if version:
            typer.echo(plait.__version__)
            raise typer.Exit

    if list(arguments) == ["--version"]:
        return app
    named = [argument for argument in arguments if argument in COMMANDS][:1]
    for name in named or COMMANDS:
        module = import_module(COMMANDS[name])
        if name in _GROUPS:
            group = typer.Typer(help=_GROUPS[name], no_args_is_help=True)
            module.add_commands(group)
            app.add_typer(group, name=name)
        else:
            app.command(name)(module.command)
    return app


__all__ = ["COMMANDS", "build_app", "main"]
