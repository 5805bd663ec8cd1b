"""Mutants of programs: a command left out, out of order, or with one arrival more or less.

Commands are counted within one program by kind, from 0; a program with fewer of them is unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from plait.backends.commands import Command, Copy, Launch, Program, Signal, StreamWait

ProgramRewrite = Callable[[Program], Program]
Change = Callable[[list[Command], int], None]  # alters the command at a position, in place

_KINDS: dict[str, type] = {
    "copy": Copy,
    "signal": Signal,
    "stream wait": StreamWait,
    "launch": Launch,
}


def program_sites(programs: Sequence[Program]) -> Iterator[tuple[str, str, ProgramRewrite]]:
    """(name, change, rewrite) of every mutant of the programs, each operator's once."""
    for operator in dict.fromkeys(program.operator for program in programs):
        own = [program for program in programs if program.operator == operator]
        for kind in _KINDS:
            for nth in range(max(len(_positions(program, kind)) for program in own)):
                site = f"program {operator}: {kind} {nth}"
                yield f"{site} removed", "not enqueued", drop(operator, kind, nth)
                if kind == "signal":
                    yield f"{site} early", "enqueued before its copy", swap(operator, nth)
        for launch in range(max(len(program.launches()) for program in own)):
            most = max(_arrivals(program, launch) for program in own)
            for delta, what in ((-1, "one arrival less"), (1, "one arrival more")):
                if most and most + delta > 0:
                    name = f"program {operator}: launch {launch} {what}"
                    yield name, "num_arrivals", change_arrivals(operator, launch, delta)


def drop(operator: str, kind: str, occurrence: int) -> ProgramRewrite:
    """Leave out the nth command of a kind ("copy", "signal", "stream wait" or "launch")."""

    def change(commands: list[Command], position: int) -> None:
        del commands[position]

    return _changing(operator, kind, occurrence, change)


def swap(operator: str, occurrence: int) -> ProgramRewrite:
    """Put the nth signal before the command that precedes it, as a rule the copy it announces."""

    def change(commands: list[Command], position: int) -> None:
        before = commands[position - 1 : position + 1]
        commands[position - 1 : position + 1] = reversed(before)

    return _changing(operator, "signal", occurrence, change)


def change_arrivals(operator: str, occurrence: int, delta: int) -> ProgramRewrite:
    """Let the prologue announce more or fewer blocks than will finish; never none."""

    def change(commands: list[Command], position: int) -> None:
        launch = commands[position]
        assert isinstance(launch, Launch), f"expected a launch at {position}, got {launch}"
        arrivals = launch.args.get("num_arrivals")
        if arrivals is not None and arrivals + delta > 0:
            args = {**launch.args, "num_arrivals": arrivals + delta}
            commands[position] = dataclasses.replace(launch, args=args)

    return _changing(operator, "launch", occurrence, change)


def _changing(operator: str, kind: str, occurrence: int, change: Change) -> ProgramRewrite:
    def rewrite(program: Program) -> Program:
        positions = _positions(program, kind)
        if program.operator != operator or occurrence >= len(positions):
            return program
        commands = list(program.commands)
        change(commands, positions[occurrence])
        return dataclasses.replace(program, commands=commands)

    return rewrite


def _positions(program: Program, kind: str) -> list[int]:
    found = enumerate(program.commands)
    return [position for position, command in found if isinstance(command, _KINDS[kind])]


def _arrivals(program: Program, launch: int) -> int:
    """Arrivals that the nth launch announces; 0 if it is no prologue."""
    launches = program.launches()
    return launches[launch].args.get("num_arrivals", 0) if launch < len(launches) else 0


__all__ = ["ProgramRewrite", "change_arrivals", "drop", "program_sites", "swap"]
