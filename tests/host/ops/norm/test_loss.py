"""Losses against fp64: blocks of every number, layouts, ignored and impossible targets."""

import math

import pytest
import torch
from torch.nn import functional as F

import plait
from plait.ops.norm import loss, loss_nll
from plait.ops.norm import loss_reference as reference
from plait.testing.compare import assert_close_to_fp64

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = (0, 1, 2)


@pytest.fixture(params=["chosen", "many blocks"])
def blocks(request, monkeypatch):
    """Few elements a block, so that results come from several, with and without a second launch."""
    if request.param != "chosen":
        monkeypatch.setattr(loss, "_INTERPRETED_TILE", 32)
        monkeypatch.setattr(loss_nll, "_INTERPRETED_TILE", 16)
        monkeypatch.setattr(loss_nll, "_MAX_TILES", 2)


def served(call, *args):
    device = next(each.device for each in args if isinstance(each, torch.Tensor))
    with plait.use("softmax", device=device), plait.report() as report:
        result = call(*args)
    assert "aten:" not in str(report), report
    return result


def close(ours, exact, plain, what):
    assert ours.stride() == plain.stride(), what
    share = torch.finfo(ours.dtype).eps * 4  # a single number of plain torch may be lucky
    assert_close_to_fp64(ours, exact, plain, what, plain_error_share=share)


def cases():
    """Pairs of several layouts in fp32, and of one in each other dtype."""
    yield from pairs(torch.float32)
    for number, dtype in enumerate(FLOATS[1:], 1):
        yield list(pairs(dtype))[number]


def pairs(dtype):
    """Inputs and targets between 0 and 1, of several layouts."""
    x = torch.rand(9, 14, dtype=torch.float64)
    yield x.to(dtype), x.flip(0).to(dtype)
    yield x.to(dtype).t(), x.t().flip(0).to(dtype)
    y = torch.rand(4, 6, 5, 8, dtype=torch.float64).to(dtype)
    yield y[::2, :, ::2, ::3], y[1::2, :, 1:4, ::3].transpose(1, 2).contiguous().transpose(1, 2)
    yield y.to(memory_format=torch.channels_last), y.flip(0).to(memory_format=torch.channels_last)
    yield (
        torch.rand((), dtype=torch.float64).to(dtype),
        torch.rand((), dtype=torch.float64).to(dtype),
    )


LOSSES = {
    "mse_loss": (),
    "smooth_l1_loss": (0.3,),
    "smooth_l1_loss of 0": (0.0,),
    "huber_loss": (0.3,),
    "soft_margin_loss": (),
}


@pytest.mark.parametrize("name", LOSSES)
def test_means_the_reference(name, blocks, seed):
    torch.manual_seed(seed)
    params, name = LOSSES[name], name.split()[0]
    call, meaning = getattr(aten, name), getattr(reference, name)
    for x, t in cases():
        for reduction in REDUCTIONS:
            ours, plain = (f(x, t, reduction, *params) for f in (lambda *a: served(call, *a), call))
            exact = meaning(x, t, reduction, *params)
            close(ours, exact, plain, f"{name} {x.dtype} {tuple(x.shape)} {reduction}")


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_probabilities(weighted, blocks, seed):
    torch.manual_seed(seed)
    for x, t in cases():
        weight = torch.rand(x.shape[-1:]).to(x.dtype) if weighted else None
        logits = x * 8 - 4
        for reduction in REDUCTIONS:
            what = f"{x.dtype} {tuple(x.shape)} {reduction}"
            args = (x, t, weight, reduction)
            plain = aten.binary_cross_entropy(*args)
            exact = reference.binary_cross_entropy(*args)
            close(served(aten.binary_cross_entropy, *args), exact, plain, what)
            args = (logits, t, weight, weight, reduction)
            plain = aten.binary_cross_entropy_with_logits(*args)
            exact = reference.binary_cross_entropy_with_logits(*args)
            close(served(aten.binary_cross_entropy_with_logits, *args), exact, plain, what)


def test_backward_passes(seed):
    """Each gradient is that of the reference by autograd, with a gradient an element and of one."""
    torch.manual_seed(seed)
    calls = {
        "mse_loss": ((), aten.mse_loss_backward),
        "smooth_l1_loss": ((0.3,), aten.smooth_l1_loss_backward),
        "huber_loss": ((0.3,), aten.huber_loss_backward),
        "soft_margin_loss": ((), aten.soft_margin_loss_backward),
    }
    for number, (name, (params, call)) in enumerate(calls.items()):
        dtype = FLOATS[number % 2]
        for x, t in pairs(dtype):
            for reduction in REDUCTIONS:
                leaf = x.double().requires_grad_()
                meaning = getattr(reference, name)(leaf, t, reduction, *params)
                g = torch.randn(meaning.shape).to(dtype)
                (exact,) = torch.autograd.grad(meaning, leaf, g.double())
                args = (g, x, t, reduction, *params)
                close(served(call, *args), exact, call(*args), f"{name} {tuple(x.shape)}")


def test_infinities_and_nan():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 0.0])
    t = torch.tensor([0.5, 1.0, 0.0, math.nan, 0.0])
    for name, params in LOSSES.items():
        if name != "soft_margin_loss":  # ATen's overflows, and makes NaN of infinities
            call = getattr(aten, name.split()[0])
            ours, plain = served(call, x, t, 0, *params), call(x, t, 0, *params)
            torch.testing.assert_close(ours, plain, equal_nan=True)
    far = torch.tensor([-200.0, 200.0])
    assert served(aten.soft_margin_loss, far, torch.ones(2), 0).tolist() == [200.0, 0.0]
    edge = torch.tensor([0.0, 1.0, 0.0, 1.0])
    ours = served(aten.binary_cross_entropy, edge, torch.tensor([0.0, 1.0, 1.0, 0.0]), None, 0)
    assert ours.tolist() == [0.0, 0.0, 100.0, 100.0]


def targets(classes, *shape):
    found = torch.randint(0, classes, shape)
    found.view(-1)[::5] = min(1, classes - 1)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(23, 7), (1, 1), (200, 3), (2, 5, 7, 9)])
def test_negative_log_likelihood(shape, weighted, blocks, seed):
    torch.manual_seed(seed)
    forward = aten.nll_loss_forward if len(shape) == 2 else aten.nll_loss2d_forward
    backward = aten.nll_loss_backward if len(shape) == 2 else aten.nll_loss2d_backward
    t = targets(shape[1], shape[0], *shape[2:])
    for dtype in FLOATS[:2]:
        x = torch.randn(shape).log_softmax(1).to(dtype)
        weight = torch.rand(shape[1], 2).to(dtype)[:, 0] if weighted else None
        for reduction in REDUCTIONS:
            for ignored in (-100, 1) if shape[1] > 1 else (-100,):
                what = f"{shape} {dtype} {reduction} {ignored}"
                args = (x, t, weight, reduction, ignored)
                ours, plain = served(forward, *args), forward(*args)
                exact = reference.nll_loss(*args)
                for mine, meant, atens in zip(ours, exact, plain, strict=True):
                    close(mine, meant, atens, what)
                g = torch.randn(t.shape if reduction == 0 else ()).to(dtype)
                args = (g, *args, plain[1])
                close(served(backward, *args), backward(*(wide(each) for each in args)),
                      backward(*args), what)  # fmt: skip


def wide(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def test_strided_classes_and_byte_targets():
    x = torch.randn(7, 20).t().log_softmax(1)[::2]
    t = targets(7, 20)[::2].to(torch.uint8)
    ours, plain = (f(x, t, None, 0, 3) for f in (lambda *a: served(aten.nll_loss_forward, *a),
                                                 aten.nll_loss_forward))  # fmt: skip
    assert torch.equal(ours[0], plain[0])
    assert ours[1].item() == 0.0


def test_single_and_no_samples():
    x = torch.randn(6)
    for t, ignored in ((2, -100), (2, 2)):
        for reduction in REDUCTIONS:
            args = (x, torch.tensor(t), None, reduction, ignored)
            ours, plain = served(aten.nll_loss_forward, *args), aten.nll_loss_forward(*args)
            torch.testing.assert_close(ours, plain, equal_nan=True)
    for reduction in REDUCTIONS:
        args = (torch.randn(0, 4), torch.zeros(0, dtype=torch.long), None, reduction, -100)
        ours, plain = served(aten.nll_loss_forward, *args), aten.nll_loss_forward(*args)
        torch.testing.assert_close(ours, plain, equal_nan=True)


@pytest.mark.parametrize("target", [4, -1, 2**40, -(2**62)])
def test_no_class_reads_nothing(target):
    """A target that is no class gives NaN, and no gradient; nothing out of bounds is read."""
    x, weight = torch.randn(3, 4), torch.rand(4)
    t = torch.tensor([1, target, 2])
    each, _ = served(aten.nll_loss_forward, x, t, weight, 0, -100)
    assert each[1].isnan()
    assert each[[0, 2]].isfinite().all()
    assert served(aten.nll_loss_forward, x, t, weight, 1, -100)[0].isnan()
    gradient = served(aten.nll_loss_backward, torch.ones(()), x, t, weight, 2, -100, torch.ones(()))
    assert not gradient[1].any()


def test_O43_no_reduction_keeps_the_gradient_of_each_sample():
    """linkedin/Liger-Kernel#968: a gradient made in the forward pass, for a scalar alone."""
    x, t = torch.randn(4, 5, requires_grad=True), torch.tensor([1, -100, 2, 3])
    share = torch.tensor([0.5, 1.0, 2.0, 0.0])
    with plait.use("softmax", device=x.device):
        (F.cross_entropy(x, t, reduction="none") * share).sum().backward()
    hot = F.one_hot(t.clamp(min=0), 5)
    expected = (x.detach().softmax(1) - hot) * share[:, None] * (t >= 0)[:, None]
    torch.testing.assert_close(x.grad, expected)


def test_O44_label_smoothing():
    """linkedin/Liger-Kernel#243: an argument that is taken and dropped."""
    x, t = torch.randn(6, 5, requires_grad=True), targets(5, 6)
    plain = F.cross_entropy(x, t, label_smoothing=0.1)
    (expected,) = torch.autograd.grad(plain, x)
    with plait.use("softmax", device=x.device):
        ours = F.cross_entropy(x, t, label_smoothing=0.1)
        (gradient,) = torch.autograd.grad(ours, x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradient, expected)


def test_sums_do_not_depend_on_the_run():
    x, t = torch.randn(300_001), torch.randn(300_001)
    first = served(aten.mse_loss, x, t, 2)
    assert all(torch.equal(first, served(aten.mse_loss, x, t, 2)) for _ in range(2))
