"""GEMM+RS and GEMM+AR under `torch.compile`, and what PyTorch asks of an operator."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import plait
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual

K, N = 16, 12
TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["gemm_rs", "gemm_ar"])
def operator(request):
    return request.param


def layer(operator, x, weight, bias, group, options):
    out = getattr(plait, operator)(x, weight, bias, group=group, **options)
    return torch.relu(out) + 1


def compiled(**options):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(layer, backend=counter, fullgraph=True, **options), counter


def operands(world_size, rows):
    shapes = (rows, K), (N, K), (N,)
    return [[torch.randn(*shape) for shape in shapes] for _ in range(world_size)]


def both_ways(operator, world_size, rows, grad=False, **options):
    """Results of the compiled and the plain layer on every rank; returns the compilations."""
    tensors = operands(world_size, rows)
    fast, counter = compiled()

    def fn(group):
        found = []
        for function in (fast, layer):
            own = [each.clone().requires_grad_(grad) for each in tensors[group.rank]]
            out = function(operator, *own, group, options)
            outs = [out.detach()]
            if grad:
                (out * out).sum().backward()
                outs += [each.grad for each in own]
            found.append(outs)
        return found

    for fast_outs, plain_outs in run_virtual(fn, world_size, check=False):
        for index, (out, expected) in enumerate(zip(fast_outs, plain_outs, strict=True)):
            assert_bitwise(out, expected, f"output {index}")
    return counter.frame_count


@pytest.mark.parametrize(
    "options", [{}, {"out_dtype": torch.bfloat16}, {"impl": "unfused"}], ids=str
)
def test_one_graph_serves_all_ranks(operator, options):
    assert both_ways(operator, 3, 6, **options) == 1


def test_one_graph_serves_all_ranks_with_gradients(operator):
    assert both_ways(operator, 2, 6, grad=True) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_ranks_of_different_sizes(grad):
    assert both_ways("gemm_rs", 2, 8, grad, rows_per_rank=[5, 3]) == 1


@pytest.mark.parametrize("mark", [True, False])
def test_changing_sizes_need_one_graph(operator, mark):
    fast, counter = compiled(dynamic=None if mark else True)
    rounds = [operands(2, rows) for rows in (4, 6, 10, 8, 20)]

    def fn(group):
        outs = []
        for tensors in rounds:
            x, weight, bias = (each.clone() for each in tensors[group.rank])
            if mark:
                torch._dynamo.mark_dynamic(x, 0)
            args = operator, x, weight, bias, group, {}
            outs.append((fast(*args), layer(*args)))
        return outs

    for outs in run_virtual(fn, 2, check=False):
        for out, expected in outs:
            assert_bitwise(out, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", [[], [4, 2]], ids=str)
@pytest.mark.parametrize("gather", [True, False])
def test_opcheck_of_gemm_rs(rows, gather):
    """Every rank runs the same checks, so they meet in each call."""
    tensors = operands(2, 6)

    def fn(group):
        own = torch.randn(rows[group.rank] if rows else 3, 5) if gather else None
        args = (
            *tensors[group.rank], group.name, 0, rows, torch.float32, torch.bfloat16, "auto", own,
        )  # fmt: skip
        # With shares that differ the result's size is only known when it runs: no symbolic trace.
        tests = TESTS if not rows else TESTS[:3]
        outcome = torch.library.opcheck(torch.ops.plait.gemm_rs.default, args, test_utils=tests)
        return set(outcome.values())

    assert run_virtual(fn, 2, check=False) == [{"SUCCESS"}] * 2


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_opcheck_of_gemm_ar(algorithm):
    tensors = operands(2, 6)

    def fn(group):
        dtypes = torch.float32, torch.bfloat16
        args = (*tensors[group.rank], group.name, *dtypes, algorithm, "auto")
        outcome = torch.library.opcheck(torch.ops.plait.gemm_ar.default, args, test_utils=TESTS)
        return set(outcome.values())

    assert run_virtual(fn, 2, check=False) == [{"SUCCESS"}] * 2


def test_shape_inference_needs_no_group_call():
    """A fake call gives shapes without entering the group: a single rank may do it alone."""

    def fn(group):
        if group.rank:
            return None
        with torch._subclasses.FakeTensorMode():
            x, weight = torch.empty(2, 6, K), torch.empty(N, K)
            scattered = plait.gemm_rs(x, weight, group=group, scatter_dim=1)
            last = plait.gemm_rs(x, weight, group=group, scatter_dim=-1)
            whole = plait.gemm_ar(x, weight, group=group, out_dtype=torch.bfloat16)
        return tuple(scattered.shape), tuple(last.shape), tuple(whole.shape), whole.dtype

    shapes = run_virtual(fn, 3)[0]
    assert shapes == ((2, 2, N), (2, 6, N // 3), (2, 6, N), torch.bfloat16)
