"""AG+GEMM of fp8 and int8 on virtual ranks: scales of every kind travel with their rows."""

import pytest
import torch

import plait
from plait.backends.commands import Copy, Signal
from plait.check.program_mutants import drop
from plait.errors import RaceError, UnsupportedError
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap.quantized_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    GATES,
    INT8,
    KINDS,
    call,
    check_results,
    make_gather,
    run_case,
)


class Programs:
    """Remembers the AG+GEMM programs of all ranks while they pass through."""

    def __init__(self):
        self.found = []

    def __call__(self, program):
        self.found += [program] * (program.operator == "ag_gemm")
        return program

    def constants(self, name):
        launches = [each for program in self.found for each in program.launches()]
        return {each.args.get(name) for each in launches if "w0" in each.args}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "dtype", "weight_dtype"),
    [(1, E4M3, E4M3), (2, E4M3, E5M2), (2, INT8, INT8), (3, E4M3, E4M3), (3, E5M2, E5M2)],
    ids=str,
)
def test_every_dtype_and_kind(world_size, dtype, weight_dtype, kind):
    case = make_gather(
        [12] * world_size, 272, 24, dtype, kind, weight_dtype=weight_dtype, bias=True
    )
    run_case(case, seed=world_size)


@pytest.mark.parametrize("impl", ["unfused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8])
def test_the_other_implementations_mean_the_same(dtype, kind, impl):
    shapes = [(2, 3), (2, 1)]
    case = make_gather(shapes, 130, 9, dtype, kind, gather_dim=1, return_gathered=True)
    run_case(case, impl)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows", [[3, 0, 5], [1, 4], [1, 1, 1], [0, 1], [0, 0], [1, 0, 6], [40, 1, 17]], ids=str
)
def test_rows_differ_and_may_be_none_or_one(rows, kind):
    """One scale for one row may be that of the tensor or of the row: ranks lay it out alike."""
    run_case(make_gather(rows, 144, 20, E4M3, kind, rows_per_rank=rows, return_gathered=True))


@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k", "n"), [([4, 4], 0, 8), ([4, 4], 16, 0), ([0, 0], 0, 0)])
def test_empty_dims(rows, k, n, kind, impl):
    run_case(make_gather(rows, k, n, E4M3, kind, bias=True, activation="gelu"), impl)


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize(("k", "descriptors"), [(16, True), (20, False), (160, True), (1, False)])
def test_k_decides_between_descriptors_and_pointers(k, descriptors, kind):
    programs = Programs()
    run_case(make_gather([5, 5], k, 130, E4M3, kind), rewrite_program=programs)
    assert programs.constants("DESC") == {descriptors}
    assert programs.constants("BLOCK_K") == ({128} if kind == "blocks" else {max(32, min(k, 128))})


def test_a_rank_without_rows_has_no_descriptor_for_what_comes():
    """A padded weight could be described, rows of 20 bytes cannot: nor are they by rank 0."""
    case = make_gather([0, 5], 20, 18, E4M3, "rows")
    case.weights = [[torch.cat([w[0], w[0][:, :12]], 1)[:, :20]] for w in case.weights]
    assert case.weights[0][0].stride() == (32, 1)
    run_case(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shapes", "gather_dim"),
    [([(2, 3)] * 2, 0), ([(3, 2), (3, 5), (3, 0)], 1), ([(2, 2, 3), (2, 1, 3)], 1)],
    ids=str,
)
def test_gather_dim_and_leading_dims(shapes, gather_dim, kind):
    run_case(make_gather(shapes, 136, 12, E4M3, kind, gather_dim=gather_dim))


@pytest.mark.parametrize("kind", KINDS)
def test_several_weights_share_the_gather_and_the_scales(kind):
    case, programs = make_gather([6, 9], 144, 12, E4M3, kind, num_weights=3, bias=True), Programs()
    case.options |= {"return_gathered": True, "activation": "relu"}
    run_case(case, rewrite_program=programs)
    scales = [each for each in programs.found[0].commands if isinstance(each, Copy)]
    assert [each.src.dtype for each in scales].count(FP32) == 1  # one peer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", [FP32, FP16, BF16])
def test_out_dtype(out_dtype, kind):
    run_case(make_gather([5, 4], 300, 20, E4M3, kind, out_dtype=out_dtype))


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_gates_run_unfused_and_say_so(activation, dtype):
    case = make_gather([5, 2], 64, 9, dtype, "rows", num_weights=2, activation=activation)
    run_case(case, "unfused")
    run_case(case, "reference")
    assert run_virtual(lambda group: _auto(case, group), 2) == ["unfused"] * 2
    with pytest.raises(UnsupportedError, match=rf"a gate of {dtype}"):
        run_virtual(lambda group: call(case, group, impl="fused"), 2)


def _auto(case, group):
    call(case, group)
    return plait.last_run().impl


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_int8_without_scales_is_exact(impl):
    case = make_gather([3, 5], 70, 6, INT8)
    whole = torch.cat(case.xs).long()

    def fn(group):
        x, weight = case.xs[group.rank], case.weights[group.rank][0]
        return plait.ag_gemm(x, weight, group=group, rows_per_rank=[3, 5], impl=impl)

    for rank, out in enumerate(run_virtual(fn, 2)):
        assert_bitwise(out, (whole @ case.weights[rank][0].long().t()).int())


@pytest.mark.parametrize("kind", KINDS)
def test_strided_operands_and_scales(kind):
    case = make_gather([10, 10], 160, 144, E4M3, kind)
    case.xs[0] = torch.stack([case.xs[0]] * 2, -1)[..., 0]
    case.weights[1] = [case.weights[1][0].t().contiguous().t()]
    case.x_scales = [torch.stack([each] * 3, -1)[..., 1] for each in case.x_scales]
    case.weight_scales = [[torch.stack([w[0]] * 3, -1)[..., 1]] for w in case.weight_scales]
    run_case(case)


def test_scales_with_a_last_dim_of_one_and_of_mixed_size():
    """[M, 1] and [N, 1] are rows as well, and one side may have one number for all."""
    case = make_gather([6, 6], 64, 10, E4M3, "rows")
    expected = run_case(case)
    case.x_scales = [each[:, None] for each in case.x_scales]
    case.weight_scales = [[w[0][:, None]] for w in case.weight_scales]
    found = run_virtual(lambda group: call(case, group, impl="fused"), 2)
    for rank in range(2):
        assert_bitwise(found[rank][0], expected[rank][0])
    mixed = make_gather([6, 6], 64, 10, E4M3, "rows")
    mixed.weight_scales = [[torch.rand(1) + 0.1] for _ in range(2)]
    run_case(mixed)
    mixed = make_gather([6, 6], 64, 10, E4M3, "tensor")
    mixed.weight_scales = [[torch.rand(10) + 0.1] for _ in range(2)]
    run_case(mixed)


# --- workspace, order, protocol


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_workspace_makes_slices(kind):
    programs = Programs()
    case = make_gather([70, 9], 144, 12, E4M3, kind, return_gathered=True)
    scales = {"tensor": 4, "rows": 4, "blocks": 8}[kind]
    with override(workspace_bytes=2 * 2 * 32 * (144 + scales)):
        run_case(case, rewrite_program=programs)
    assert len(programs.found) == 2 * 5  # 17 rows at a time


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["late:0", "late:2", "waiter_first", "copies_last"])
def test_schedules(schedule, kind):
    run_case(make_gather([9, 9, 9], 144, 20, E4M3, kind), schedule=schedule)


@pytest.mark.parametrize("late", [0, 1])
def test_calls_of_all_kinds_back_to_back(late):
    """Regions are used again with other layouts: no scale of an earlier call is taken."""
    cases = [make_gather([7, 5], 144, 12, E4M3, KINDS[i % 3]) for i in range(9)]

    def fn(group):
        return [call(case, group, impl="fused") for case in cases]

    for rank, results in enumerate(run_virtual(fn, 2, schedule=f"late:{late}")):
        for case, outs in zip(cases, results, strict=True):
            check_results(case, rank, outs)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_go_ahead_of_each_peers_first_signal(kind):
    programs = Programs()
    run_case(make_gather([40] * 3, 144, 12, E4M3, kind), rewrite_program=programs)
    for program in programs.found:
        marks = [
            "signal" if isinstance(each, Signal) else "scales" if each.src.dtype is FP32 else "rows"
            for each in program.commands
            if isinstance(each, (Copy, Signal))
        ]
        assert marks == ["scales", *["rows", "signal"] * 2] * 2  # two chunks, two peers


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_or_late_copy_of_scales_is_noticed(kind):
    """The protocol has no signal of its own for scales: their place before the rows' is needed."""
    case = make_gather([80, 80], 144, 12, E4M3, kind)
    with pytest.raises((AssertionError, RaceError)):
        run_case(case, rewrite_program=drop("ag_gemm", "copy", 0))

    def late(program):
        """The copy of scales just after the first signal."""
        if program.operator == "ag_gemm":
            first = next(i for i, each in enumerate(program.commands) if isinstance(each, Signal))
            copy = next(i for i, each in enumerate(program.commands) if isinstance(each, Copy))
            program.commands.insert(first, program.commands.pop(copy))
        return program

    for schedule in ("random", "copies_last", "late:1"):
        with pytest.raises(RaceError):
            run_case(case, rewrite_program=late, schedule=schedule)


@pytest.mark.parametrize("kind", KINDS)
def test_emulated_peers_send_scales_ahead_of_their_rows(kind):
    """What arrives mirrors what is sent; the words that scales set are those of no chunk."""
    programs = Programs()
    rows, k = [40, 0, 7], 144
    run_case(make_gather(rows, k, 12, E4M3, kind), rewrite_program=programs)
    columns = 2 if kind == "blocks" else 1
    for program in programs.found:
        (arrivals,) = program.arrivals
        pieces = arrivals.build()
        rank = int(arrivals.ctx[0])
        peers = [peer for peer in ((rank - 1) % 3, (rank - 2) % 3) if rows[peer]]
        first = {peer: next(each for each in pieces if each.peer == peer) for peer in peers}
        assert {each.peer for each in pieces} == set(peers)
        for peer, piece in first.items():
            assert piece.dst.dtype is piece.src.dtype is FP32
            assert piece.nbytes == 4 * (1 if kind == "tensor" else rows[peer] * columns)
        own = [each for each in pieces if each.dst.dtype is E4M3]
        assert sum(each.nbytes for each in own) == k * sum(rows[peer] for peer in peers)
        assert len({each.word.data_ptr() for each in pieces}) == len(pieces)
