"""GEMM+RS on virtual ranks: bit by bit the reference, with races looked for all the while."""

import pytest
import torch

import plait
from plait.errors import (
    ArgumentError,
    CapacityError,
    DtypeError,
    RankCountError,
    RanksDisagreeError,
    ShapeError,
    UnsupportedError,
)
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap import sum_cases
from tests.host.overlap.sum_cases import (
    Launches,
    call,
    check_results,
    reference,
    run_case,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_case(*args, exact=True, **options):
    return sum_cases.make_case("gemm_rs", *args, exact=exact, **options)


# --- worlds and shapes


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, BF16), (2, FP32), (2, BF16), (2, FP16), (3, FP32), (3, BF16), (4, FP16), (5, BF16)],
    ids=str,
)
def test_values(world_size, dtype):
    run_case(make_case(world_size, 5 * world_size, 32, 24, dtype, bias=True), seed=world_size)


@pytest.mark.parametrize("world_size", [6, 7, 8])
def test_larger_worlds(world_size):
    run_case(make_case(world_size, 2 * world_size, 16, 8, BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_random_values_are_as_good_as_plain_pytorch(dtype):
    run_case(make_case(3, 12, 96, 40, dtype, bias=True, exact=False))


@pytest.mark.parametrize(
    "rows",
    [[3, 0, 5], [0, 0, 7], [1, 0, 0, 0], [0, 1], [0, 0], [40, 1, 17]],
    ids=str,
)
def test_rows_differ_and_may_be_none(rows):
    run_case(make_case(len(rows), sum(rows), 17, 20, BF16, bias=True, rows_per_rank=rows))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (4, 0, 8), (4, 16, 0), (0, 0, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_empty_dims(m, k, n, bias):
    run_case(make_case(2, m, k, n, BF16, bias=bias))


@pytest.mark.parametrize(
    ("k", "n", "dtype", "descriptors"),
    [(16, 24, BF16, True), (33, 19, BF16, False), (1, 1, FP16, False), (13, 5, FP32, False)],
)
def test_odd_k_and_n(k, n, dtype, descriptors):
    launches = Launches()
    run_case(make_case(2, 10, k, n, dtype), rewrite_program=launches)
    assert launches.constants("DESC") == {descriptors}


def test_each_rank_has_its_own_k():
    """Tiles must not depend on K, nor on who can use descriptors: they decide the words."""
    launches = Launches()
    run_case(make_case(3, 9, [32, 33, 0], 24, BF16), rewrite_program=launches)
    assert launches.constants("DESC") == {True, False}


def test_many_tiles():
    """More than one tile a segment, in both directions, and more tiles than blocks."""
    launches = Launches()
    run_case(make_case(2, 300, 8, 140, FP32, bias=True), rewrite_program=launches)
    assert all(launch.args["num_tiles"] > launch.grid for launch in launches.found)


# --- the sum


def test_partials_are_added_in_rank_order():
    case = make_case(4, 8, 16, 12, FP32)
    case.weights[2] = case.weights[1]
    case.xs[1] = case.xs[1] * 2.0**24
    case.xs[2] = -case.xs[1]
    backwards = make_case(4, 8, 16, 12, FP32)
    backwards.xs, backwards.weights = case.xs[::-1], case.weights[::-1]
    assert not torch.equal(reference(case, 0), reference(backwards, 0))
    run_case(case)


def test_minus_zero_stays():
    """Partials that vanish in fp16 keep their sign, and so does their sum."""
    case = make_case(3, 6, 1, 12, FP32, reduce_dtype=FP16)
    case.xs = [torch.full_like(x, -(2.0**-30)) for x in case.xs]
    case.weights = [torch.ones_like(weight) for weight in case.weights]
    assert all(torch.signbit(out).all() for out in run_case(case))


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "out_dtype"),
    [(BF16, FP32, None), (BF16, FP32, FP32), (BF16, None, FP32), (FP32, BF16, None),
     (FP16, BF16, BF16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
def test_dtypes_of_partials_and_of_the_result(dtype, reduce_dtype, out_dtype, impl):
    options = {"reduce_dtype": reduce_dtype, "out_dtype": out_dtype, "impl": impl}
    case = make_case(2, 6, 32, 20, dtype, bias=True, **options)
    outs = run_virtual(lambda group: call(case, group), 2)
    if impl == "unfused" and reduce_dtype is FP32:
        case.options["reduce_dtype"] = None  # a plain GEMM rounds to the dtype of x before that
    check_results(case, outs)


# --- layouts


def test_strided_operands():
    case = make_case(2, 20, 32, 24, FP32, bias=True)
    case.xs = [case.xs[0][::2, ::2], case.xs[1].t().contiguous().t()[:10, :16]]
    case.weights = [case.weights[0][::2, ::2], case.weights[1][:12, 16:]]
    case.biases = [bias[::2] for bias in case.biases]
    assert not any(t.is_contiguous() for t in (*case.xs, *case.weights, *case.biases))
    run_case(case)


@pytest.mark.parametrize("n", [24, 23])
def test_a_transposed_weight_is_read_in_place(n):
    """By a descriptor over [K, N], or by its strides where no descriptor can."""
    case, launches = make_case(2, 6, 16, n, BF16), Launches()
    case.weights = [weight.t().contiguous().t() for weight in case.weights]
    run_case(case, rewrite_program=launches)
    assert launches.constants("B_KN") == launches.constants("DESC") == {n == 24}


@pytest.mark.parametrize(
    ("shape", "scatter_dim", "rows"),
    [
        ((4, 3), 0, None),
        ((2, 4), 1, None),
        ((3, 7), 1, [2, 5]),
        ((2, 4, 3), 1, None),
        ((2, 2, 6), 2, [1, 5]),
        ((0, 4), 1, None),
    ],
    ids=str,
)
def test_scatter_dim_and_leading_dims(shape, scatter_dim, rows):
    options = {"scatter_dim": scatter_dim, "rows_per_rank": rows}
    run_case(make_case(2, shape, 16, 12, BF16, bias=True, **options))


@pytest.mark.parametrize("rows", [None, [4, 8]])
def test_the_last_dim_runs_unfused_and_says_so(rows):
    case = make_case(2, 5, 16, 12, FP32, bias=True, scatter_dim=1, rows_per_rank=rows)
    start = 0
    for rank, size in enumerate(sum_cases.sizes_of(case)):
        case.biases[rank] = case.biases[rank].narrow(0, start, size)
        start += size
    outs = run_virtual(lambda group: call(case, group), 2)
    check_results(case, outs)
    case.options["impl"] = "fused"
    with pytest.raises(UnsupportedError, match=r"impl: expected a call .* last dim, which is N"):
        run_virtual(lambda group: call(case, group), 2)


# --- workspace, order, repetition


@pytest.mark.parametrize(("rows", "num_slices"), [([40, 40], 4), ([40, 7], 4), ([16, 16], 1)])
def test_a_small_workspace_makes_slices(rows, num_slices):
    """16 rows a rank fit; 40 are halved until they do."""
    launches = Launches()
    case = make_case(2, sum(rows), 16, 24, FP32, bias=True, rows_per_rank=rows)
    with override(workspace_bytes=2 * 2 * 16 * 24 * 4):
        run_case(case, rewrite_program=launches)
    assert len(launches.found) == 2 * num_slices


def test_slices_cut_through_outer_blocks():
    case = make_case(2, (3, 15), 8, 24, FP32, scatter_dim=1, rows_per_rank=[11, 4])
    with override(workspace_bytes=2 * 2 * 16 * 24 * 4):
        run_case(case)


def test_no_room_for_one_row():
    with override(workspace_bytes=1024), pytest.raises(CapacityError, match="not even one row"):
        run_virtual(lambda group: call(make_case(2, 4, 8, 128), group), 2)


@pytest.mark.parametrize(
    "schedule", ["late:0", "late:1", "late:2", "waiter_first", "consumer_first", "copies_last"]
)
def test_schedules(schedule):
    run_case(make_case(3, 27, 16, 40, BF16, bias=True), schedule=schedule)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("rows", [None, [4, 0], [0, 4]])
def test_sixty_rounds_with_a_late_rank(late, rows):
    """A rank without rows waits for no data: only "consumed" keeps it from running ahead."""
    make = lambda: make_case(2, 4, 16, 16, BF16, rows_per_rank=rows)  # noqa: E731
    sum_cases.repeat(make, 60, 2, schedule=f"late:{late}", check=False)


@pytest.mark.parametrize("schedule", ["random", "copies_last", "consumer_first"])
def test_rounds_in_poisoned_memory(schedule):
    shapes = [(6, 12), (9, 40), (3, 12), (12, 7)]
    cases = [make_case(3, m, 16, n, FP32, bias=True) for m, n in shapes]
    sum_cases.run_in_poisoned_memory(cases * 2, schedule=schedule)


def test_two_groups_in_turn():
    sum_cases.run_in_two_groups(make_case(3, 9, 16, 12, BF16), make_case(2, 4, 16, 20, BF16))


# --- bad input


def one(*shape, dtype=FP32):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"),
    [
        ((one(5, 8), one(6, 8)), {}, ShapeError, r"x: expected a size .* 2 ranks divide, got 5"),
        ((one(4, 8), one(6, 7)), {}, ShapeError, r"weight: expected shape \[N, 8\]"),
        ((one(8), one(6, 8)), {}, ShapeError, r"x: expected .*\[\.\.\., K\]"),
        ((one(4, 8), one(6, 8, 1)), {}, ShapeError, r"weight: expected two dims"),
        ((one(4, 8), one(6, 8), one(5)), {}, ShapeError, r"bias: expected shape \[6\]"),
        ((one(4, 8), one(6, 8), one(6)), {"scatter_dim": 1}, ShapeError,
         r"bias: expected shape \[3\]"),
        ((one(4, 8), one(6, 8, dtype=BF16)), {}, DtypeError, r"weight: expected torch.float32"),
        ((one(4, 8, dtype=torch.int16), one(6, 8, dtype=torch.int16)), {}, DtypeError, r"x: expe"),
        ((one(4, 8, dtype=torch.float64), one(6, 8, dtype=torch.float64)), {}, DtypeError,
         r"x: expected dtype"),
        ((one(4, 8), one(6, 8)), {"reduce_dtype": torch.int32}, DtypeError, r"reduce_dtype: exp"),
        ((one(4, 8), one(6, 8)), {"reduce_dtype": torch.float64}, DtypeError, r"reduce_dtype: e"),
        ((one(4, 8), one(6, 8)), {"out_dtype": torch.int32}, DtypeError, r"out_dtype: expected"),
        ((one(4, 8), one(6, 8)), {"scatter_dim": 2}, ShapeError, r"scatter_dim: expected"),
        ((one(4, 8), one(6, 8)), {"rows_per_rank": [4]}, RankCountError, r"rows_per_rank: expect"),
        ((one(4, 8), one(6, 8)), {"rows_per_rank": [5, -1]}, ArgumentError, r"rows_per_rank.*: e"),
        ((one(4, 8), one(6, 8)), {"rows_per_rank": [1, 2]}, ShapeError, r"a sum of 4, .* add up"),
        ((one(4, 8), one(6, 8)), {"impl": "fast"}, ArgumentError, r"impl: expected one of 'auto'"),
    ],
)  # fmt: skip
def test_bad_input(operands, options, error, message):
    """It is refused before anybody waits, and the group goes on."""

    def fn(group):
        with pytest.raises(error, match=message):
            plait.gemm_rs(*operands, group=group, **options)
        return plait.gemm_rs(one(2, 3), one(4, 3), group=group)

    for out in run_virtual(fn, 2):
        assert_bitwise(out, torch.full((1, 4), 6.0))


def test_ranks_that_disagree_are_told():
    def fn(group):
        plait.gemm_rs(one(4, 8), one(6 + group.rank, 8), group=group)

    with pytest.raises(RanksDisagreeError, match=r"rank 0: .*gemm_rs(.|\n)*rank 1: .*gemm_rs"):
        run_virtual(fn, 2)
