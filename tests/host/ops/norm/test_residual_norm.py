"""`plait.rms_norm` and `plait.layer_norm`: values, gradients, compilation, wrong arguments."""

import pytest
import torch

import plait
from plait.errors import ArgumentError, DtypeError, ShapeError
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
NORMS = pytest.mark.parametrize("norm", [plait.rms_norm, plait.layer_norm])


def _operands(norm, shape, dtype, device):
    generator = torch.Generator().manual_seed(len(shape))
    count = 3 if norm is plait.rms_norm else 4
    sizes = (shape, shape, shape[-1:], shape[-1:])[:count]
    made = [torch.randn(size, generator=generator) for size in sizes]
    return [each.to(device, dtype).requires_grad_() for each in made]


def _all(norm, operands, **options):
    """y, the sum, and gradients of all operands."""
    operands = [each.detach().requires_grad_() for each in operands]
    x, residual, *parameters = operands
    results = norm(x, *parameters, residual=residual, **options)
    incoming = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(each) for each in results]
    return *results, *torch.autograd.grad(results, operands, incoming)


@NORMS
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 32), (33,), (7, 1000), (2, 20000), (0, 8)])
def test_against_the_reference(norm, dtype, shape, device):
    """(2, 20000) does not fit a block and is composed."""
    operands = _operands(norm, shape, dtype, device)
    got, plain = _all(norm, operands), _all(norm, operands, impl="reference")
    exact = _all(norm, [each.double() for each in operands], impl="reference")
    assert_bitwise(got[1], plain[1])
    for index, (a, b, wide) in enumerate(zip(got, plain, exact, strict=True)):
        # The sum is rounded before it is normalised, so fp64 alone is no measure for 16 bits.
        if a.numel():
            assert_close_to_fp64(a, wide, b, f"result {index}", plain_error_share=1e-7)


@NORMS
def test_strides_and_fp32_parameters(norm, device):
    x, residual, *parameters = _operands(norm, (8, 6, 32), BF16, device)
    parameters = [each.float() for each in parameters]
    x, residual = x.detach().transpose(0, 1), residual.detach()[:1, :, :1].expand(6, 6, 32)
    x = x[:, :6]
    got = norm(x, *parameters, residual=residual)
    wanted = norm(x, *parameters, residual=residual, impl="reference")
    assert_bitwise(got[1], wanted[1])
    torch.testing.assert_close(*(each[0] for each in (got, wanted)), rtol=1e-2, atol=1e-2)


@NORMS
def test_without_a_residual_the_input_is_the_new_one(norm, device):
    x, _, *parameters = _operands(norm, (5, 32), FP32, device)
    y, total = norm(x, *parameters)
    assert total is x
    torch.testing.assert_close(y, norm(x, *parameters, impl="reference")[0])
    torch.testing.assert_close(norm(x)[0], norm(x, impl="reference")[0])


@NORMS
def test_gradcheck(norm, device):
    operands = _operands(norm, (3, 5), FP64, device)
    call = lambda x, residual, *rest: norm(x, *rest, residual=residual)  # noqa: E731
    assert torch.autograd.gradcheck(call, operands)
    x, _, *rest = operands
    assert torch.autograd.gradcheck(lambda x, *rest: norm(x, *rest)[0], (x, *rest))


@NORMS
def test_only_one_result_is_used(norm, device):
    x, residual, *parameters = _operands(norm, (3, 5), FP32, device)
    norm(x, *parameters, residual=residual)[1].sum().backward()
    assert x.grad.equal(torch.ones_like(x))
    assert residual.grad.equal(torch.ones_like(x))
    assert parameters[0].grad is None
    norm(x, *parameters, residual=residual)[0].sum().backward()
    assert parameters[0].grad is not None


@NORMS
def test_compiled(norm, device):
    x, residual, *parameters = _operands(norm, (4, 32), FP32, device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    got, wanted = (f(x, *parameters, residual=residual) for f in (compiled, norm))
    for a, b in zip(got, wanted, strict=True):
        assert_bitwise(a, b)
    grads = [torch.autograd.grad(sum(each.sum() for each in pair), (x, residual, *parameters))
             for pair in (got, wanted)]  # fmt: skip
    for a, b in zip(*grads, strict=True):
        assert_bitwise(a, b)
    bias = parameters[1] if len(parameters) > 1 else None
    rms = norm is plait.rms_norm
    args = (x, residual, parameters[0], bias, 1e-5, rms)
    torch.library.opcheck(torch.ops.plait.residual_norm.default, args)


@NORMS
def test_wrong_arguments(norm, device):
    x = torch.randn(3, 8, device=device)
    with pytest.raises(ShapeError, match=r"weight: expected \[8\]"):
        norm(x, torch.ones(7, device=device))
    with pytest.raises(ShapeError, match="residual: expected the shape of x"):
        norm(x, residual=x[:1])
    with pytest.raises(DtypeError, match="residual: expected the dtype of x"):
        norm(x, residual=x.double())
    with pytest.raises(DtypeError, match="x: expected bfloat16"):
        norm(x.int())
    with pytest.raises(ShapeError, match="x: expected a last dim with elements"):
        norm(x[:, :0])
    with pytest.raises(ArgumentError, match="impl: expected one of"):
        norm(x, impl="fast")
