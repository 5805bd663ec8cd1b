"""GEMM+AR on virtual ranks: bit by bit the reference on every rank, with races looked for."""

import pytest
import torch

import plait
from plait.errors import (
    ArgumentError,
    CapacityError,
    DtypeError,
    RanksDisagreeError,
    ShapeError,
)
from plait.overlap.gemm_ar.launch import choose_algorithm
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap import sum_cases
from tests.host.overlap.sum_cases import Launches, call, check_results, reference, run_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALGORITHMS = ("one_shot", "two_shot")


def make_case(*args, exact=True, **options):
    return sum_cases.make_case("gemm_ar", *args, exact=exact, **options)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return request.param


# --- worlds and shapes


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, BF16), (2, FP32), (2, BF16), (2, FP16), (3, BF16), (4, FP32), (5, FP16)],
    ids=str,
)
def test_values(world_size, dtype, algorithm):
    case = make_case(world_size, 9, 32, 20, dtype, bias=True, algorithm=algorithm)
    run_case(case, seed=world_size)


@pytest.mark.parametrize(("world_size", "algorithm"), [(6, "one_shot"), (7, "two_shot"), (8, None)])
def test_larger_worlds(world_size, algorithm):
    run_case(make_case(world_size, 5, 16, 8, BF16, algorithm=algorithm or "auto"))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_random_values_by_both_algorithms(dtype):
    """As good as plain PyTorch, and the same bits by either algorithm."""
    case = make_case(3, 12, 96, 40, dtype, bias=True, exact=False)

    def fn(group):
        return [call(case, group, algorithm=algorithm) for algorithm in ALGORITHMS]

    results = run_virtual(fn, 3)
    for one_shot, two_shot in results:
        assert_bitwise(one_shot, two_shot)
    check_results(case, [one_shot for one_shot, _ in results])


@pytest.mark.parametrize("shape", [1, 2, 3, (2, 5), (2, 1, 3), (1, 0, 3)], ids=str)
def test_few_rows_and_leading_dims(shape, algorithm):
    run_case(make_case(4, shape, 17, 12, BF16, bias=True, algorithm=algorithm))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (4, 0, 8), (4, 16, 0), (0, 0, 0)])
def test_empty_dims(m, k, n, algorithm):
    run_case(make_case(2, m, k, n, BF16, bias=True, algorithm=algorithm))


@pytest.mark.parametrize(
    ("k", "n", "dtype", "descriptors"),
    [(16, 24, BF16, True), (33, 19, BF16, False), (1, 1, FP16, False), (13, 5, FP32, False)],
)
def test_odd_k_and_n(k, n, dtype, descriptors, algorithm):
    launches = Launches()
    case = make_case(2, 10, k, n, dtype, algorithm=algorithm)
    run_case(case, rewrite_program=launches)
    assert launches.constants("DESC") == {descriptors}


def test_each_rank_has_its_own_k(algorithm):
    """Tiles must not depend on K, nor on who can use descriptors: they decide the words."""
    launches = Launches()
    case = make_case(3, 9, [32, 33, 0], 24, BF16, algorithm=algorithm)
    run_case(case, rewrite_program=launches)
    assert launches.constants("DESC") == {True, False}


def test_many_tiles(algorithm):
    """More than one tile of rows and of columns, and more tiles than blocks."""
    launches = Launches()
    case = make_case(2, 290, 8, 140, FP32, bias=True, algorithm=algorithm)
    run_case(case, rewrite_program=launches)
    blocks = [launch.args["BLOCK_M"] * launch.args["BLOCK_N"] for launch in launches.found]
    assert all(2 * launches.found[0].grid * block < 290 * 140 for block in blocks)


def test_auto_takes_one_hop_for_few_rows():
    assert choose_algorithm(64, 8) == "one_shot"
    assert choose_algorithm(65, 8) == "two_shot"
    assert choose_algorithm(4096, 2) == "one_shot"  # both send the same bytes


# --- the sum


def test_partials_are_added_in_rank_order(algorithm):
    case = make_case(4, 6, 16, 12, FP32, algorithm=algorithm)
    case.weights[2] = case.weights[1]
    case.xs[1] = case.xs[1] * 2.0**24
    case.xs[2] = -case.xs[1]
    backwards = make_case(4, 6, 16, 12, FP32)
    backwards.xs, backwards.weights = case.xs[::-1], case.weights[::-1]
    assert not torch.equal(reference(case, 0), reference(backwards, 0))
    run_case(case)


def test_minus_zero_stays(algorithm):
    """Partials that vanish in fp16 keep their sign, and so does their sum."""
    case = make_case(3, 6, 1, 12, FP32, reduce_dtype=FP16, algorithm=algorithm)
    case.xs = [torch.full_like(x, -(2.0**-30)) for x in case.xs]
    case.weights = [torch.ones_like(weight) for weight in case.weights]
    assert all(torch.signbit(out).all() for out in run_case(case))


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "out_dtype"),
    [(BF16, FP32, None), (BF16, FP32, FP32), (BF16, None, FP32), (FP32, BF16, None),
     (FP16, BF16, BF16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("impl", ["one_shot", "two_shot", "unfused", "reference"])
def test_dtypes_of_partials_and_of_the_result(dtype, reduce_dtype, out_dtype, impl):
    options = {"reduce_dtype": reduce_dtype, "out_dtype": out_dtype}
    options |= {"algorithm": impl} if impl in ALGORITHMS else {"impl": impl}
    case = make_case(2, 6, 32, 20, dtype, bias=True, **options)
    outs = run_virtual(lambda group: call(case, group), 2)
    if impl == "unfused":  # a plain GEMM rounds to the dtype of x before the partials travel
        case.xs = [x.float() for x in case.xs]
        case.weights = [weight.float() for weight in case.weights]
        case.options["out_dtype"] = out_dtype or dtype
        case.options["reduce_dtype"] = reduce_dtype if reduce_dtype is BF16 else dtype
    check_results(case, outs)


# --- layouts


def test_strided_operands(algorithm):
    case = make_case(2, 20, 32, 24, FP32, bias=True, algorithm=algorithm)
    case.xs = [case.xs[0][::2, ::2], case.xs[1].t().contiguous().t()[:10, :16]]
    case.weights = [case.weights[0][::2, ::2], case.weights[1][:12, 16:]]
    case.biases = [bias[::2] for bias in case.biases]
    assert not any(t.is_contiguous() for t in (*case.xs, *case.weights, *case.biases))
    run_case(case)


@pytest.mark.parametrize("n", [24, 23])
def test_a_transposed_weight_is_read_in_place(n, algorithm):
    """By a descriptor over [K, N], or by its strides where no descriptor can."""
    case, launches = make_case(2, 6, 16, n, BF16, algorithm=algorithm), Launches()
    case.weights = [weight.t().contiguous().t() for weight in case.weights]
    run_case(case, rewrite_program=launches)
    assert launches.constants("B_KN") == launches.constants("DESC") == {n == 24}


# --- workspace, order, repetition


@pytest.mark.parametrize(("algorithm", "num_slices"), [("one_shot", 4), ("two_shot", 2)])
def test_a_small_workspace_makes_slices(algorithm, num_slices):
    """40 rows are halved until they fit; two shots need room for W shares and the result."""
    launches = Launches()
    case = make_case(3, 40, 16, 24, FP32, bias=True, algorithm=algorithm)
    with override(workspace_bytes=2 * 3 * 18 * 24 * 4):
        run_case(case, rewrite_program=launches)
    assert len(launches.found) == 3 * num_slices


def test_no_room_for_one_row():
    with override(workspace_bytes=1024), pytest.raises(CapacityError, match="not even one row"):
        run_virtual(lambda group: call(make_case(2, 4, 8, 128), group), 2)


@pytest.mark.parametrize(
    "schedule", ["late:0", "late:1", "late:2", "waiter_first", "consumer_first", "copies_last"]
)
def test_schedules(schedule, algorithm):
    case = make_case(3, 20, 16, 40, BF16, bias=True, algorithm=algorithm)
    run_case(case, schedule=schedule)


@pytest.mark.parametrize(("algorithm", "late"), [("one_shot", 0), ("two_shot", 1)])
def test_sixty_rounds_with_a_late_rank(algorithm, late):
    make = lambda: make_case(2, 3, 16, 16, BF16, algorithm=algorithm)  # noqa: E731
    sum_cases.repeat(make, 60, 2, schedule=f"late:{late}", check=False)


@pytest.mark.parametrize("schedule", ["random", "copies_last", "consumer_first"])
def test_rounds_in_poisoned_memory(schedule):
    """Shapes and algorithms take turns in the same two regions."""
    shapes = [(6, 12), (2, 40), (7, 12)]
    cases = [
        make_case(3, m, 16, n, FP32, bias=True, algorithm=algorithm)
        for m, n in shapes
        for algorithm in ALGORITHMS
    ]
    sum_cases.run_in_poisoned_memory(cases, schedule=schedule)


def test_two_groups_in_turn(algorithm):
    whole = make_case(3, 9, 16, 12, BF16, algorithm=algorithm)
    sum_cases.run_in_two_groups(whole, make_case(2, 4, 16, 20, BF16))


def test_with_gemm_rs_in_the_same_regions():
    ar, rs = make_case(2, 4, 16, 12), sum_cases.make_case("gemm_rs", 2, 4, 16, 12, exact=True)
    fn = lambda group: [  # noqa: E731
        call(case, group) for _ in range(3) for case in (ar, rs, ar)
    ]
    sum_cases.compare_all([ar, rs, ar] * 3, run_virtual(fn, 2, schedule="copies_last"))


# --- bad input


def one(*shape, dtype=FP32):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"),
    [
        ((one(4, 8), one(6, 7)), {}, ShapeError, r"weight: expected shape \[N, 8\]"),
        ((one(8), one(6, 8)), {}, ShapeError, r"x: expected .*\[\.\.\., K\]"),
        ((one(4, 8), one(6, 8, 1)), {}, ShapeError, r"weight: expected two dims"),
        ((one(4, 8), one(6, 8), one(5)), {}, ShapeError, r"bias: expected shape \[6\]"),
        ((one(4, 8), one(6, 8, dtype=BF16)), {}, DtypeError, r"weight: expected torch.float32"),
        ((one(4, 8, dtype=torch.int16), one(6, 8, dtype=torch.int16)), {}, DtypeError, r"x: expe"),
        ((one(4, 8), one(6, 8)), {"reduce_dtype": torch.int32}, DtypeError, r"reduce_dtype: exp"),
        ((one(4, 8), one(6, 8)), {"reduce_dtype": torch.float64}, DtypeError, r"reduce_dtype: e"),
        ((one(4, 8), one(6, 8)), {"out_dtype": torch.int32}, DtypeError, r"out_dtype: expected"),
        ((one(4, 8), one(6, 8)), {"algorithm": "ring"}, ArgumentError, r"algorithm: expected one"),
        ((one(4, 8), one(6, 8)), {"impl": "fast"}, ArgumentError, r"impl: expected one of 'auto'"),
    ],
)
def test_bad_input(operands, options, error, message):
    """It is refused before anybody waits, and the group goes on."""

    def fn(group):
        with pytest.raises(error, match=message):
            plait.gemm_ar(*operands, group=group, **options)
        return plait.gemm_ar(one(2, 3), one(4, 3), group=group)

    for out in run_virtual(fn, 2):
        assert_bitwise(out, torch.full((2, 4), 6.0))


@pytest.mark.parametrize("same_bytes", [True, False])
def test_ranks_that_disagree_are_told(same_bytes):
    """About rows, whether or not their regions would have to grow to different sizes."""

    def fn(group):
        plait.gemm_ar(one(8, 8), one(64, 8), group=group)
        plait.gemm_ar(one(8, 8), one(64, 8), group=group)
        size = 2 + group.rank if same_bytes else 16 + group.rank
        plait.gemm_ar(one(size, 8), one(64, 8), group=group)

    message = r"rank 0: .*gemm_ar .*M=(2|16) (.|\n)*rank 1: .*gemm_ar .*M=(3|17) "
    with pytest.raises(RanksDisagreeError, match=message):
        run_virtual(fn, 2)
