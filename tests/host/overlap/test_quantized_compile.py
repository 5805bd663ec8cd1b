"""fp8 operands under `torch.compile`, what PyTorch asks of the operators, and planned calls."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import plait
from plait.overlap import register as _register  # noqa: F401 - the operators that opcheck calls
from plait.overlap.common import plans
from plait.runtime.prepared import PreparedProgram
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap.quantized_cases import BF16, E4M3, FP32, INT8, KINDS, make_gather, make_sum
from tests.host.runtime.device_fakes import LAUNCHES, FakeBound, fake_group

OPERATORS = ("ag_gemm", "gemm_rs", "gemm_ar")
TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
_names = itertools.count()


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_case(operator, kind, rows=8, dtype=E4M3):
    if operator == "ag_gemm":
        return make_gather([rows] * 2, 144, 12, dtype, kind)
    return make_sum(operator, 2, rows, 144, 12, dtype, kind)


def layer(operator, x, weight, x_scale, weight_scale, group):
    out = getattr(plait, operator)(
        x, weight, group=group, x_scale=x_scale, weight_scale=weight_scale
    )
    return torch.relu(out) + 1


def arguments(case, rank):
    return (
        case.xs[rank], case.weights[rank][0], case.x_scales[rank], case.weight_scales[rank][0],
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_graph_serves_all_ranks_and_sizes(operator, kind):
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, backend=counter, fullgraph=True)
    cases = [make_case(operator, kind, rows) for rows in (4, 6, 12)]

    def fn(group):
        outs = []
        for case in cases:
            given = (operator, *arguments(case, group.rank), group)
            outs.append((fast(*given), layer(*given)))
        return outs

    for outs in run_virtual(fn, 2, check=False):
        for out, expected in outs:
            assert_bitwise(out, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, kind):
    """In int8: its comparisons cannot multiply fp8."""
    case = make_case(operator, kind, dtype=INT8)

    def fn(group):
        x, weight, x_scale, weight_scale = arguments(case, group.rank)
        name = group.name
        args = {
            "ag_gemm": (
                x, [weight], [], name, 0, [], "none", BF16, "auto", True, False, x_scale,
                [weight_scale],
            ),
            "gemm_rs": (
                x, weight, None, name, 0, [], BF16, FP32, "auto", None, x_scale, weight_scale,
            ),
            "gemm_ar": (x, weight, None, name, BF16, BF16, "auto", "auto", x_scale, weight_scale),
        }[operator]  # fmt: skip
        found = torch.library.opcheck(
            getattr(torch.ops.plait, operator).default, args, test_utils=TESTS
        )
        return set(found.values())

    assert run_virtual(fn, 2, check=False) == [{"SUCCESS"}] * 2


def test_shape_inference_knows_default_dtypes():
    def fn(group):
        if group.rank:
            return None
        with torch._subclasses.FakeTensorMode():
            x, weight = torch.empty(2, 64).to(E4M3), torch.empty(6, 64).to(E4M3)
            scales = {"x_scale": torch.empty(2), "weight_scale": torch.empty(6)}
            outs = [getattr(plait, each)(x, weight, group=group, **scales) for each in OPERATORS]
            exact = plait.ag_gemm(torch.empty(2, 64).to(INT8), weight.to(INT8), group=group)
        return [(tuple(out.shape), out.dtype) for out in (*outs, exact)]

    shapes = run_virtual(fn, 2)[0]
    assert shapes == [((4, 6), BF16), ((1, 6), BF16), ((2, 6), BF16), ((4, 6), torch.int32)]


# --- planned calls: a fake executor notes which addresses kernels get


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(
        plans, "PreparedProgram", functools.partial(PreparedProgram, bind=FakeBound)
    )
    made = fake_group(4, f"quantized plans {next(_names)}")
    LAUNCHES.clear()
    yield made
    made.close()


def plain(address):
    return address[1] if isinstance(address, tuple) else address


def operands(kind, rows=32, k=256, n=48):
    x, weight = torch.randn(rows, k).to(E4M3), torch.randn(n, k).to(E4M3)
    x_scale, weight_scale = {
        "tensor": (torch.rand(1), torch.rand(1)),
        "rows": (torch.rand(rows), torch.rand(n)),
        "blocks": (torch.rand(rows, 2), torch.rand(1, 2)),
    }[kind]
    return x, weight, x_scale, weight_scale


def planned_call(operator, given, group):
    x, weight, x_scale, weight_scale = given
    return getattr(plait, operator)(
        x, weight, group=group, x_scale=x_scale, weight_scale=weight_scale
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_planned_call_uses_its_own_scales(group, operator, kind):
    first = operands(kind)
    for _ in range(4):
        planned_call(operator, first, group)
    LAUNCHES.clear()
    given = operands(kind)
    planned_call(operator, given, group)
    assert plait.last_run().detail == "planned"
    (seen,) = [args for name, _, args in LAUNCHES if "gemm" in name]
    found = [plain(seen[name]) for name in ("x", "x_scale_ptr", "w_scale_ptr")]
    assert found == [given[0].data_ptr(), given[2].data_ptr(), given[3].data_ptr()]
    if operator == "ag_gemm":
        region = group.workspace.regions[(group.workspace._calls - 1) % 2]
        behind = 4 * 32 * 256  # four ranks' rows
        sent = region.data(1, behind, tuple(given[2].shape), FP32)
        assert_bitwise(sent, given[2])


@pytest.mark.parametrize("operator", OPERATORS)
def test_another_kind_of_scales_is_another_plan(group, operator):
    for kind in KINDS:
        given = operands(kind)
        for _ in range(5):
            planned_call(operator, given, group)
        assert plait.last_run().detail == "planned"
    expanded = torch.rand(64)[::2]  # copied first, and planned all the same
    x, weight, _, weight_scale = operands("rows")
    for _ in range(5):
        planned_call(operator, (x, weight, expanded, weight_scale), group)
    launches = [args for name, _, args in LAUNCHES if "gemm" in name]
    assert plait.last_run().detail == "planned"
    assert plain(launches[-1]["x_scale_ptr"]) != expanded.data_ptr()


def test_one_scale_among_ranks_of_one_row_is_laid_out_anew(group):
    """Its copy belongs to one call, so that no plan keeps it."""
    x, weight, x_scale, weight_scale = operands("tensor")
    for _ in range(5):
        plait.ag_gemm(
            x, weight, group=group, rows_per_rank=[32, 1, 1, 4], x_scale=x_scale,
            weight_scale=weight_scale,
        )  # fmt: skip
    assert plait.last_run().detail == ""
