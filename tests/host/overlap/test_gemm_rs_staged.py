"""GEMM+RS by copy engine, on virtual ranks: the same bits as the direct kernel, without races."""

import pytest
import torch

import plait
from plait.backends.commands import Copy, Launch
from plait.errors import ArgumentError, CapacityError, UnsupportedError
from plait.overlap.gemm_rs.run import choose_algorithm
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap import sum_cases
from tests.host.overlap.sum_cases import call, run_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_case(*args, exact=True, **options):
    return sum_cases.make_case("gemm_rs", *args, exact=exact, algorithm="staged", **options)


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, BF16), (2, FP32), (2, FP16), (3, BF16), (4, BF16), (8, FP32)]
)
def test_values(world_size, dtype):
    run_case(make_case(world_size, 5 * world_size, 32, 24, dtype, bias=True), seed=world_size)


def test_random_values_are_as_good_as_plain_pytorch():
    run_case(make_case(3, 12, 96, 40, BF16, bias=True, exact=False))


def test_the_same_bits_as_the_direct_kernel():
    case = make_case(3, 12, 96, 40, BF16, bias=True, exact=False)

    def both(group):
        return call(case, group), call(case, group, algorithm="direct")

    for staged, direct in run_virtual(both, 3):
        assert_bitwise(staged, direct, "staged and direct")


@pytest.mark.parametrize("rows", [[3, 0, 5], [0, 0, 7], [0, 1], [0, 0], [40, 1, 17]], ids=str)
def test_rows_differ_and_may_be_none(rows):
    run_case(make_case(len(rows), sum(rows), 17, 20, BF16, bias=True, rows_per_rank=rows))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (4, 0, 8), (4, 16, 0)])
def test_empty_dims(m, k, n):
    run_case(make_case(2, m, k, n, BF16, bias=True))


def test_each_rank_has_its_own_k_and_strides():
    case = make_case(2, 20, [32, 40], 24, FP32, bias=True)
    case.xs = [case.xs[0][::2], case.xs[1][::2, :32]]
    case.weights = [case.weights[0][::2], case.weights[1][:12, 8:]]
    case.biases = [bias[::2] for bias in case.biases]
    run_case(case)


@pytest.mark.parametrize(("reduce_dtype", "out_dtype"), [(FP32, None), (FP32, FP32), (None, FP32)])
def test_dtypes_of_partials_and_of_the_result(reduce_dtype, out_dtype):
    run_case(make_case(2, 6, 32, 20, BF16, reduce_dtype=reduce_dtype, out_dtype=out_dtype))


def test_a_small_workspace_makes_slices():
    with override(workspace_bytes=2 * 2 * 16 * 24 * 4):
        run_case(make_case(2, 47, 16, 24, FP32, bias=True, rows_per_rank=[40, 7]))


def test_no_room_for_one_row():
    with override(workspace_bytes=1024), pytest.raises(CapacityError, match="not even one row"):
        run_virtual(lambda group: call(make_case(2, 4, 8, 128), group), 2)


@pytest.mark.parametrize("schedule", ["late:0", "late:2", "consumer_first", "copies_last"])
def test_schedules(schedule):
    run_case(make_case(3, 27, 16, 40, BF16, bias=True), schedule=schedule)


@pytest.mark.parametrize("late", [0, 1])
def test_forty_rounds_with_a_late_rank(late):
    make = lambda: make_case(2, 4, 16, 16, BF16)  # noqa: E731
    sum_cases.repeat(make, 40, 2, schedule=f"late:{late}", check=False)


@pytest.mark.parametrize("schedule", ["random", "copies_last"])
def test_rounds_in_poisoned_memory(schedule):
    shapes = [(6, 12), (9, 40), (3, 12), (12, 7)]
    cases = [make_case(3, m, 16, n, FP32, bias=True) for m, n in shapes]
    sum_cases.run_in_poisoned_memory(cases * 2, schedule=schedule)


def test_each_peers_rows_leave_when_they_are_computed():
    """A launch for each peer, its copy behind it, the own rows after all of them."""
    kinds = []

    def note(program):
        kinds.append([type(each).__name__ for each in program.commands if _moves(each)])
        return program

    run_case(make_case(3, 12, 16, 16, BF16), rewrite_program=note)
    # prologue, two peers (two chunks each on the CPU), own rows, sum
    peer = ["Launch", "Copy", "Copy"]
    assert kinds == [["Launch", *peer, *peer, "Launch", "Launch"]] * 3


def _moves(command):
    return isinstance(command, (Launch, Copy))


def test_gradients():
    case = make_case(2, 6, 16, 12, FP32, bias=True, exact=False)

    def gradients(group):
        rank = group.rank
        x = case.xs[rank].clone().requires_grad_()
        weight = case.weights[rank].clone().requires_grad_()
        options = {"group": group, "impl": "fused"}
        found = []
        for algorithm in ("staged", "direct"):
            out = plait.gemm_rs(x, weight, algorithm=algorithm, **options)
            found.append(torch.autograd.grad(out.square().sum(), (x, weight)))
        return found

    for staged, direct in run_virtual(gradients, 2):
        for a, b in zip(staged, direct, strict=True):
            assert_bitwise(a, b, "gradient")


def test_what_it_cannot_do():
    case = make_case(2, (2, 4), 16, 12, BF16, scatter_dim=1, impl="fused")
    with pytest.raises(UnsupportedError, match=r"algorithm: expected scatter_dim=0.*got 2 pieces"):
        run_virtual(lambda group: call(case, group), 2)
    case.options["algorithm"] = "stages"
    with pytest.raises(ArgumentError, match="algorithm: expected"):
        run_virtual(lambda group: call(case, group), 2)


def test_auto_goes_by_the_link(monkeypatch):
    from plait.collectives.segments import Segments
    from plait.symm.transports.base import LinkSpeed

    def choices(group):
        consecutive, pieces = (Segments.of((4, 4, 8), dim, (2, 2)) for dim in (0, 1))
        found = []
        for link in (None, LinkSpeed(55.0, 3.0), LinkSpeed(360.0, 3.0)):
            monkeypatch.setattr(group.transport, "link_speed", lambda link=link: link)
            found.append([choose_algorithm(group, each) for each in (consecutive, pieces)])
        return found

    expected = [["direct", "direct"], ["staged", "direct"], ["direct", "direct"]]
    assert run_virtual(choices, 2) == [expected] * 2
