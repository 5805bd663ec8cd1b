"""Gradients of AG+GEMM on virtual ranks against autograd of the reference in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import plait
from plait.overlap.ag_gemm.reference import ag_gemm_reference
from plait.settings import override
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from plait.testing.ranks import run_virtual
from tests.host.overlap.ag_gemm_cases import GATES, call, make_case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def upstream(case, rank, dtype):
    """Gradients of one rank's results, the same for every run of a case."""
    rows = sum(x.shape[case.options.get("gather_dim", 0)] for x in case.xs)
    shape = list(case.xs[0].shape)
    shape[case.options.get("gather_dim", 0)] = rows
    weights = case.weights[rank][: 1 if case.options.get("activation") in GATES else None]
    generator = torch.Generator().manual_seed(rank)
    shapes = [[*shape[:-1], weight.shape[0]] for weight in weights]
    if case.options.get("return_gathered"):
        shapes.append(shape)
    return [torch.randn(each, generator=generator).to(dtype) for each in shapes]


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def gradients(case, wide=None):
    """Every rank's gradients [x, weights..., biases...] by autograd over all ranks at once.

    In `wide` precision, or as plain PyTorch computes in the dtype of x; there every rank's part of
    x's gradient is rounded before the sum, as a reduce-scatter of plain PyTorch would.
    """
    dtype = case.xs[0].dtype
    xs, gather_dim = [x.to(wide or dtype) for x in case.xs], case.options.get("gather_dim", 0)
    grads_x, rest = [torch.zeros_like(x, dtype=torch.float64) for x in xs], []
    for rank in range(case.world_size):
        own_xs = leaves(xs)
        own = [
            leaves(t.to(wide or dtype) for t in each[rank]) for each in (case.weights, case.biases)
        ]
        outs = forward(case, own_xs, *own, wide)
        if case.options.get("return_gathered"):
            outs.append(torch.cat(own_xs, dim=gather_dim))
        torch.autograd.backward(
            outs, [grad.to(wide or dtype) for grad in upstream(case, rank, dtype)]
        )
        grads_x = [total + x.grad.double() for total, x in zip(grads_x, own_xs, strict=True)]
        rest.append([leaf.grad for each in own for leaf in each])
    return [[grad.to(wide or dtype), *others] for grad, others in zip(grads_x, rest, strict=True)]


def forward(case, xs, weights, biases, wide):
    gather_dim, activation = case.options.get("gather_dim", 0), case.options.get("activation")
    if wide is not None:
        return ag_gemm_reference(xs, weights, biases, gather_dim, activation or "none")
    gathered = torch.cat(xs, dim=gather_dim)
    pre = [
        F.linear(gathered, *each)
        for each in zip(weights, *([biases] if biases else []), strict=True)
    ]
    function = {None: lambda v: v, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}.get(activation)
    if activation == "gelu_tanh":
        return [F.gelu(each, approximate="tanh") for each in pre]
    if activation in GATES:
        return [(F.silu if activation == "swiglu" else F.gelu)(pre[0]) * pre[1]]
    return [function(each) for each in pre]


def differentiate(case, group, wrap=None):
    """One rank's gradients through the operator, and its results."""
    own = case.__class__(
        [leaves([x])[0] for x in case.xs],
        [leaves(each) for each in case.weights],
        [leaves(each) for each in case.biases],
        case.options,
    )
    outs = call(own, group) if wrap is None else wrap(own, group)
    torch.autograd.backward(outs, upstream(case, group.rank, case.xs[0].dtype))
    rank = group.rank
    return [t.grad for t in (own.xs[rank], *own.weights[rank], *own.biases[rank])]


def check_gradients(case, results):
    exact, plain = gradients(case, torch.float64), gradients(case)
    for rank, found in enumerate(results):
        assert len(found) == len(exact[rank])
        for index, grad in enumerate(found):
            what = f"gradient {index} of rank {rank}"
            assert_close_to_fp64(grad, exact[rank][index], plain[rank][index], what)


def run_gradients(case, wrap=None, **world):
    results = run_virtual(lambda group: differentiate(case, group, wrap), case.world_size, **world)
    check_gradients(case, results)
    return results


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, BF16), (2, FP32), (2, FP16), (3, BF16), (4, FP32), (5, BF16)],
    ids=str,
)
def test_gradients(world_size, dtype):
    run_gradients(make_case([8] * world_size, 16, 12, dtype, bias=True), seed=world_size)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu", *GATES])
def test_gradients_of_activations(activation, dtype):
    gated = activation in GATES
    case = make_case([6, 6], 16, 12, dtype, num_weights=1 + gated, bias=True)
    case.options["activation"] = activation
    run_gradients(case)


@pytest.mark.parametrize("rows", [[3, 0, 5], [0, 7], [0, 0]], ids=str)
@pytest.mark.parametrize("k", [16, 17])
def test_gradients_of_ragged_rows(rows, k):
    run_gradients(make_case(rows, k, 10, BF16, rows_per_rank=rows, return_gathered=True))


@pytest.mark.parametrize(("k", "n"), [(0, 8), (16, 0)])
def test_gradients_of_empty_dims(k, n):
    run_gradients(make_case([4, 4], k, n, FP32, bias=True))


@pytest.mark.parametrize(
    ("shapes", "gather_dim"),
    [([(2, 3)] * 2, 1), ([(3, 2), (3, 5)], 1), ([(2, 2, 3)] * 2, 0)],
    ids=str,
)
def test_gradients_of_leading_dims(shapes, gather_dim):
    run_gradients(make_case(shapes, 16, 12, BF16, gather_dim=gather_dim, return_gathered=True))


def test_gradients_of_several_weights_and_a_transposed_one():
    case = make_case([6, 6], 16, 12, FP32, num_weights=3, bias=True)
    for weights in case.weights:
        weights[1] = weights[1].t().contiguous().t()
    run_gradients(case)


@pytest.mark.parametrize("impl", ["unfused", "reference"])
def test_gradients_of_the_other_implementations(impl):
    run_gradients(make_case([6, 3], 16, 12, BF16, activation="silu", impl=impl))


def test_gradients_of_the_last_dim():
    case = make_case([4, 4], 12, 10, FP32, gather_dim=1)
    case.weights = [[torch.randn(10, 24)] for _ in range(2)]
    run_gradients(case)


def test_gradients_in_slices():
    with override(workspace_bytes=2 * 2 * 32 * 16 * 4):
        run_gradients(make_case([40, 9], 16, 12, FP32, return_gathered=True))


@pytest.mark.parametrize("schedule", ["late:0", "late:1", "waiter_first", "copies_last"])
def test_gradients_under_schedules(schedule):
    run_gradients(make_case([5, 5], 16, 12, BF16), schedule=schedule)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    """The forward runs once more in the backward, on every rank in the same order."""
    case = make_case([6, 6], 16, 12, FP32, activation="gelu")

    def wrap(own, group):
        weight = own.weights[group.rank][0]
        layer = lambda x: plait.ag_gemm(x, weight, group=group, activation="gelu")  # noqa: E731
        return [checkpoint(layer, own.xs[group.rank], use_reentrant=reentrant)]

    run_gradients(case, wrap)


def test_only_what_needs_a_gradient_gets_one():
    case = make_case([4, 4], 16, 12, FP32)
    exact = gradients(case, torch.float64)

    def fn(group):
        found = []
        for need_x, need_weight in ((True, False), (False, True), (False, False)):
            x = case.xs[group.rank].clone().requires_grad_(need_x)
            weight = case.weights[group.rank][0].clone().requires_grad_(need_weight)
            out = plait.ag_gemm(x, weight, group=group)
            assert out.requires_grad == (need_x or need_weight)
            if out.requires_grad:
                out.backward(upstream(case, group.rank, FP32)[0])
            found.append((x.grad, weight.grad))
        return found

    for rank, ((x_only, none), (nothing, weight_only), neither) in enumerate(run_virtual(fn, 2)):
        assert (none, nothing, neither) == (None, None, (None, None))
        assert_close_to_fp64(x_only, exact[rank][0], x_only)
        assert_close_to_fp64(weight_only, exact[rank][1], weight_only)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_main_grad_receives_the_weights_gradient(dtype):
    """In fp32, whatever the dtype of the weight: it is not rounded on the way."""
    case = make_case([4, 4], 16, 12, dtype, num_weights=2)

    def fn(group):
        x = case.xs[group.rank].clone().requires_grad_()
        weights = leaves(case.weights[group.rank])
        main_grads = [torch.ones(12, 16) for _ in weights]
        for _ in range(2):
            outs = plait.ag_gemm(x, weights, group=group, main_grad=main_grads)
            torch.autograd.backward(outs, upstream(case, group.rank, dtype))
        assert [weight.grad for weight in weights] == [None, None]
        return main_grads

    for rank, main_grads in enumerate(run_virtual(fn, 2)):
        for main_grad, grad in zip(main_grads, upstream(case, rank, dtype), strict=True):
            exact = 1 + 2 * grad.double().t() @ torch.cat(case.xs).double()
            plain = 1 + 2 * (grad.float().t() @ torch.cat(case.xs).float())
            assert_close_to_fp64(main_grad, exact, plain)


def test_gradients_accumulate_over_microbatches():
    case = make_case([4, 4], 16, 12, FP32)

    def fn(group):
        x, weight = leaves([case.xs[group.rank], case.weights[group.rank][0]])
        outs = [plait.ag_gemm(x * factor, weight, group=group) for factor in (1.0, 2.0)]
        torch.autograd.backward(outs, upstream(case, group.rank, FP32) * 2)
        return [x.grad, weight.grad]

    for twice, once in zip(run_virtual(fn, 2), run_gradients(case), strict=True):
        for many, one in zip(twice, once, strict=True):
            assert_close_to_fp64(many, 3 * one.double(), 3 * one)


def test_the_saved_x_is_not_gathered():
    """Between forward and backward only this rank's rows are kept."""

    def fn(group):
        x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ):
            plait.ag_gemm(x, weight, group=group)
        return kept

    assert run_virtual(fn, 3) == [[(8, 16), (12, 16)]] * 3


def test_bitwise_the_same_for_every_schedule():
    case = make_case([5, 5, 5], 16, 12, BF16)
    runs = [run_gradients(case, schedule=schedule) for schedule in ("random", "late:2")]
    for first, second in zip(*runs, strict=True):
        for one, other in zip(first, second, strict=True):
            assert_bitwise(one, other)
