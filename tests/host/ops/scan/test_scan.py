"""Scans of every layout, cut in every way, against ATen and the references."""

import itertools

import pytest
import torch

import plait
from plait.ops.engine.dims import next_power_of_2
from plait.ops.norm.rows import tile_of
from plait.ops.scan import reference, tiles
from tests.host.ops.scan.scan_cases import (
    INDEXED,
    NAMES,
    assert_alike,
    dtypes,
    layouts,
    results,
    values,
)

# ROWS, BLOCK, SERIAL, chunks: as on a GPU, only smaller.
CUTS = ((16, 8, 0, 1), (4, 8, 0, 3), (16, 8, 2, 1), (4, 8, 4, 3), (8, 16, 1, 2), (8, 64, 16, 1))


def cut_like(rows, block, serial, chunks):
    """A function in place of `tiles.cut`."""

    def cut(layout, itemsize, **_):
        size = min(block, next_power_of_2(layout.size))
        tile = tile_of(layout, min(rows, next_power_of_2(layout.num_rows)), size, 1)
        steps = -(-layout.size // size)
        each = -(-steps // chunks)
        cuts = 1 if tile.whole else -(-steps // each)
        length = layout.size if cuts == 1 else each * size
        return tiles.Cut(tile, min(serial, size), cuts, length)

    return cut


def compare(name, x, dim):
    aten = results(getattr(torch, name)(x, dim))
    with plait.use("scan", device=x.device), plait.report() as report:
        ours = results(getattr(torch, name)(x, dim))
    assert "aten:" not in str(report)
    exact = results(getattr(reference, name)(x, dim))
    for mine, theirs, meant in zip(ours, aten, exact, strict=True):
        assert_alike(name, mine, theirs, meant)


@pytest.mark.parametrize("name", NAMES)
def test_layouts(name, device):
    for dtype in dtypes(name):
        for x in layouts(dtype, device).values():
            for dim in {0, x.dim() - 1, x.dim() // 2} if x.dim() else {0, -1}:
                compare(name, x, dim)


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_cuts(name, how, device, monkeypatch):
    monkeypatch.setattr(tiles, "cut", cut_like(*how))
    for dtype in (torch.float32, torch.int64) if name == "cumsum" else (torch.float32,):
        for kind, dim in (("row", 0), ("rows", 1), ("columns", 1), ("middle", 1)):
            compare(name, layouts(dtype, device)[kind], dim)


@pytest.mark.parametrize("how", [None, (64, 4, 0, 2), (64, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nan_infinities_and_signed_zeros(name, how, device, monkeypatch):
    if how:
        monkeypatch.setattr(tiles, "cut", cut_like(*how))
    special = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0)
    x = torch.tensor(list(itertools.product(special, repeat=3)), device=device).repeat(1, 3)
    want = results(getattr(torch, name)(x, 1))
    with plait.use("scan", device=device):
        got = results(getattr(torch, name)(x, 1))
    for ours, aten in zip(got, want, strict=True):
        if name in INDEXED:
            assert torch.equal(torch.signbit(ours), torch.signbit(aten))
        assert torch.allclose(ours.double(), aten.double(), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("how", [(4, 64, 0, 1), (2, 4, 0, 3), (2, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["cumsum_", "cumprod_"])
def test_in_place(name, how, device, monkeypatch):
    monkeypatch.setattr(tiles, "cut", cut_like(*how))
    for kind, dim in (("rows", 1), ("columns", 1), ("steps", 0), ("0-d", 0)):
        x = layouts(torch.float32, device)[kind]
        want = getattr(x.clone(), name)(dim)
        with plait.use("scan", device=device), plait.report() as report:
            assert getattr(x, name)(dim) is x
        assert "aten:" not in str(report)
        assert torch.allclose(x, want, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_out_keeps_its_strides(name, device):
    x = values((5, 23), torch.float32, device)
    want = results(getattr(torch, name)(x, 1))
    outs = [torch.empty(23, 10, dtype=each.dtype, device=device)[:, ::2].t() for each in want]
    with plait.use("scan", device=device), plait.report() as report:
        getattr(torch, name)(x, 1, out=tuple(outs) if name in INDEXED else outs[0])
    assert "aten:" not in str(report)
    for ours, aten in zip(outs, want, strict=True):
        assert torch.allclose(ours, aten, rtol=1e-5)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("given", [torch.int64, torch.bool, torch.uint8])
def test_elements_are_converted_first(to, given, device):
    x = values((3, 40), given, device)
    want = torch.cumsum(x, 1, dtype=to)
    with plait.use("scan", device=device):
        got = torch.cumsum(x, 1, dtype=to)
    assert got.dtype is to
    assert torch.equal(got, want) or (to.is_floating_point and torch.allclose(got, want, 1e-2))


def test_a_sum_of_exponentials_near_one_keeps_its_digits(device):
    x = torch.tensor([0.0, -12.0, -14.0, -16.0], device=device)
    exact = reference.logcumsumexp(x, 0)
    with plait.use("scan", device=device):
        got = torch.logcumsumexp(x, 0)
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=0)


def test_public_case_O19_cumsum_of_nothing(device):
    with plait.use("scan", device=device):
        empty = torch.cumsum(torch.empty(0, dtype=torch.int32, device=device), 0)
        single = torch.cumsum(torch.tensor(3, dtype=torch.int32, device=device), 0)
    assert empty.shape == (0,)
    assert empty.dtype is torch.int64
    assert single.shape == ()
    assert single.dtype is torch.int64
    assert single.item() == 3


def test_public_case_O32_cummax_of_bool(device):
    with plait.use("scan", device=device), plait.report() as report:
        found = torch.cummax(torch.tensor([False, True, False], device=device), 0)
    assert "aten:" not in str(report)
    assert found.values.tolist() == [False, True, True]
    assert found.indices.tolist() == [0, 1, 1]
