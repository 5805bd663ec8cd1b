"""Ties, NaN, empty and strided inputs, results of the caller's: what users of others met."""

import pytest
import torch

import plait

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _served(device):
    with plait.use("reduction", device=device):
        yield


def test_o06_argmax_of_many_columns(device):
    x = torch.randn(3, 64, 605, device=device)
    first = (x[1] > x[0]).long()
    top = torch.where(x[1] > x[0], x[1], x[0])
    assert torch.equal(x.argmax(0), torch.where(x[2] > top, 2, first))


def test_o12_sum_and_mean_of_strided_inputs(device):
    assert torch.arange(12.0, device=device).view(3, 4)[::2, ::2].sum().item() == 20.0
    expanded = torch.arange(3.0, device=device)[:, None].expand(3, 4)
    assert expanded.sum(0).tolist() == [3.0, 3.0, 3.0, 3.0]
    assert expanded.mean(0).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_o13_max_of_a_strided_input(device):
    whole = torch.full((5, 7), 100.0, device=device)
    part = whole[::2, ::2]
    part.copy_(torch.arange(12.0).view(3, 4))
    assert part.max().item() == 11.0


def test_o16_out_is_resized_or_keeps_its_strides(device):
    ones = torch.ones(32, 32, device=device)
    out = torch.empty((), device=device)
    assert torch.sum(ones, dim=(), out=out) is out
    assert out.item() == 1024
    strided = torch.full((64,), NAN, device=device)[::2]
    assert torch.sum(ones, dim=1, out=strided) is strided
    assert strided.stride() == (2,)
    assert strided.tolist() == [32.0] * 32
    with pytest.warns(UserWarning, match="resized"):
        torch.sum(ones, dim=(), out=torch.empty(3, device=device))


def test_o17_o18_nothing_to_reduce(device):
    nothing = torch.empty(0, dtype=torch.bool, device=device)
    assert torch.all(nothing).item() is True
    assert torch.any(nothing).item() is False
    assert torch.empty(2, 0, device=device).all(1).tolist() == [True, True]
    assert torch.empty(0, 2, device=device).any(0).tolist() == [False, False]
    total = torch.sum(torch.empty(1, 0, dtype=torch.bool, device=device))
    assert total.dtype == torch.int64
    assert total.item() == 0
    empty = torch.empty(0, device=device)
    assert torch.sum(empty).item() == 0.0
    assert torch.prod(empty).item() == 1.0
    assert torch.mean(empty).isnan()
    assert torch.linalg.vector_norm(empty).item() == 0.0
    assert torch.logsumexp(empty, 0).item() == -INF
    assert torch.empty(0, 3, device=device).sum(1).shape == (0,)


def test_o21_no_index_of_nothing(device):
    assert torch.empty(0, 3, device=device).argmax(1).shape == (0,)
    for shape, dim in (((3, 0), 1), ((0,), None)):
        with pytest.raises(IndexError):
            torch.empty(shape, device=device).argmax(dim)
    with pytest.raises(RuntimeError):
        torch.empty(0, device=device).max()


def test_o23_no_dims_are_all_dims(device):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    assert [f(x, dim=[]).item() for f in (torch.sum, torch.amax, torch.mean)] == [10.0, 4.0, 2.5]


def test_o25_nan_is_the_maximum_and_the_first_counts(device):
    x = torch.tensor([1.0, NAN, 3.0, NAN], device=device)
    value, index = x.max(0)
    assert value.isnan()
    assert index.item() == 1
    value, index = x.min(0)
    assert value.isnan()
    assert index.item() == 1
    many = torch.zeros(70000, device=device)
    many[5], many[66000] = 9.0, NAN
    assert many.max().isnan()
    assert many.argmax().item() == 66000
    assert all(each.isnan() for each in torch.aminmax(many))


def test_o27_argmax_with_nan(device):
    rows = torch.tensor([[NAN, 6, 8], [NAN, INF, 0], [INF, NAN, 0]], device=device)
    assert rows.argmax(1).tolist() == [0, 0, 1]


def test_first_of_equal_and_of_infinite_values(device):
    x = torch.full((3, 5), -INF, device=device)
    assert x.argmax(1).tolist() == [0, 0, 0]
    assert x.t().max(0).indices.tolist() == [0, 0, 0]
    least = torch.full((2, 3), torch.iinfo(torch.int64).min, device=device)
    assert least.argmax().item() == 0
    assert (least + 1).argmin().item() == 0
    assert x.new_tensor([0.0, -0.0, 0.0]).argmax().item() == 0


def test_index_counts_in_the_order_of_dims(device):
    x = torch.arange(24.0, device=device).view(2, 3, 4).permute(2, 0, 1)
    assert x.argmax().item() == x.reshape(-1).tolist().index(23.0)
    assert x[:, :, ::2].argmin().item() == 0


def test_infinite_logsumexp(device):
    x = torch.tensor([[INF, 0], [-INF, -INF], [-INF, 1], [NAN, 0], [INF, -INF]], device=device)
    assert x.logsumexp(1)[[0, 1, 2, 4]].tolist() == [INF, -INF, 1.0, INF]
    assert x.logsumexp(1)[3].isnan()


def test_variance_far_from_zero(device):
    """Squares of 1e4 leave nothing of a variance of 1 in fp32; distances from the mean do."""
    x = torch.randn(3, 4000, device=device, dtype=torch.float64)
    far = (x + 1e4).float()
    torch.testing.assert_close(far.var(1), far.double().var(1).float(), rtol=1e-5, atol=0)
    half = (x + 64).bfloat16()
    torch.testing.assert_close(
        torch.var(half.float(), 1), half.double().var(1).float(), rtol=1e-5, atol=0
    )


def test_same_bits_again(device):
    x = torch.rand(120000, device=device)
    assert len({x.sum().item() for _ in range(5)}) == 1
