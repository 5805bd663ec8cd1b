"""GEMM+RS and GEMM+AR of fp8 and int8 on virtual ranks: scaled before partial sums travel."""

import pytest
import torch

from plait.backends.commands import Copy
from plait.settings import override
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap.quantized_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT8,
    KINDS,
    call,
    check_results,
    make_sum,
    run_case,
)

OPERATORS = ("gemm_rs", "gemm_ar")


@pytest.fixture(params=OPERATORS)
def operator(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, E4M3), (2, E4M3), (2, E5M2), (2, INT8), (3, E4M3)], ids=str
)
def test_every_dtype_and_kind(operator, world_size, dtype, kind):
    case = make_sum(operator, world_size, 12 * world_size, 272, 40, dtype, kind, bias=True)
    outs = run_case(case, seed=world_size)
    if operator == "gemm_ar":
        assert all(torch.equal(each[0], outs[0][0]) for each in outs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_both_algorithms_of_gemm_ar(algorithm, kind):
    for rows in (1, 3, 70):
        run_case(make_sum("gemm_ar", 3, rows, 144, 20, E4M3, kind, algorithm=algorithm))


@pytest.mark.parametrize("impl", ["unfused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_the_other_implementations_mean_the_same(operator, dtype, kind, impl):
    run_case(make_sum(operator, 2, (2, 6), 130, 9, dtype, kind, bias=True), impl)


@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[3, 0, 5], [1, 7, 0], [0, 0, 4]], ids=str)
def test_rows_differ_and_may_be_none(rows, kind, impl):
    case = make_sum("gemm_rs", 3, sum(rows), 144, 20, E4M3, kind, bias=True, rows_per_rank=rows)
    run_case(case, impl)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scatter_dim", [0, 1])
def test_scatter_dim_and_leading_dims(scatter_dim, kind):
    shape = (4, 6)
    sizes = [shape[scatter_dim] - 1, 1]
    options = {"scatter_dim": scatter_dim, "rows_per_rank": sizes}
    run_case(make_sum("gemm_rs", 2, shape, 144, 20, E4M3, kind, **options))


def test_columns_shared_out_run_unfused():
    run_case(make_sum("gemm_rs", 2, 6, 144, 20, E4M3, "rows", scatter_dim=1), "unfused")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_its_own_k(operator, kind):
    run_case(make_sum(operator, 3, 9, [130, 16, 300], 20, E4M3, kind))


@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k", "n"), [(4, 0, 8), (4, 16, 0), (0, 16, 8)])
def test_empty_dims(operator, rows, k, n, kind, impl):
    run_case(make_sum(operator, 2, rows, k, n, E4M3, kind), impl)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reduce_dtype", "out_dtype"), [(FP32, FP32), (FP16, BF16), (BF16, FP32)])
def test_dtypes_of_partials_and_results(operator, reduce_dtype, out_dtype, kind):
    options = {"reduce_dtype": reduce_dtype, "out_dtype": out_dtype}
    run_case(make_sum(operator, 2, 8, 300, 20, E4M3, kind, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_strided_operands_and_scales(operator, kind):
    case = make_sum(operator, 2, 10, 160, 144, E4M3, kind)
    case.xs[0] = torch.stack([case.xs[0]] * 2, -1)[..., 0]
    case.weights[1] = [case.weights[1][0].t().contiguous().t()]
    case.x_scales = [torch.stack([each] * 3, -1)[..., 1] for each in case.x_scales]
    case.weight_scales = [[torch.stack([w[0]] * 3, -1)[..., 1]] for w in case.weight_scales]
    run_case(case)


def test_mixed_fp8_and_a_scale_of_one_side():
    case = make_sum("gemm_rs", 2, 8, 64, 10, E4M3, "rows")
    case.weights = [[each[0].float().to(E5M2)] for each in case.weights]
    case.weight_scales = [[torch.rand(1) + 0.1] for _ in range(2)]
    run_case(case)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_workspace_makes_slices(operator, kind):
    """Each slice takes the scales of its rows."""
    launches = []

    def note(program):
        launches.extend(each for each in program.launches() if "BLOCK_M" in each.args)
        return program

    case = make_sum(operator, 2, 120, 144, 20, E4M3, kind)
    with override(workspace_bytes=2 * 2 * 32 * 20 * 2):
        run_case(case, rewrite_program=note)
    assert len(launches) > 2


@pytest.mark.parametrize("schedule", ["late:0", "late:2", "waiter_first"])
def test_schedules(operator, schedule):
    for kind in KINDS:
        run_case(make_sum(operator, 3, 12, 144, 20, E4M3, kind), schedule=schedule)


def test_scales_stay_and_whole_numbers_are_exact(operator):
    """Scales of powers of two and small whole numbers: partials are exact, so is their sum."""
    copies = []

    def note(program):
        copies.extend(each for each in program.commands if isinstance(each, Copy))
        return program

    case = make_sum(operator, 2, 8, 64, 12, E4M3, "rows", reduce_dtype=FP32, out_dtype=FP32)
    draw = lambda t: torch.randint(-3, 4, t.shape).float()  # noqa: E731
    case.xs = [draw(x).to(E4M3) for x in case.xs]
    case.weights = [[draw(w[0]).to(E4M3)] for w in case.weights]
    case.x_scales = [2.0 ** draw(scale) for scale in case.x_scales]
    case.weight_scales = [[2.0 ** draw(w[0])] for w in case.weight_scales]
    total = sum(
        (x.double() * xs[:, None]) @ (w[0].double() * ws[0][:, None]).t()
        for x, w, xs, ws in zip(
            case.xs, case.weights, case.x_scales, case.weight_scales, strict=True
        )
    )
    outs = run_virtual(lambda group: call(case, group, impl="fused"), 2, rewrite_program=note)
    for rank, (out,) in enumerate(outs):
        expected = (
            total.float() if operator == "gemm_ar" else total.float()[4 * rank : 4 * rank + 4]
        )
        assert_bitwise(out + 0.0, expected + 0.0)  # -0.0 is 0.0 here
    assert copies == []  # nothing but the kernels' tiles travels


def test_calls_of_all_kinds_back_to_back(operator):
    cases = [make_sum(operator, 2, 8, 144, 20, E4M3, KINDS[i % 3]) for i in range(6)]
    fn = lambda group: [call(case, group, impl="fused") for case in cases]  # noqa: E731
    for rank, results in enumerate(run_virtual(fn, 2, schedule="late:1")):
        for case, outs in zip(cases, results, strict=True):
            check_results(case, rank, outs)
