"""`plait.matmul`: the reference and the interpreted kernel against fp64, and messages.

Errors are measured in the Frobenius norm; a result may be at most twice as wrong as plain torch
in the same precision.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.backends.base import executor_for
from plait.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.reference import (
    ACTIVATIONS,
    GATES,
    activation_backward_reference,
    activation_reference,
    matmul_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = (*ACTIVATIONS, *GATES)


def num_weights(activation):
    return 2 if activation in GATES else 1


def operands(m, n, k, dtype, count=1, device=None):
    x = torch.randn(m, k, device=device).to(dtype)
    weights = [torch.randn(n, k, device=device).to(dtype) / 4 for _ in range(count)]
    biases = [torch.randn(n, device=device).to(dtype) for _ in range(count)]
    return x, weights, biases


def exact(x, weights, biases=(), activation="none"):
    return matmul_reference(
        x.double(), [w.double() for w in weights], [b.double() for b in biases], activation
    )


def plain(x, weights, biases=(), activation="none"):
    pre = [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return activation_reference(pre, activation)


def error(result, expected):
    return (result.double() - expected).norm().item()


def assert_as_good_as_plain(result, plain_result, expected):
    assert result.shape == expected.shape
    assert torch.isfinite(result).all()
    assert error(result, expected) <= 2 * error(plain_result, expected)


def on_one_rank(fn):
    """Run `fn(device)` on a virtual rank, where the kernel is there for CPU tensors too."""
    return plait.run_virtual(lambda group: fn(group.device), 1)[0]


# --- reference


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_against_fp64(dtype, activation):
    x, weights, biases = operands(33, 20, 50, dtype, num_weights(activation))
    expected = exact(x, weights, biases, activation)
    result = matmul_reference(x, weights, biases, activation)
    assert result.dtype is dtype
    assert_as_good_as_plain(result, plain(x, weights, biases, activation), expected)


def test_reference_means_what_it_says():
    x, (w0, w1), (b0, b1) = operands(3, 4, 5, torch.float64, 2)
    gate, up = x @ w0.t() + b0, x @ w1.t() + b1
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(matmul_reference(x, [w0, w1], [b0, b1], "swiglu"), expected)
    expected = gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    torch.testing.assert_close(matmul_reference(x, [w0, w1], [b0, b1], "geglu"), expected)


@pytest.mark.parametrize("activation", ALL)
def test_activation_backward_is_the_derivative(activation):
    pre = [torch.randn(5, 7, dtype=torch.float64) for _ in range(num_weights(activation))]
    grad = torch.randn(5, 7, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in pre]
    expected = torch.autograd.grad(activation_reference(leaves, activation), leaves, grad)
    for ours, torchs in zip(
        activation_backward_reference(grad, pre, activation), expected, strict=True
    ):
        torch.testing.assert_close(ours, torchs)


# --- the kernel


@pytest.mark.newest_triton
@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_against_fp64(dtype, activation):
    def fn(device):
        x, weights, biases = operands(40, 72, 88, dtype, num_weights(activation), device)
        given = (weights, biases) if activation in GATES else (weights[0], biases[0])
        result = plait.matmul(x, *given, activation=activation, impl="fused")
        assert plait.last_run().impl == "fused"
        assert result.dtype is dtype
        expected = exact(x, weights, biases, activation)
        assert_as_good_as_plain(result, plain(x, weights, biases, activation), expected)

    on_one_rank(fn)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_at_extreme_values(activation):
    def fn(device):
        values = [-1e30, -1e4, -30.0, -0.0, 0.0, 30.0, 1e4, 1e30]
        x = torch.tensor(values, device=device)[:, None]
        one = torch.ones(1, 1, device=device)
        result = plait.matmul(x, one, activation=activation, impl="fused")
        torch.testing.assert_close(result, activation_reference([x], activation))
        nan = plait.matmul(x * float("nan"), one, activation=activation, impl="fused")
        assert torch.isnan(nan).all()

    on_one_rank(fn)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "padded rows": lambda t: F.pad(t, (0, 8))[:, : t.shape[1]],
    "every other column": lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2],
    "odd address": lambda t: F.pad(t, (1, 0))[:, 1:],
}


@pytest.mark.parametrize(("x_layout", "w_layout"), list(product(LAYOUTS, LAYOUTS)))
def test_any_strides(x_layout, w_layout):
    def fn(device):
        x, (weight,), _ = operands(33, 48, 40, torch.bfloat16, device=device)
        expected = plait.matmul(x, weight, impl="fused")
        laid_x, laid_w = LAYOUTS[x_layout](x), LAYOUTS[w_layout](weight)
        assert torch.equal(laid_x, x)
        result = plait.matmul(laid_x, laid_w, impl="fused")
        # One K block: any way of reading the operands sums in the same order.
        assert torch.equal(result, expected)

    on_one_rank(fn)


def surrounded_by_nan(tensor):
    """The same values inside a larger NaN-filled tensor, with rows at odd addresses."""
    rows, columns = tensor.shape
    around = tensor.new_full((rows + 64, columns + 257), float("nan"))
    around[:rows, 1 : 1 + columns] = tensor
    return around[:rows, 1 : 1 + columns]


@pytest.mark.parametrize("side", ["x", "weight", "bias"])
def test_nothing_beyond_the_edges_is_used(side):
    def fn(device):
        tensors = dict(
            zip(
                ("x", "weight", "bias"),
                operands(33, 20, 37, torch.float32, device=device),
                strict=True,
            )
        )
        tensors["weight"], tensors["bias"] = tensors["weight"][0], tensors["bias"][0]
        expected = plait.matmul(**tensors, impl="fused")
        value = tensors[side]
        wide = surrounded_by_nan(value if value.dim() == 2 else value[None])
        tensors[side] = wide if value.dim() == 2 else wide[0]
        assert torch.equal(plait.matmul(**tensors, impl="fused"), expected)

    on_one_rank(fn)


@pytest.mark.parametrize("layouts", [("contiguous", "transposed"), ("padded rows", "contiguous")])
def test_gated_weights_may_lie_differently(layouts):
    def fn(device):
        x, weights, biases = operands(33, 48, 40, torch.bfloat16, 2, device)
        expected = plait.matmul(x, weights, biases, activation="swiglu", impl="fused")
        laid = [LAYOUTS[layout](weight) for layout, weight in zip(layouts, weights, strict=True)]
        strided = [torch.stack([bias, bias], -1)[:, 0] for bias in biases[:1]] + biases[1:]
        result = plait.matmul(x, laid, strided, activation="swiglu", impl="fused")
        assert torch.equal(result, expected)
        # Without descriptors too: an odd address of x takes them away.
        result = plait.matmul(
            LAYOUTS["odd address"](x), laid, strided, activation="swiglu", impl="fused"
        )
        assert torch.equal(result, expected)

    on_one_rank(fn)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 300, 17), (131, 1, 5), (35, 150, 300)])
def test_odd_sizes(m, n, k):
    def fn(device):
        x, (weight,), (bias,) = operands(m, n, k, torch.float32, device=device)
        result = plait.matmul(x, weight, bias, impl="fused")
        expected = exact(x, [weight], [bias])
        allowed = 2 * error(plain(x, [weight], [bias]), expected)
        # A handful of elements may all be exact in torch by luck: half a unit in the last place.
        assert error(result, expected) <= max(allowed, 2.0**-24 * expected.norm().item())

    on_one_rank(fn)


@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
@pytest.mark.parametrize("shape", [(0, 4, 8), (5, 0, 8), (5, 4, 0), (0, 0, 0)])
def test_zero_sizes(shape, impl):
    m, n, k = shape

    def fn(device):
        x, (weight,), (bias,) = operands(m, n, k, torch.float32, device=device)
        for each in (x, weight, bias):
            each.requires_grad_()
        result = plait.matmul(x, weight, bias, activation="relu", impl=impl)
        assert torch.equal(result, F.relu(bias).expand(m, n))
        result.sum().backward()
        assert x.grad.shape == (m, k)
        assert torch.equal(weight.grad, torch.zeros_like(weight))
        assert torch.equal(bias.grad, m * (bias > 0).float())

    on_one_rank(fn)


def test_leading_dimensions_and_vectors():
    def fn(device):
        x, (weight,), (bias,) = operands(24, 16, 32, torch.bfloat16, device=device)
        flat = plait.matmul(x, weight, bias, impl="fused")
        cube = plait.matmul(x.reshape(2, 3, 4, 32), weight, bias, impl="fused")
        assert torch.equal(cube, flat.reshape(2, 3, 4, 16))
        assert torch.equal(plait.matmul(x[5], weight, bias, impl="fused"), flat[5])

    on_one_rank(fn)


@pytest.mark.parametrize("impl", ["fused", "unfused", "reference"])
def test_out_and_out_dtype(impl):
    def fn(device):
        x, (weight,), (bias,) = operands(20, 24, 32, torch.bfloat16, device=device)
        wide = plait.matmul(x, weight, bias, out_dtype=torch.float32, impl=impl)
        assert wide.dtype is torch.float32
        if impl != "unfused":  # that one rounds the product before it converts
            expected = exact(x, [weight], [bias])
            assert error(wide, expected) < error(plain(x, [weight], [bias]), expected) / 10
        out = torch.full((24, 20), float("nan"), device=device).t()
        assert plait.matmul(x, weight, bias, out=out, impl=impl) is out
        assert torch.equal(out, wide)
        square = x.new_zeros(32, 32).copy_(torch.eye(32)[torch.randperm(32)])
        expected = x @ square.t()
        plait.matmul(x, square, out=x, impl=impl)  # out may be an input
        assert torch.equal(x, expected)
        x = x @ square
        cube = torch.full((4, 5, 24), float("nan"), device=device)
        plait.matmul(x.reshape(4, 5, 32), weight, bias, out=cube, impl=impl)
        assert torch.equal(cube.reshape(20, 24), wide)

    on_one_rank(fn)


def test_list_of_weights_gives_list_of_results():
    def fn(device):
        x, _, _ = operands(8, 1, 16, torch.float32, device=device)
        weights = [torch.randn(n, 16, device=device) for n in (4, 9)]
        biases = [torch.randn(n, device=device) for n in (4, 9)]
        results = plait.matmul(x, weights, biases, activation="silu", impl="fused")
        assert isinstance(results, list)
        for result, weight, bias in zip(results, weights, biases, strict=True):
            single = plait.matmul(x, weight, bias, activation="silu", impl="fused")
            assert torch.equal(result, single)
        assert [r.shape for r in plait.matmul(x, weights, impl="fused")] == [(8, 4), (8, 9)]

    on_one_rank(fn)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_against_fp64(dtype, activation):
    def grads_of(call, tensors, grad):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(call(leaves), leaves, grad.to(leaves[0].dtype))

    def fn(device):
        count = num_weights(activation)
        x, weights, biases = operands(20, 24, 32, dtype, count, device)
        tensors, grad = [x, *weights, *biases], torch.randn(20, 24, device=device).to(dtype)

        def fused(leaves):
            given = leaves[1 : 1 + count], leaves[1 + count :]
            given = given if activation in GATES else (given[0][0], given[1][0])
            return plait.matmul(leaves[0], *given, activation=activation, impl="fused")

        def torchs(leaves):
            return plain(leaves[0], leaves[1 : 1 + count], leaves[1 + count :], activation)

        ours = grads_of(fused, tensors, grad)
        theirs = grads_of(torchs, tensors, grad)
        expected = grads_of(torchs, [t.double() for t in tensors], grad)
        for mine, plain_grad, right in zip(ours, theirs, expected, strict=True):
            assert mine.dtype is dtype
            assert_as_good_as_plain(mine, plain_grad, right)

    on_one_rank(fn)


def test_only_asked_gradients_are_computed():
    def fn(device):
        x, (weight,), (bias,) = operands(8, 8, 16, torch.float32, device=device)
        weight.requires_grad_()
        plait.matmul(x, weight, bias, activation="gelu", impl="fused").sum().backward()
        assert (x.grad, bias.grad) == (None, None)
        assert weight.grad is not None

    on_one_rank(fn)


@pytest.mark.newest_triton
@pytest.mark.parametrize("desc", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_large_tiles_finished_in_pieces(activation, desc):
    """The tile of large problems on sm90: its epilogue works on a quarter of the columns a time."""

    def fn(device):
        count = num_weights(activation)
        x, weights, biases = operands(136, 264, 72, torch.bfloat16, count, device)
        out = torch.full((136, 264), float("nan"), dtype=torch.bfloat16, device=device)
        pre = [out.clone() for _ in weights]
        config = Config(128, 256, 64, 8, 3, 8, desc)
        program = plan_matmul(
            x, weights, biases, out, pre, activation=activation, config=config, num_sms=3
        )
        executor = executor_for(device)
        executor.run(program)
        executor.synchronize()
        expected = exact(x, weights, biases, activation)
        assert_as_good_as_plain(out, plain(x, weights, biases, activation), expected)
        for value, weight, bias in zip(pre, weights, biases, strict=True):
            right = exact(x, [weight], [bias])
            assert_as_good_as_plain(value, plain(x, [weight], [bias]), right)

    on_one_rank(fn)


# --- choice of implementation


def test_auto_outside_and_inside_virtual_ranks():
    x, (weight,), _ = operands(4, 4, 4, torch.float32)
    plait.matmul(x, weight)
    assert plait.last_run().impl == "reference"
    assert plait.last_run().operator == "matmul"

    def fn(device):
        x, (weight,), _ = operands(4, 4, 4, torch.float32, device=device)
        plait.matmul(x, weight)
        return plait.last_run().impl, device.type

    impl, kind = on_one_rank(fn)
    assert impl == ("fused" if kind == "cpu" else "unfused")


def test_auto_takes_the_reference_for_fp64():
    x, (weight,), _ = operands(4, 4, 4, torch.float64)
    torch.testing.assert_close(plait.matmul(x, weight), x @ weight.t())
    with pytest.raises(UnsupportedError, match="float64"):
        plait.matmul(x, weight, impl="fused")


def test_fused_needs_an_executor():
    x, (weight,), _ = operands(4, 4, 4, torch.float32)
    with pytest.raises(DeviceError, match="run_virtual"):
        plait.matmul(x, weight, impl="fused")


# --- messages

_X, _W, _B = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5)
BAD = [
    (lambda: plait.matmul([1.0], _W), ArgumentError, "x: expected a torch.Tensor"),
    (lambda: plait.matmul(_X, _W[:, :3]), ShapeError, r"weight: expected shape \[N, 4\]"),
    (lambda: plait.matmul(_X[0, 0], _W), ShapeError, "x: expected at least 1 dim"),
    (lambda: plait.matmul(_X, _W.bfloat16()), DtypeError, "weight: expected torch.float32"),
    (lambda: plait.matmul(_X.int(), _W.int()), DtypeError, "x: expected dtype"),
    (lambda: plait.matmul(_X, _W, _B[:4]), ShapeError, r"bias: expected shape \[5\]"),
    (lambda: plait.matmul(_X, _W, [_B]), ArgumentError, "bias: expected a tensor"),
    (lambda: plait.matmul(_X, [_W, _W], _B), ArgumentError, "bias: expected a list of 2"),
    (lambda: plait.matmul(_X, [_W, _W], [_B]), ArgumentError, "bias: expected 2 tensors"),
    (lambda: plait.matmul(_X, []), ArgumentError, "weight: expected one weight or more"),
    (lambda: plait.matmul(_X, _W, activation="tanh"), ArgumentError, "activation: .*'gelu'"),
    (lambda: plait.matmul(_X, _W, activation="swiglu"), ArgumentError, "weight: expected two"),
    (
        lambda: plait.matmul(_X, [_W, _W[:4]], activation="geglu"),
        ShapeError,
        r"weight\[1\]: expected shape \[5, 4\]",
    ),
    (lambda: plait.matmul(_X, _W, impl="fast"), ArgumentError, "impl: .*'fused'"),
    (lambda: plait.matmul(_X, _W, out_dtype=torch.int8), DtypeError, "out_dtype: expected"),
    (lambda: plait.matmul(_X, _W, out=_X), ShapeError, r"out: expected shape \[3, 5\]"),
    (
        lambda: plait.matmul(_X, _W, out=torch.zeros(3, 5), out_dtype=torch.float16),
        DtypeError,
        "out: expected dtype torch.float16",
    ),
    (
        lambda: plait.matmul(_X.clone().requires_grad_(), _W, out=torch.zeros(3, 5)),
        ArgumentError,
        "out: expected no gradients",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[case[2] for case in BAD])
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
