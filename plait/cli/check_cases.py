"""What `plait check` can run: for each operator a small case that uses all of its protocol.

A case keeps away what would make a wait superfluous. If all ranks exchange data in every round, or
every byte of a region has the same writer in all rounds, consumed signals are never needed; so
rows and layouts change from round to round. Values are small integers, so results are exact.
Inputs lie in symmetric memory and the next round overwrites them, as a caching allocator would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import plait
from plait.check.explore import Run
from plait.check.mutants import Equivalent
from plait.cli.check_inputs import Input, copy_by_case, expect, gap, integers, reserve
from plait.errors import ArgumentError
from plait.symm.group import Group


@dataclass(frozen=True)
class Case:
    """An operator's case: `run(group, rounds)` for `plait.check.explore`, and what it needs."""

    run: Run
    rounds: int = 3
    world_size: int = 3
    min_slots: int = 1
    equivalents: tuple[Equivalent, ...] = ()


# Per round, repeated: each rank's rows (two chunks, one, or none), the features of a row, and the
# rank whose weight has no columns, so that it waits for nobody while it multiplies.
# Rounds 0 and 2 share a region. In round 1 rank 2 sends nothing, so in round 2 nothing but its
# consumed signal says that it has read round 0, and its own pushes of round 0 may still be under
# way: rank 0's rows of round 2 cover both.
_ROWS = ((64, 0, 32), (64, 32, 0), (64, 0, 32), (0, 64, 32))
_FEATURES = (4, 8, 16, 8)
_WITHOUT_COLUMNS = (1, None, 0, None)
_MAX_ROWS, _MAX_FEATURES = 64, 16


def rows_of(group: Group, index: int) -> list[int]:
    """Each rank's rows in a round; ranks from 3 on repeat those of 0 to 2."""
    rows = _ROWS[index % len(_ROWS)]
    return [rows[rank % len(rows)] for rank in range(group.world_size)]


def features_of(index: int) -> int:
    """Features of a row in a round."""
    return _FEATURES[index % len(_FEATURES)]


def num_cols_of(group: Group, index: int) -> int:
    """Columns of this rank's weight in a round: 16 or none."""
    return 0 if group.rank == _WITHOUT_COLUMNS[index % len(_WITHOUT_COLUMNS)] else 16


def gather_memory(group: Group) -> Input:
    """Input and regions of the cases that gather `rows_of` rows."""
    reserve(group, group.world_size * _MAX_ROWS * _MAX_FEATURES)
    return Input(group, _MAX_ROWS * _MAX_FEATURES)


def _ag_gemm(group: Group, rounds: int) -> None:
    memory = gather_memory(group)
    for index in range(rounds):
        rows, features = rows_of(group, index), features_of(index)
        xs = [integers((r, features), index, rank) for rank, r in enumerate(rows)]
        weight = integers((num_cols_of(group, index), features), index, 99)
        x = memory.put(xs[group.rank])
        whole = torch.cat(xs)
        if index == 1:  # closes its region by a launch of its own
            out, gathered = plait.ag_gemm(
                x, weight, group=group, rows_per_rank=rows, return_gathered=True, impl="fused"
            )
            expect("ag_gemm gathered", group, index, gathered, whole)
        else:
            out = plait.ag_gemm(x, weight, group=group, rows_per_rank=rows, impl="fused")
        expect("ag_gemm", group, index, out, whole @ weight.T)


def _all_gather(group: Group, rounds: int) -> None:
    memory = gather_memory(group)
    for index in range(rounds):
        rows, features = rows_of(group, index), features_of(index)
        xs = [integers((r, features), index, rank) for rank, r in enumerate(rows)]
        x = memory.put(xs[group.rank])
        out = plait.all_gather(x, group=group, rows_per_rank=rows, impl="fused")
        expect("all_gather", group, index, out, torch.cat(xs))


def _barrier(group: Group, rounds: int) -> None:
    inbox = group.empty(group.world_size, 16)
    peers = [group.peer_tensor(inbox, peer) for peer in range(group.world_size)]
    for index in range(rounds):
        own = integers((16,), index, group.rank)
        for peer in peers:
            copy_by_case(group, peer[group.rank], own)
        group.barrier()
        got = torch.empty_like(inbox)
        copy_by_case(group, got, inbox)
        group.barrier()
        want = torch.stack([integers((16,), index, rank) for rank in range(group.world_size)])
        expect("barrier", group, index, got, want)


# Rows that the ranks own of a sum, and its columns, per round. Rank 0's rows of round 0 keep two
# blocks busy, and both it and rank 2, the last one, are sent rows again in round 1.
_SHARES = ((64, 0, 32), (64, 0, 32), (0, 32, 64))
_SUM_COLS = (16, 32, 16)
_SUM_ROWS = 96


def _sum_memory(group: Group) -> Input:
    """Input and regions of the cases that add up: slots of 96 rows at most, and a result."""
    reserve(group, (group.world_size + 1) * _SUM_ROWS * max(_SUM_COLS))
    return Input(group, _SUM_ROWS * max(_SUM_COLS))


def _shares(group: Group, index: int) -> list[int]:
    shares = _SHARES[index % len(_SHARES)]
    return [shares[rank] if rank < 3 else 0 for rank in range(group.world_size)]


def _products(group: Group, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's x [96, 4 (rank + 1)] and weight [N, 4 (rank + 1)] of a round."""
    num_cols = _SUM_COLS[index % len(_SUM_COLS)]
    xs, weights = [], []
    for rank in range(group.world_size):
        features = 4 * (rank % 3 + 1)
        xs.append(integers((_SUM_ROWS, features), index, rank))
        weights.append(integers((num_cols, features), index, rank, 99))
    return xs, weights


def _total(xs: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x @ weight.T for x, weight in zip(xs, weights, strict=True)]).sum(0)


def _own(whole: torch.Tensor, shares: list[int], rank: int) -> torch.Tensor:
    return whole.split(shares)[rank]


def _gemm_rs_staged(group: Group, rounds: int) -> None:
    _gemm_rs(group, rounds, "staged")


def _gemm_rs(group: Group, rounds: int, algorithm: str = "direct") -> None:
    memory = _sum_memory(group)
    for index in range(rounds):
        shares = _shares(group, index)
        xs, weights = _products(group, index)
        shares[0] += _SUM_ROWS - sum(shares)  # fewer ranks than shares
        x = memory.put(xs[group.rank])
        options = {"rows_per_rank": shares, "impl": "fused", "algorithm": algorithm}
        out = plait.gemm_rs(x, weights[group.rank], group=group, **options)
        expect("gemm_rs", group, index, out, _own(_total(xs, weights), shares, group.rank))
        gap(group)


def _gemm_ar(group: Group, rounds: int) -> None:
    memory = _sum_memory(group)
    for index in range(rounds):
        xs, weights = _products(group, index)
        x = memory.put(xs[group.rank])
        algorithm = ("one_shot", "two_shot", "two_shot")[index % 3]
        out = plait.gemm_ar(x, weights[group.rank], group=group, algorithm=algorithm, impl="fused")
        expect("gemm_ar", group, index, out, _total(xs, weights))
        gap(group)


def _reduce_scatter(group: Group, rounds: int) -> None:
    memory = _sum_memory(group)
    for index in range(rounds):
        shares = _shares(group, index)
        shares[0] += _SUM_ROWS - sum(shares)
        num_cols = _SUM_COLS[index % len(_SUM_COLS)]
        xs = [integers((_SUM_ROWS, num_cols), index, r) for r in range(group.world_size)]
        x = memory.put(xs[group.rank])
        out = plait.reduce_scatter(x, group=group, rows_per_rank=shares, impl="fused")
        expect(
            "reduce_scatter", group, index, out, _own(torch.stack(xs).sum(0), shares, group.rank)
        )
        gap(group)


def _all_reduce(group: Group, rounds: int) -> None:
    memory = _sum_memory(group)
    for index in range(rounds):
        num_cols = _SUM_COLS[index % len(_SUM_COLS)]
        xs = [integers((_SUM_ROWS, num_cols), index, r) for r in range(group.world_size)]
        x = memory.put(xs[group.rank])
        out = plait.all_reduce(x, group=group, algorithm="one_shot", impl="fused")
        expect("all_reduce", group, index, out, torch.stack(xs).sum(0))
        gap(group)


def _all_to_all(group: Group, rounds: int) -> None:
    memory = _sum_memory(group)
    for index in range(rounds):
        # Rank s sends splits[(s + p) % 3] rows to rank p.
        splits, num_ranks = _SHARES[index % len(_SHARES)], range(group.world_size)
        sends = [[splits[(sender + p) % 3] for p in num_ranks] for sender in num_ranks]
        features = 4 * (index % 2 + 1)
        xs = [integers((sum(rows), features), index, r) for r, rows in enumerate(sends)]
        x = memory.put(xs[group.rank])
        receives = [rows[group.rank] for rows in sends]
        out = plait.all_to_all(
            x,
            group=group,
            input_splits=sends[group.rank],
            output_splits=receives,
            max_rows=64,
            impl="fused",
        )
        parts = [x.split(rows)[group.rank] for x, rows in zip(xs, sends, strict=True)]
        expect("all_to_all", group, index, out, torch.cat(parts))
        gap(group)


_IN_FINISH = Equivalent(
    "signal_all: debug_barrier 0 removed",
    "only finish signals all ranks here, after its arrival: what thread 0 acquired there reaches "
    "the threads that signal with the arrival's result, by a CTA barrier",
)
_IN_PROLOGUE = Equivalent(
    "wait_all: debug_barrier 0 removed",
    "only the prologue waits for all ranks at once here: nothing of its kernel touches the region, "
    "and what does comes after it in the streams",
)
_PLAIN_LOADS = Equivalent(
    "finish: fence_proxy_async 0 removed", "the region is read by plain loads, not by descriptors"
)
_NO_MIRROR = Equivalent(
    "begin: store 2 removed", "the mirror is what copy engines send, and kernels send here"
)
_BEFORE_WAITS = "the wait for all ranks that follows contains a CTA barrier, whatever it finds"
_ONE_BLOCK = (
    "the region is closed by a kernel of one block: what it finishes for ended before it in the "
    "stream, and no other block arrives"
)
_LAST_CHUNK = (
    "only the last chunk of a sender is waited for, and the sender's stream signals that one last"
)
_CLOSED_BY_ONE_BLOCK = (
    Equivalent("finish: fence_proxy_async 0 removed", _ONE_BLOCK),
    Equivalent("finish: debug_barrier 0 removed", _ONE_BLOCK),
    Equivalent("finish: atomic_add 0 *", _ONE_BLOCK),
    Equivalent("signal_all: debug_barrier 0 removed", _ONE_BLOCK),
    _IN_PROLOGUE,
)

CASES: dict[str, Case] = {
    "ag_gemm": Case(_ag_gemm, rounds=4, equivalents=(_IN_FINISH, _IN_PROLOGUE)),
    "gemm_rs": Case(
        _gemm_rs,
        equivalents=(
            _PLAIN_LOADS,
            _NO_MIRROR,
            _IN_FINISH,
            Equivalent("_gemm_rs_kernel: debug_barrier 0 removed", _BEFORE_WAITS),
        ),
    ),
    "gemm_rs_staged": Case(
        _gemm_rs_staged,
        equivalents=(
            _PLAIN_LOADS,
            _IN_FINISH,
            _IN_PROLOGUE,
            Equivalent(
                "program gemm_rs: stream wait 2 removed",
                "it keeps the partial rows until their copies have ended; on virtual CPU ranks a "
                "call ends with all its copies, so that memory is never handed out sooner",
            ),
        ),
    ),
    "gemm_ar": Case(
        _gemm_ar,
        min_slots=2,  # its blocks wait for all blocks of the peers
        equivalents=(
            _PLAIN_LOADS,
            _NO_MIRROR,
            Equivalent("_gemm_ar_one_shot_kernel: debug_barrier 0 removed", _BEFORE_WAITS),
            Equivalent("_gemm_ar_two_shot_kernel: debug_barrier 0 removed", _BEFORE_WAITS),
        ),
    ),
    "all_gather": Case(
        _all_gather,
        rounds=4,
        equivalents=(
            *_CLOSED_BY_ONE_BLOCK,
            Equivalent("program all_gather: signal 2 *", _LAST_CHUNK),
        ),
    ),
    "reduce_scatter": Case(_reduce_scatter, equivalents=(_PLAIN_LOADS, _IN_FINISH, _IN_PROLOGUE)),
    "all_reduce": Case(_all_reduce, equivalents=(_PLAIN_LOADS, _IN_FINISH, _IN_PROLOGUE)),
    "all_to_all": Case(_all_to_all, equivalents=_CLOSED_BY_ONE_BLOCK),
    "barrier": Case(
        _barrier,
        equivalents=(
            Equivalent(
                "signal_all: debug_barrier 0 removed",
                "a barrier kernel stores nothing that a peer reads: what it publishes ended before "
                "it in the stream",
            ),
            Equivalent(
                "wait_all: debug_barrier 0 removed",
                "a barrier kernel reads nothing that a peer wrote: what does comes after it in the "
                "stream",
            ),
        ),
    ),
}


def get_case(operator: str) -> Case:
    """The case of an operator; ArgumentError names those there are."""
    if operator not in CASES:
        raise ArgumentError(
            argument="operator",
            expected=f"one of {', '.join(CASES)}",
            got=repr(operator),
            remedy="Choose an operator that has a case.",
        )
    return CASES[operator]


__all__ = ["CASES", "Case", "get_case"]
