"""AG+GEMM on virtual ranks against the reference in fp64, with races looked for all the while."""

import pytest
import torch

from plait.collectives.segments import Segments
from plait.errors import ShapeError, UnsupportedError
from plait.ops.matmul.configs import Config
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common.operands import Weights
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap.ag_gemm_cases import GATES, call, check_results, make_case, run_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


class Kernels:
    """Remembers the AG+GEMM launches of all ranks while programs pass through."""

    def __init__(self):
        self.launches = []

    def __call__(self, program):
        gemms = [each for each in program.launches() if "gemm" in each.kernel.fn.__name__]
        self.launches += gemms
        return program

    def constants(self, name):
        return {launch.args[name] for launch in self.launches}


# --- worlds and shapes


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, BF16), (2, FP32), (2, BF16), (2, FP16), (3, FP32), (3, BF16), (4, FP16), (5, BF16)],
    ids=str,
)
def test_values(world_size, dtype):
    run_case(make_case([12] * world_size, 32, 24, dtype, bias=True), seed=world_size)


@pytest.mark.parametrize("world_size", [6, 7, 8])
def test_larger_worlds(world_size):
    run_case(make_case([2] * world_size, 16, 16, BF16))


def test_each_rank_has_its_own_number_of_columns():
    run_case(make_case([8] * 3, 16, [24, 0, 40], BF16, activation="silu"))


@pytest.mark.parametrize(
    "rows",
    [[3, 0, 5], [0, 0, 7], [1, 0, 0, 0], [0, 1], [0, 0], [40, 1, 17]],
    ids=str,
)
@pytest.mark.parametrize("k", [16, 17])
def test_rows_differ_and_may_be_none(rows, k):
    run_case(make_case(rows, k, 20, BF16, rows_per_rank=rows, return_gathered=True))


@pytest.mark.parametrize(("rows", "k", "n"), [([4, 4], 0, 8), ([4, 4], 16, 0), ([0, 0], 0, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_empty_dims(rows, k, n, bias):
    run_case(make_case(rows, k, n, BF16, bias=bias, activation="gelu", return_gathered=True))


@pytest.mark.parametrize(
    ("k", "dtype", "descriptors"),
    [(16, BF16, True), (40, BF16, True), (20, BF16, False), (33, BF16, False), (1, FP16, False),
     (12, FP32, True), (13, FP32, False)],
)  # fmt: skip
def test_k_decides_between_descriptors_and_pointers(k, dtype, descriptors):
    kernels = Kernels()
    run_case(make_case([5, 5], k, 18, dtype), rewrite_program=kernels)
    assert kernels.constants("DESC") == {descriptors}


# --- layouts


@pytest.mark.parametrize("desc", [True, False])
def test_a_transposed_weight_is_read_in_place(desc):
    case, kernels = make_case([6, 6], 16, 24 if desc else 23, BF16), Kernels()
    case.weights = [[weights[0].t().contiguous().t()] for weights in case.weights]
    run_case(case, rewrite_program=kernels)
    assert kernels.constants("B_KN") == {desc}  # pointers read any strides
    assert kernels.constants("DESC") == {desc}


def test_strided_operands():
    case = make_case([10, 10], 32, 24, FP32, bias=True)
    case.xs = [case.xs[0][:, ::2], case.xs[1].t().contiguous().t()[:, :16]]
    case.weights = [[weights[0][::2, ::2]] for weights in case.weights]
    case.biases = [[biases[0][::2]] for biases in case.biases]
    assert not any(
        each.is_contiguous() for each in (*case.xs, case.weights[0][0], case.biases[0][0])
    )
    run_case(case)


def test_an_expanded_x_and_unaligned_addresses():
    case = make_case([6, 6], 16, 16, BF16)
    case.xs = [case.xs[0][:1].expand(6, 16), case.xs[1]]
    flat = torch.randn(16 * 16 + 1).to(BF16)
    case.weights = [[flat[1:].view(16, 16)], [flat[:-1].view(16, 16)]]
    run_case(case)


@pytest.mark.parametrize(
    ("shapes", "gather_dim"),
    [
        ([(2, 3)] * 2, 0),
        ([(2, 3)] * 2, 1),
        ([(3, 2), (3, 5), (3, 0)], 1),
        ([(2, 3, 2)] * 2, 1),
        ([(2, 2, 3)] * 3, 2),
        ([(2, 2, 3), (2, 1, 3)], -3),
        ([(0, 3)] * 2, 1),
    ],
    ids=str,
)
def test_gather_dim_and_leading_dims(shapes, gather_dim):
    dim = gather_dim % 4 if gather_dim < 0 else gather_dim
    case = make_case(shapes, 16, 12, BF16, gather_dim=dim, return_gathered=True)
    case.options["gather_dim"] = gather_dim
    run_case(case)


def test_the_last_dim_runs_unfused_and_says_so():
    case = make_case([4, 4], 12, 10, FP32)
    case.weights = [[torch.randn(10, 24)] for _ in range(2)]
    case.options["gather_dim"] = -1
    run_case(case, impl="unfused")
    case.options["impl"] = "fused"
    with pytest.raises(UnsupportedError, match=r"impl: expected a call .* last dim, which is K"):
        run_virtual(lambda group: call(case, group), 2)


# --- weights, epilogues, dtypes


@pytest.mark.parametrize("bias", [True, False])
def test_several_weights_share_the_gather(bias):
    case, kernels = make_case([6, 9], 16, 12, BF16, num_weights=3, bias=bias), Kernels()
    case.weights[0][1] = torch.randn(40, 16).to(BF16)
    if bias:
        case.biases[0][1] = torch.randn(40).to(BF16)
    case.options |= {"return_gathered": True, "activation": "relu"}
    run_case(case, rewrite_program=kernels)
    assert len(kernels.launches) == 2 * 3


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu", *GATES])
def test_activations(activation, dtype):
    case = make_case([7, 7], 16, 24, dtype, num_weights=1 + (activation in GATES), bias=True)
    run_case(case.__class__(case.xs, case.weights, case.biases, {"activation": activation}))


@pytest.mark.parametrize("activation", GATES)
def test_gates_without_bias_and_without_descriptors(activation):
    run_case(make_case([5, 2], 17, 9, FP16, num_weights=2, activation=activation))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(BF16, FP32), (FP16, BF16), (FP32, FP16)], ids=str
)
def test_out_dtype(dtype, out_dtype):
    results = run_case(make_case([4, 4], 16, 20, dtype, out_dtype=out_dtype))
    assert {outs[0].dtype for outs in results} == {out_dtype}


@pytest.mark.parametrize("impl", ["unfused", "reference"])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_the_other_implementations_mean_the_same(impl, gather_dim):
    shapes = [(2, 3), (2, 1)] if gather_dim else [(3, 2), (1, 2)]
    options = {"gather_dim": gather_dim, "impl": impl, "return_gathered": True}
    run_case(make_case(shapes, 8, 6, BF16, num_weights=2, activation="swiglu", **options), impl)


# --- workspace, order, repetition


@pytest.mark.parametrize("return_gathered", [True, False])
def test_a_small_workspace_makes_slices(return_gathered):
    kernels = Kernels()
    case = make_case([70, 9], 16, 12, FP32, return_gathered=return_gathered)
    with override(workspace_bytes=2 * 2 * 32 * 16 * 4):
        run_case(case, rewrite_program=kernels)
    assert len(kernels.launches) == 2 * 5  # 70 rows are halved until they fit: 17 at a time


def test_slices_cut_through_outer_blocks():
    case = make_case([(3, 11), (3, 4)], 8, 12, FP32, gather_dim=1, return_gathered=True)
    with override(workspace_bytes=2 * 2 * 16 * 8 * 4):
        run_case(case)


@pytest.mark.parametrize(
    "schedule", ["late:0", "late:1", "late:2", "waiter_first", "consumer_first", "copies_last"]
)
def test_schedules(schedule):
    run_case(make_case([9, 9, 9], 16, 20, BF16, return_gathered=True), schedule=schedule)


def repeat(rounds, world_size, **world):
    """New data every round, nothing in between; each rank keeps all results and compares them."""
    cases = [make_case([2] * world_size, 16, 16, BF16) for _ in range(rounds)]
    results = run_virtual(lambda group: [call(case, group) for case in cases], world_size, **world)
    for rank, rounds_of_rank in enumerate(results):
        for case, outs in zip(cases, rounds_of_rank, strict=True):
            check_results(case, rank, outs)


@pytest.mark.parametrize("late", [0, 1])
def test_a_hundred_rounds_with_a_late_rank(late):
    repeat(100, 2, schedule=f"late:{late}", check=False)


# --- public cases


@pytest.mark.parametrize("late", [0, 1, 2])
def test_case_d01_no_stale_flag_between_calls(late):
    """Ten calls back to back with new x, one rank delayed: every one equals all_gather + matmul."""
    repeat(10, 3, schedule=f"late:{late}")


def test_case_d19_tail_tiles_are_right_and_nothing_beyond_is_written(monkeypatch):
    """Neither N=576 nor M=129 is a multiple of the tile of 128."""
    config = Config(128, 128, 32, 4, 2, 8, True)
    monkeypatch.setattr(ag_gemm_launch, "choose_config", lambda *args: config)
    rows, k, n = 129, 32, 576
    case = make_case([rows] * 2, k, n, BF16)

    def fn(group):
        around = torch.full((2 * rows + 2, n + 16), 7.0, dtype=BF16)
        out = around[1:-1, 8:-8]
        segments = Segments.of((rows, k), 0, (rows, rows))
        x, weights = case.xs[group.rank], Weights((case.weights[group.rank][0],))
        ag_gemm_launch.run_ag_gemm(group, x, weights, segments, [out], [], "none", None)
        return around, out.contiguous()

    for rank, (around, out) in enumerate(run_virtual(fn, 2)):
        check_results(case, rank, [out])
        around[1:-1, 8:-8] = 7.0
        assert_bitwise(around, torch.full_like(around, 7.0))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_d20_every_world_size_comes_from_the_group(world_size):
    def fn(group):
        assert group.world_size == world_size
        return call(case, group)

    case = make_case([4] * world_size, 16, 16, BF16)
    for rank, outs in enumerate(run_virtual(fn, world_size, schedule="waiter_first")):
        check_results(case, rank, outs)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_case_d21_k_that_ranks_do_not_divide(impl):
    """K = 33 on three ranks works, 32 works with every rank's share and raises without."""
    even = make_case([4] * 3, 11, 6, FP32, gather_dim=1, impl=impl)
    even.weights = [[torch.randn(6, 33)] for _ in range(3)]
    run_case(even, "reference" if impl == "reference" else "unfused")

    uneven = make_case([4] * 3, 11, 6, FP32, gather_dim=1, impl=impl)
    uneven.xs[2] = uneven.xs[2][:, :10]
    uneven.weights = [[torch.randn(6, 32)] for _ in range(3)]
    with pytest.raises(ShapeError, match=r"weight: expected shape \[N, 3[03]\]"):
        run_virtual(lambda group: call(uneven, group), 3)
    uneven.options["rows_per_rank"] = [11, 11, 10]
    run_case(uneven, "reference" if impl == "reference" else "unfused")
