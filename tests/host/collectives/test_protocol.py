"""The protocol of the collectives under mutation: each broken form must be noticed, and how."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import torch

import plait
from plait.backends.commands import Copy, Launch, Signal, StreamWait
from plait.collectives.push import Chunks
from plait.errors import DeadlockError, PeerTimeoutError, RaceError

CALLS = {
    "all_gather": lambda x, group: plait.all_gather(x, group=group),
    "reduce_scatter": lambda x, group: plait.reduce_scatter(x, group=group),
    "one_shot": lambda x, group: plait.all_reduce(x, group=group, algorithm="one_shot"),
    "two_shot": lambda x, group: plait.all_reduce(x, group=group, algorithm="two_shot"),
    "all_to_all": lambda x, group: plait.all_to_all(x, group=group),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def four_calls(call):
    def body(group):
        for _ in range(4):
            call(torch.full((6, 8), 1.0 + group.rank), group)

    return body


def without_waits(definition):
    """Kernels of the collectives no longer wait for data; prologue and barrier still do."""
    if definition.name not in ("_arrive_kernel", "_sum_segments_kernel"):
        return definition

    class Drop(ast.NodeTransformer):
        def visit_Call(self, node):
            self.generic_visit(node)
            is_wait = isinstance(node.func, ast.Name) and node.func.id == "wait"
            return ast.copy_location(ast.Constant(True), node) if is_wait else node

    return Drop().visit(definition)


def signals_before_copies(program):
    """Every signal is sent just before the copy that it announces."""
    commands = list(program.commands)
    for index in range(len(commands) - 1):
        first, second = commands[index : index + 2]
        if isinstance(first, Copy) and isinstance(second, Signal):
            commands[index : index + 2] = [second, first]
    return dataclasses.replace(program, commands=commands)


def without_prologue_wait(definition):
    """The region is opened without asking whether the peers still read it."""
    if definition.name == "begin":
        waits = [s for s in definition.body if "wait_all" in ast.unparse(s)]
        assert waits
        for wait in waits:
            definition.body[definition.body.index(wait)] = ast.parse("ok = True").body[0]
    return definition


def drop_signals(program):
    """The last signal of each program is lost."""
    commands = list(program.commands)
    last = max((i for i, c in enumerate(commands) if isinstance(c, Signal)), default=None)
    return program if last is None else dataclasses.replace(
        program, commands=commands[:last] + commands[last + 1 :]
    )  # fmt: skip


def copies_at_once(program):
    """The copies no longer wait for what `main` holds: neither for the prologue."""
    commands = [
        c for c in program.commands if not (isinstance(c, StreamWait) and c.stream == "comm")
    ]
    return dataclasses.replace(program, commands=commands)


@pytest.mark.parametrize("schedule", ["random", "copies_last"])
def test_the_protocol_itself_is_clean(call, schedule, seed, ranks_on):
    ranks_on(four_calls(call), 3, seed, schedule=schedule)


def test_a_missing_wait_is_a_race(call, seed, ranks_on):
    with pytest.raises(RaceError):
        ranks_on(four_calls(call), 3, seed, rewrite_kernel=without_waits)


def test_a_signal_before_its_copy_is_a_race(call, seed, ranks_on):
    with pytest.raises(RaceError):
        ranks_on(four_calls(call), 3, seed, rewrite_program=signals_before_copies)


def to_rank_1_only(operator):
    """Rank 0 sends to rank 1 and waits for nobody's data, so nothing but the prologue holds it."""

    def call(x, group):
        if operator is plait.reduce_scatter:
            return operator(x, group=group, rows_per_rank=[0, 6])
        if operator is plait.all_gather:
            mine = x if group.rank == 0 else x[:0]
            return operator(mine, group=group, rows_per_rank=[6, 0])
        mine = x if group.rank == 0 else x[:0]
        sends = [0, 6] if group.rank == 0 else [0, 0]
        receives = [0, 0] if group.rank == 0 else [6, 0]
        return operator(mine, group=group, input_splits=sends, output_splits=receives, max_rows=6)

    return call


@pytest.mark.parametrize("operator", [plait.all_gather, plait.reduce_scatter, plait.all_to_all])
def test_a_region_opened_too_early_gives_a_late_reader_the_next_data(operator, seed, ranks_on):
    call = to_rank_1_only(operator)

    def body(group):
        x = torch.full((6, 8), float(group.rank == 0))
        outs = [call(x * number, group) for number in range(1, 5)]
        return [out[-1, -1].item() for out in outs if out.numel()]

    assert ranks_on(body, 2, seed, schedule="late:1")[1] == [1.0, 2.0, 3.0, 4.0]
    try:
        broken = ranks_on(body, 2, seed, schedule="late:1", rewrite_kernel=without_prologue_wait)
    except RaceError:
        return
    assert broken[1] != [1.0, 2.0, 3.0, 4.0]


def test_copies_before_the_prologue_are_noticed(call, seed, ranks_on):
    # They may also signal with the last call's epoch, which nobody waits for any more.
    with pytest.raises((RaceError, DeadlockError)):
        ranks_on(four_calls(call), 3, seed, rewrite_program=copies_at_once)


def test_a_lost_signal_is_a_deadlock_that_names_the_wait(call, seed, ranks_on):
    with pytest.raises(DeadlockError, match=r"waits at .*that rank \d sets"):
        ranks_on(four_calls(call), 2, seed, rewrite_program=drop_signals)


def test_a_peer_that_never_comes_ends_in_a_timeout_and_nan(call, seed, ranks_on):
    outs = []

    def lose_and_watch(program):
        for command in program.commands:
            if isinstance(command, Launch) and "out_ptr" in command.args:
                outs.append(command.args["out_ptr"])
            if isinstance(command, Copy) and command.stream == "main":
                outs.append(command.dst)
        commands = [c for c in program.commands if not isinstance(c, Signal)]
        return dataclasses.replace(program, commands=commands)

    with pytest.raises(PeerTimeoutError, match=r"ready\["):
        ranks_on(
            four_calls(call), 2, seed, rewrite_program=lose_and_watch,
            deadline_ns_on_deadlock=1e12, check=False,
        )  # fmt: skip
    assert any(out.isnan().all() for out in outs), "no output says that its data never came"


@pytest.mark.parametrize("max_rows", [1, 2, 15, 16, 100, 129, 1000])
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 100, 129, 1000])
def test_chunks_cover_each_row_once(max_rows, rows, device):
    if rows > max_rows:
        return
    chunks = Chunks.of(max_rows, 4, device)
    covered = [
        row for _, first, count in chunks.pieces(rows) for row in range(first, first + count)
    ]
    assert covered == list(range(rows))
    assert all(0 <= chunk < chunks.num for chunk, _, _ in chunks.pieces(rows))
    # Kernels wait for the chunk of the last row that they read.
    assert all(
        (first + count - 1) // chunks.rows == chunk for chunk, first, count in chunks.pieces(rows)
    )
