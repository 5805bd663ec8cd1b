"""AG+GEMM under `torch.compile`: one graph for all ranks, for changing sizes, and for gradients."""

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


def layer(x, weights, biases, group, options):
    out = plait.ag_gemm(x, weights, biases, group=group, **options)
    flat = [each for part in (out if isinstance(out, (list, tuple)) else [out])
            for each in (part if isinstance(part, list) else [part])]  # fmt: skip
    return [torch.relu(each) + 1 for each in flat]


def compiled(function, **options):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def operands(world_size, rows, num_weights=1, *, grad=False):
    def tensor(*shape):
        return torch.randn(*shape, requires_grad=grad)

    sizes = rows if isinstance(rows, list) else [rows] * world_size
    xs = [tensor(size, K) for size in sizes]
    weights = [[tensor(N, K) for _ in range(num_weights)] for _ in range(world_size)]
    biases = [[tensor(N) for _ in range(num_weights)] for _ in range(world_size)]
    return xs, weights, biases


def both_ways(world_size, rows, num_weights=1, grad=False, **options):
    """Results of the compiled and of the plain function on every rank, and the compilations."""
    xs, weights, biases = operands(world_size, rows, num_weights, grad=grad)
    fast, counter = compiled(layer)
    single = num_weights == 1

    def fn(group):
        found = []
        for function in (fast, layer):
            own = [xs[group.rank], *weights[group.rank], *biases[group.rank]]
            own = [each.detach().clone().requires_grad_(grad) for each in own]
            given = [own[1 : 1 + num_weights], own[1 + num_weights :]]
            given = [each[0] for each in given] if single else given
            outs = function(own[0], *given, group, options)
            if grad:
                sum((index + 1) * (out * out).sum() for index, out in enumerate(outs)).backward()
                outs = [*outs, *(each.grad for each in own)]
            found.append([out.detach() for out in outs])
        return found

    results = run_virtual(fn, world_size, check=False)
    for fast_outs, plain_outs in results:
        assert len(fast_outs) == len(plain_outs)
        for index, (out, expected) in enumerate(zip(fast_outs, plain_outs, strict=True)):
            assert_bitwise(out, expected, f"output {index}")
    return counter.frame_count


@pytest.mark.parametrize(
    ("num_weights", "options"),
    [
        (1, {}),
        (1, {"activation": "gelu", "return_gathered": True}),
        (2, {"out_dtype": torch.bfloat16}),
        (2, {"activation": "swiglu", "return_gathered": True}),
        (1, {"impl": "unfused"}),
    ],
    ids=str,
)
def test_one_graph_serves_all_ranks(num_weights, options):
    assert both_ways(3, 4, num_weights, **options) == 1


@pytest.mark.parametrize(
    ("num_weights", "options"),
    [(1, {}), (2, {"activation": "swiglu"}), (2, {"activation": "silu", "return_gathered": True})],
    ids=str,
)
def test_gradients(num_weights, options):
    assert both_ways(2, 4, num_weights, grad=True, **options) == 1


def test_ranks_of_different_sizes():
    rows = [5, 3]
    assert both_ways(2, rows, rows_per_rank=rows) <= 2


def sizes_in_a_row(sizes, mark=False, **options):
    fast, counter = compiled(layer, **options)
    _, weights, biases = operands(2, 1)
    xs = [operands(2, size)[0] for size in sizes]

    def fn(group):
        weight, bias = weights[group.rank][0], biases[group.rank][0]
        outs = []
        for each in xs:
            x = each[group.rank].clone()
            if mark:
                torch._dynamo.mark_dynamic(x, 0)
            outs.append((fast(x, weight, bias, group, {}), layer(x, weight, bias, group, {})))
        return outs

    for outs in run_virtual(fn, 2, check=False):
        for (fast_out,), (expected,) in outs:
            assert_bitwise(fast_out, expected)
    return counter.frame_count


SIZES = (4, 6, 7, 12, 3, 20)


def test_six_sizes_need_two_graphs():
    assert sizes_in_a_row(SIZES) <= 2


def test_a_dynamic_dim_needs_one_graph():
    assert sizes_in_a_row(SIZES, mark=True) == 1


def test_dynamic_shapes_of_the_whole_graph():
    assert sizes_in_a_row(SIZES, dynamic=True) == 1


def test_wrong_shapes_are_found_while_tracing_or_running():
    fast, _ = compiled(layer)

    def fn(group):
        fast(torch.randn(4, K), torch.randn(N, K + 1), None, group, {})

    with pytest.raises(Exception, match="K of"):
        run_virtual(fn, 2, check=False)


@pytest.mark.parametrize(
    ("activation", "gathered", "save_pre"), [("none", False, False), ("swiglu", True, True)]
)
def test_opcheck(activation, gathered, save_pre):
    """Every rank runs the same checks, so they meet in each call."""
    num_weights = 2 if activation == "swiglu" else 1
    xs, weights, biases = operands(2, 4, num_weights)

    def fn(group):
        args = (
            xs[group.rank], weights[group.rank], biases[group.rank], group.name, 0, [4, 4],
            activation, torch.float32, "auto", gathered, save_pre,
        )  # fmt: skip
        return torch.library.opcheck(torch.ops.plait.ag_gemm.default, args, test_utils=TESTS)

    for found in run_virtual(fn, 2, check=False):
        assert found == dict.fromkeys(TESTS, "SUCCESS")


def test_shape_inference_needs_no_group_call():
    """A fake call gives shapes without entering the group: a single rank may do it alone."""

    def fn(group):
        if group.rank:
            return None
        with torch._subclasses.FakeTensorMode():
            x, weight = torch.empty(2, 4, K), torch.empty(N, K, dtype=torch.float32)
            out, gathered = plait.ag_gemm(
                x, weight, group=group, gather_dim=1, return_gathered=True
            )
        return tuple(out.shape), tuple(gathered.shape)

    assert run_virtual(fn, 3)[0] == ((2, 12, N), (2, 12, K))


def test_main_grads_are_added_to_by_a_compiled_backward():
    fast, counter = compiled(layer)
    xs, weights, _ = operands(2, 4)

    def fn(group):
        found = []
        for function in (fast, layer):
            x = xs[group.rank].clone().requires_grad_()
            weight = weights[group.rank][0].clone().requires_grad_()
            main_grad = torch.ones(N, K)
            for _ in range(2):
                (out,) = function(x, weight, None, group, {"main_grad": main_grad})
                out.sum().backward()
            assert weight.grad is None
            found.append((main_grad, x.grad))
        return found

    for fast_grads, plain_grads in run_virtual(fn, 2, check=False):
        for grad, expected in zip(fast_grads, plain_grads, strict=True):
            assert_bitwise(grad, expected)
    assert counter.frame_count == 1
