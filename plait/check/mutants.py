"""Mutants: an operator's protocol with one step removed or weakened.

`record(run)` runs an operator once and keeps the source of every device function and every program
that took part. `mutants_of(record)` lists, from these alone, every step of the protocol that can be
broken, so the table grows with the code. A mutant is handed to `plait.run_virtual` as
`rewrite_kernel` or `rewrite_program`; `plait.check.explore` looks for the schedule that shows it.

Sites are counted from 0 in the order of the source, or of the program.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.backends.commands import Program
from plait.check.program_mutants import ProgramRewrite, program_sites

KernelRewrite = Callable[[ast.FunctionDef], ast.FunctionDef]

# What makes a device function part of the protocol: these, or a call to a function that has them.
_PRIMITIVES = ("atomic_", "debug_barrier", "fence_proxy_async")
_WEAKER_SEM = {"acq_rel": ("acquire", "release"), "acquire": ("relaxed",), "release": ("relaxed",)}
_WEAKER_SCOPE = {"sys": ("gpu",), "gpu": ("cta",)}
CASE_PROGRAM = "(case)"  # programs of this name prepare inputs: they belong to no operator
_SHIFTED = ("epoch", "word", "first")  # parameters that mutants shift by one
_WORD_POINTERS = {"word_ptr", "group_word_ptr", "CTX_MIRROR"}  # a store through these is a step


@dataclass(frozen=True)
class Mutant:
    """One broken step: `name` says where, `change` what; one of the rewrites makes it."""

    name: str
    change: str
    rewrite_kernel: KernelRewrite | None = None
    rewrite_program: ProgramRewrite | None = None


@dataclass(frozen=True)
class Equivalent:
    """Mutants that no schedule can show, and why they do no harm.

    `name` is a mutant's name; a `*` at its end stands for any ending.
    """

    name: str
    reason: str

    def covers(self, mutant: str) -> bool:
        """Whether this is about the mutant of that name."""
        if self.name.endswith("*"):
            return mutant.startswith(self.name[:-1])
        return mutant == self.name


class Record:
    """What an operator consists of: device functions by name, and programs."""

    def __init__(self) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.programs: list[Program] = []

    def rewrite_kernel(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        """Keep a device function; pass to `run_virtual`."""
        self.functions[definition.name] = copy.deepcopy(definition)
        return definition

    def rewrite_program(self, program: Program) -> Program:
        """Keep a program; pass to `run_virtual`."""
        if program.operator != CASE_PROGRAM:
            self.programs.append(program)
        return program


def mutants_of(record: Record) -> list[Mutant]:
    """Every mutant of what was recorded, kernels first, in the order of names and sources."""
    protocol = _protocol_functions(record.functions)
    found: list[Mutant] = []
    for name in sorted(protocol):
        found += _mutants_of_function(record.functions[name], record.functions, protocol)
    for name, change, rewrite in program_sites(record.programs):
        found.append(Mutant(name, change, rewrite_program=rewrite))
    return found


def _protocol_functions(functions: dict[str, ast.FunctionDef]) -> set[str]:
    calls = {name: {_callee(c) for c in _calls(each)} for name, each in functions.items()}
    found = {
        name
        for name, callees in calls.items()
        if any(callee.startswith(_PRIMITIVES) for callee in callees)
    }
    while True:
        more = {name for name, callees in calls.items() if callees & found} - found
        if not more:
            return found
        found |= more


def _mutants_of_function(
    definition: ast.FunctionDef, functions: dict[str, ast.FunctionDef], protocol: set[str]
) -> Iterator[Mutant]:
    where = definition.name
    counts: dict[str, int] = {}
    for call in _calls(definition):
        callee = _callee(call)
        nth = counts[callee] = counts.get(callee, -1) + 1
        site = f"{where}: {callee} {nth}"
        if callee in protocol or callee.startswith(_PRIMITIVES[1:]):
            yield Mutant(f"{site} removed", "not called", remove_call(where, callee, nth))
        if callee in protocol:
            parameters = [each.arg for each in functions[callee].args.args]
            for name in _SHIFTED:
                if name in parameters:
                    rewrite = offset_argument(where, callee, parameters.index(name), -1, nth)
                    yield Mutant(f"{site} {name} - 1", f"for another {name}", rewrite)
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            weaker = {"sem": _WEAKER_SEM, "scope": _WEAKER_SCOPE}.get(keyword.arg or "", {})
            for instead in weaker.get(str(value), ()):
                assert keyword.arg is not None
                rewrite = weaken(where, callee, keyword.arg, instead, nth)
                yield Mutant(f"{site} {instead}", f"{instead} instead of {value}", rewrite)
        if callee == "store" and _names(call.args[0]) & _WORD_POINTERS:
            yield Mutant(f"{site} removed", "not stored", remove_call(where, callee, nth))
    for nth, _ in enumerate(_peer_loops(definition, protocol)):
        name = f"{where}: loop {nth} without the last rank"
        yield Mutant(name, "one rank is left out", shorten_loop(where, nth, protocol))
    for nth, _ in enumerate(_peer_masks(definition)):
        name = f"{where}: lanes {nth} without the last rank"
        yield Mutant(name, "one rank is left out", shorten_mask(where, nth))
    for nth, _ in enumerate(_advances(definition)):
        yield Mutant(f"{where}: epoch {nth} not advanced", "+ 1 left out", keep_epoch(where, nth))


# --- kernel rewrites, each for one function


def remove_call(function: str, callee: str, occurrence: int = 0) -> KernelRewrite:
    """Leave a call out; where its result is used it is True."""
    return _replacing(function, callee, occurrence, lambda call: ast.Constant(True))


def weaken(
    function: str, callee: str, keyword: str, value: str, occurrence: int = 0
) -> KernelRewrite:
    """Give a keyword of a call another value, such as sem="relaxed"."""

    def change(call: ast.Call) -> ast.expr:
        for each in call.keywords:
            if each.arg == keyword:
                each.value = ast.Constant(value)
        return call

    return _replacing(function, callee, occurrence, change)


def offset_argument(
    function: str, callee: str, argument_index: int, delta: int, occurrence: int = 0
) -> KernelRewrite:
    """Add `delta` to a positional argument of a call."""

    def change(call: ast.Call) -> ast.expr:
        old = call.args[argument_index]
        call.args[argument_index] = ast.BinOp(old, ast.Add(), ast.Constant(delta))
        return call

    return _replacing(function, callee, occurrence, change)


def shorten_loop(function: str, occurrence: int, protocol: set[str]) -> KernelRewrite:
    """Leave the last rank out of a loop over ranks that signals or waits."""

    def rewrite(definition: ast.FunctionDef) -> ast.FunctionDef:
        if definition.name == function:
            end = list(_peer_loops(definition, protocol))[occurrence].args
            end[0] = ast.BinOp(end[0], ast.Sub(), ast.Constant(1))
        return definition

    return rewrite


def shorten_mask(function: str, occurrence: int = 0) -> KernelRewrite:
    """Leave the last rank out of an atomic of all ranks' words."""

    def rewrite(definition: ast.FunctionDef) -> ast.FunctionDef:
        if definition.name == function:
            bound = list(_peer_masks(definition))[occurrence].comparators
            bound[0] = ast.BinOp(bound[0], ast.Sub(), ast.Constant(1))
        return definition

    return rewrite


def keep_epoch(function: str, occurrence: int = 0) -> KernelRewrite:
    """`get_epoch(...) + 1` becomes `get_epoch(...) + 0`."""

    def rewrite(definition: ast.FunctionDef) -> ast.FunctionDef:
        if definition.name == function:
            list(_advances(definition))[occurrence].right = ast.Constant(0)
        return definition

    return rewrite


def _replacing(
    function: str, callee: str, occurrence: int, change: Callable[[ast.Call], ast.expr]
) -> KernelRewrite:
    def rewrite(definition: ast.FunctionDef) -> ast.FunctionDef:
        if definition.name != function:
            return definition
        target = [call for call in _calls(definition) if _callee(call) == callee][occurrence]
        return _Replace(target, change).visit(definition)

    return rewrite


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.Call, change: Callable[[ast.Call], ast.expr]) -> None:
        self.target, self.change = target, change

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is self.target:
            return ast.copy_location(self.change(node), node)
        return self.generic_visit(node)


# --- what there is in a function's source


def _calls(definition: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _callee(call: ast.Call) -> str:
    """`wait` for `wait(...)`, `atomic_add` for `tl.atomic_add(...)`."""
    return ast.unparse(call.func).rsplit(".", maxsplit=1)[-1]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _peer_loops(definition: ast.FunctionDef, protocol: set[str]) -> Iterator[ast.Call]:
    """The `range(...)` of each loop over all ranks that calls the protocol."""
    for node in ast.walk(definition):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            ranks = _names(node.iter) & {"get_world_size", "world_size"}
            if ranks and any(_callee(call) in protocol for call in _calls(node)):
                yield node.iter


def _peer_masks(definition: ast.FunctionDef) -> Iterator[ast.Compare]:
    """`ranks < world_size` where the function has an atomic: which lanes take part in it."""
    if not any(_callee(call).startswith("atomic_") for call in _calls(definition)):
        return
    for node in ast.walk(definition):
        if isinstance(node, ast.Compare) and [type(each) for each in node.ops] == [ast.Lt]:
            names = _names(node.comparators[0])
            if "get_world_size" in names or "world_size" in names:
                yield node


def _advances(definition: ast.FunctionDef) -> Iterator[ast.BinOp]:
    for node in ast.walk(definition):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = node.left
            if isinstance(left, ast.Call) and _callee(left) == "get_epoch":
                yield node


__all__ = [
    "CASE_PROGRAM",
    "Equivalent",
    "KernelRewrite",
    "Mutant",
    "Record",
    "keep_epoch",
    "mutants_of",
    "offset_argument",
    "remove_call",
    "shorten_loop",
    "shorten_mask",
    "weaken",
]
