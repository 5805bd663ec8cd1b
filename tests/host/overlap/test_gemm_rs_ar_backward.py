"""Gradients of GEMM+RS and GEMM+AR against autograd of the reference in fp64, and gradcheck."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import plait
from plait.settings import override
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from plait.testing.ranks import run_virtual
from tests.host.overlap.sum_cases import (
    call,
    leaves,
    make_case,
    run_gradients,
    upstream,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = ("gemm_rs", "gemm_ar")


@pytest.fixture(params=OPERATORS)
def operator(request):
    return request.param


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, BF16), (2, FP32), (2, FP16), (3, BF16), (4, FP32), (5, BF16)],
    ids=str,
)
def test_gradients(operator, world_size, dtype):
    run_gradients(make_case(operator, world_size, 2 * world_size, 16, 12, dtype, bias=True))


@pytest.mark.parametrize("rows", [[3, 0, 5], [0, 7], [0, 0]], ids=str)
def test_gradients_of_ragged_rows(rows):
    run_gradients(make_case("gemm_rs", len(rows), sum(rows), 17, 10, BF16, rows_per_rank=rows))


@pytest.mark.parametrize(("m", "k", "n"), [(4, 0, 8), (4, 16, 0), (0, 16, 8)])
def test_gradients_of_empty_dims(operator, m, k, n):
    run_gradients(make_case(operator, 2, m, k, n, FP32, bias=True))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4), {"scatter_dim": 1}),
        ((3, 7), {"scatter_dim": 1, "rows_per_rank": [2, 5]}),
        ((2, 3, 2), {"scatter_dim": 0}),
    ],
    ids=str,
)
def test_gradients_of_leading_dims(shape, options):
    run_gradients(make_case("gemm_rs", 2, shape, 16, 12, BF16, bias=True, **options))


def test_gradients_of_leading_dims_of_gemm_ar():
    run_gradients(make_case("gemm_ar", 2, (2, 1, 3), 16, 12, BF16, bias=True))


def test_gradients_of_the_last_dim():
    case = make_case("gemm_rs", 2, 5, 16, 12, FP32, bias=True, scatter_dim=1)
    case.biases = [bias[:6] for bias in case.biases]
    run_gradients(case)


def test_gradients_of_strided_operands(operator):
    case = make_case(operator, 2, 6, 16, 12, FP32)
    case.weights = [weight.t().contiguous().t() for weight in case.weights]
    case.xs = [x.t().contiguous().t() for x in case.xs]
    run_gradients(case)


@pytest.mark.parametrize("impl", ["unfused", "reference"])
def test_gradients_of_the_other_implementations(operator, impl):
    run_gradients(make_case(operator, 2, 6, 16, 12, BF16, bias=True, impl=impl))


def test_gradients_of_another_out_dtype(operator):
    run_gradients(make_case(operator, 2, 6, 16, 12, BF16, reduce_dtype=FP32, out_dtype=FP32))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_replicated_gradients_are_not_summed(dtype):
    run_gradients(make_case("gemm_ar", 3, 6, 16, 12, dtype, bias=True, replicated_grad=True))


def test_gradients_in_slices(operator):
    with override(workspace_bytes=2 * 2 * 16 * 24 * 4):
        run_gradients(make_case(operator, 2, 60, 16, 24, FP32))


@pytest.mark.parametrize("schedule", ["late:0", "late:1", "waiter_first", "copies_last"])
def test_gradients_under_schedules(operator, schedule):
    run_gradients(make_case(operator, 2, 6, 16, 12, BF16), schedule=schedule)


def test_only_what_needs_a_gradient_gets_one(operator):
    case = make_case(operator, 2, 4, 16, 12, FP32)
    expected = run_gradients(case)

    def fn(group):
        found = []
        for needs in ((True, False), (False, True), (False, False)):
            x, weight = leaves([case.xs[group.rank], case.weights[group.rank]])
            x.requires_grad_(needs[0])
            weight.requires_grad_(needs[1])
            out = getattr(plait, operator)(x, weight, group=group)
            assert out.requires_grad == any(needs)
            if out.requires_grad:
                out.backward(upstream(case, group.rank))
            found.append((x.grad, weight.grad))
        return found

    for rank, ((x_only, none), (nothing, weight_only), neither) in enumerate(run_virtual(fn, 2)):
        assert (none, nothing, neither) == (None, None, (None, None))
        assert_bitwise(x_only, expected[rank][0])
        assert_bitwise(weight_only, expected[rank][1])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_main_grad_receives_the_weights_gradient(operator, dtype):
    """In fp32, whatever the dtype of the weight: it is not rounded on the way."""
    case = make_case(operator, 2, 4, 16, 12, dtype)

    def fn(group):
        x, weight = leaves([case.xs[group.rank], case.weights[group.rank]])
        main_grad = torch.ones(12, 16)
        for _ in range(2):
            out = getattr(plait, operator)(x, weight, group=group, main_grad=main_grad)
            out.backward(upstream(case, group.rank))
        assert weight.grad is None
        return main_grad

    grads = [upstream(case, rank) for rank in range(2)]
    # What the ranks exchange is in the dtype of x: all rows, or the sum of both ranks' rows.
    whole = torch.cat(grads) if operator == "gemm_rs" else (grads[0].float() + grads[1]).to(dtype)
    for x, main_grad in zip(case.xs, run_virtual(fn, 2), strict=True):
        exact = 1 + 2 * whole.double().t() @ x.double()
        assert_close_to_fp64(main_grad, exact, 1 + 2 * (whole.float().t() @ x.float()))


def in_another_thread(fn):
    """fn() in a thread of this rank; what it raises is raised here."""
    outcome = []

    def body():
        try:
            outcome.append((fn(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    ((value, error),) = outcome
    if error is not None:
        raise error
    return value


class _Elsewhere:
    """A result whose backward runs in another thread than its forward."""

    def __init__(self, out):
        self.out = out

    def backward(self, grad):
        in_another_thread(lambda: self.out.backward(grad))


def test_forward_and_backward_in_different_threads(operator):
    case = make_case(operator, 2, 4, 16, 12, FP32, bias=True)
    wrap = lambda own, group: _Elsewhere(in_another_thread(lambda: call(own, group)))  # noqa: E731
    for found, expected in zip(run_gradients(case, wrap), run_gradients(case), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_a_feed_forward(reentrant):
    """ag_gemm -> gelu -> gemm_rs run once more in the backward: the same bits as without."""
    xs, ups = torch.randn(2, 4, 16), torch.randn(2, 24, 16)
    downs, grads = torch.randn(2, 16, 24), torch.randn(2, 4, 16)

    def fn(group):
        def layer(x, up, down):
            hidden = plait.ag_gemm(x, up, group=group, activation="gelu")
            return plait.gemm_rs(hidden, down, group=group)

        found = []
        for wrapped in (True, False):
            own = leaves([xs[group.rank], ups[group.rank], downs[group.rank]])
            out = checkpoint(layer, *own, use_reentrant=reentrant) if wrapped else layer(*own)
            out.backward(grads[group.rank])
            found.append([out.detach(), *(each.grad for each in own)])
        return found

    results = run_virtual(fn, 2)
    for found, expected in results:
        for one, other in zip(found, expected, strict=True):
            assert_bitwise(one, other)
    x, up, down = (each.double().requires_grad_() for each in (xs, ups, downs))
    whole = x.flatten(0, 1)
    hidden = [torch.nn.functional.gelu(whole @ up[rank].t()) for rank in range(2)]
    out = sum(h @ down[rank].t() for rank, h in enumerate(hidden)).view(2, 4, 16)
    out.backward(grads.double())
    for rank, ((got, *got_grads), _) in enumerate(results):
        torch.testing.assert_close(got.double(), out[rank].detach(), rtol=1e-4, atol=1e-4)
        for grad, exact in zip(got_grads, (x.grad, up.grad, down.grad), strict=True):
            torch.testing.assert_close(grad.double(), exact[rank], rtol=1e-4, atol=1e-4)


# --- gradcheck


class _Joint(torch.autograd.Function):
    """All ranks' fp64 tensors in one function: `of_rank(group, *tensors)` on every virtual rank.

    Inputs and outputs are those of rank 0, then of rank 1, ...
    """

    @staticmethod
    def forward(ctx, of_rank, world_size, *tensors):
        ctx.of_rank, ctx.world_size = of_rank, world_size
        ctx.save_for_backward(*tensors)
        return tuple(run_virtual(lambda g: of_rank(g, *_own(tensors, g)), world_size))

    @staticmethod
    def backward(ctx, *grads):
        def fn(group):
            own = leaves(_own(ctx.saved_tensors, group))
            with torch.enable_grad():
                ctx.of_rank(group, *own).backward(grads[group.rank])
            return [each.grad for each in own]

        results = run_virtual(fn, ctx.world_size)
        return None, None, *(grad for found in results for grad in found)


def _own(tensors, group):
    count = len(tensors) // group.world_size
    return tensors[group.rank * count : (group.rank + 1) * count]


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("ag_gemm", {}),
        ("ag_gemm", {"activation": "gelu"}),
        ("gemm_rs", {}),
        ("gemm_rs", {"rows_per_rank": [2, 0]}),
        ("gemm_rs", {"scatter_dim": 1}),
        ("gemm_ar", {}),
    ],
    ids=str,
)
def test_gradcheck_over_all_ranks(operator, options):
    """Numeric derivatives of every rank's result by every rank's input, in fp64."""

    def of_rank(group, x, weight, bias):
        function = getattr(plait, operator)
        return function(x, weight, bias, group=group, impl="reference", **options)

    shares = options.get("scatter_dim") == 1
    tensors = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
        for shape in ((2, 2), (2, 2), (1,) if shares else (2,))
    ]
    assert torch.autograd.gradcheck(lambda *each: _Joint.apply(of_rank, 2, *each), tensors)
