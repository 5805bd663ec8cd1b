"""Tiles and shares: every choice reads each element once, whatever the layout."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.ops.engine.dims import next_power_of_2
from plait.ops.reduction import reduction
from plait.ops.reduction.layout import reduction_layout
from plait.ops.reduction.tiles import Tiles, choose
from plait.testing.compare import assert_close_to_fp64
from tests.host.ops.reduction.reduction_cases import CASES, LAYOUTS, dims, layout

# Several tiles in all directions; the last of each is partly empty. Then blocks that share results.
FORCED = {
    "chosen": None,
    "small": Tiles(2, 2, 4, 1, 1),
    "shared": Tiles(4, 2, 8, 1, 3),
}


@pytest.fixture
def forced(request, monkeypatch):
    tiles = FORCED[request.param]
    if tiles is not None:

        def choose_it(layout, *args, **kwargs):
            return tiles if layout.outer else replace(tiles, block_o=1)

        monkeypatch.setattr(reduction, "choose", choose_it)
    return request.param


def agrees(case, x, dim, what):
    with plait.use("reduction", device=x.device), plait.report() as report:
        ours = case.call(x, dim)
    assert "aten:" not in str(report), f"{what}: {report}"
    plain, exact = case.call(x, dim), case.meaning(x, dim)
    ours, plain, exact = (
        each if isinstance(each, tuple) else (each,) for each in (ours, plain, exact)
    )
    for one, aten, yardstick in zip(ours, plain, exact, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (aten.dtype, aten.shape, aten.stride()), what
        moved = case.name in ("amax", "amin", "max", "min", "aminmax")
        if moved or not one.is_floating_point():
            assert torch.equal(one, yardstick.to(one.dtype)), what
            assert torch.equal(one, aten), what
        else:
            # Few results, on which ATen may err less than usual: a rounding, or one a factor.
            share = torch.finfo(one.dtype).eps * (2 if case.name == "prod" else 0.5)
            if one.dtype is not torch.float64:
                assert_close_to_fp64(one, yardstick.double(), aten, what, plain_error_share=share)
            else:
                torch.testing.assert_close(one, yardstick.double(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("forced", FORCED, indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_means_the_reference(case, forced):
    # Each case takes two layouts, another two in another choice, and every layout has its turn.
    first = 2 * (CASES.index(case) + list(FORCED).index(forced))
    names = [list(LAYOUTS)[(first + number) % len(LAYOUTS)] for number in range(2)]
    for number, name in enumerate(names):
        dtype = case.dtypes[number % len(case.dtypes)]
        x = layout(name, dtype)
        for dim in dims(case, x.dim()):
            agrees(case, x, dim, f"{case.name} {name} {dtype} {dim}")


@pytest.mark.parametrize("forced", FORCED, indirect=True)
def test_index_among_the_least_of_values(forced):
    """What padding counts as must not be taken for an element, whichever tile it is in."""
    for value, function in ((-float("inf"), torch.argmax), (float("inf"), torch.argmin)):
        x = torch.full((3, 4, 7, 6), value)[:, ::2, :5, ::2]
        with plait.use("reduction", device=x.device):
            assert function(x).item() == 0
            assert function(x, 2).eq(0).all()
            assert function(x.permute(2, 3, 0, 1)).item() == 0


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_every_dtype(case):
    for dtype in case.dtypes:
        agrees(case, layout("middle", dtype), 1, f"{case.name} {dtype}")


@st.composite
def strided(draw):
    ndim = draw(st.integers(1, 4))
    sizes = [draw(st.sampled_from((1, 2, 3, 5, 8))) for _ in range(ndim)]
    whole = [n * draw(st.sampled_from((1, 1, 2))) for n in sizes]
    order = draw(st.permutations(range(ndim)))
    x = torch.arange(math.prod(whole)).view(whole)
    x = x[tuple(slice(None, None, w // n) for w, n in zip(whole, sizes, strict=True))]
    if draw(st.booleans()):
        x = x[:1].expand(sizes)
    x = x.permute(*order)
    return x, sorted(draw(st.sets(st.integers(0, ndim - 1))))


@given(strided(), st.booleans())
def test_layout_holds_every_element(drawn, ordered):
    """Offsets counted from the layout are those of the elements of each result."""
    x, reduced = drawn
    shape = [n for d, n in enumerate(x.shape) if d not in reduced]
    result = torch.empty(shape)
    strides = reduction.result_strides_of(result, x.dim(), reduced)
    found = reduction_layout(x.shape, x.stride(), reduced, strides, ordered=ordered)
    assert found is not None
    assert found.num_results == max(result.numel(), 1)
    assert found.reduced * result.numel() == x.numel()
    kept = [d for d in range(x.dim()) if d not in reduced]
    wanted = x.permute(*kept, *reduced).reshape(result.numel(), found.reduced)
    base = x.storage_offset()
    for k_in, k_out in zip(offsets(found.kept, 0), offsets(found.kept, 1), strict=True):
        elements = [k_in + each + base for each in offsets((*found.outer, found.inner), 0)]
        given = wanted[k_out].tolist()
        assert elements == given if ordered else sorted(elements) == sorted(given)


def offsets(dims, tensor):
    found = [0]
    for each in dims:
        found = [one + i * each.strides[tensor] for one in found for i in range(each.size)]
    return found


@given(
    st.integers(1, 2**24), st.integers(0, 2**26), st.integers(1, 300), st.booleans(),
    st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 3, 4)), st.booleans(), st.booleans(),
)  # fmt: skip
def test_choice_is_launchable(kept, inner, outer, columns, itemsize, weight, whole, interpreted):
    sizes = (outer, inner, kept) if columns else (kept, outer, inner)
    strides = (2 * max(inner, 1) * max(sizes[2], 1), max(sizes[2], 1), 1)
    reduced = (0, 1) if columns else (1, 2)
    given = reduction_layout(sizes, strides, reduced, strides, ordered=False)
    tiles = choose(
        given, itemsize, weight=weight, whole=whole, num_sms=132, interpreted=interpreted
    )
    blocks = (tiles.block_k, tiles.block_o, tiles.block_i)
    assert all(each == next_power_of_2(each) for each in (*blocks, tiles.num_warps))
    assert math.prod(blocks) <= 2**17
    assert tiles.num_warps <= 32
    assert math.prod(blocks) * itemsize <= 2**16 * 4 or interpreted
    assert 1 <= tiles.shares <= 1024
    assert tiles.shares == 1 or tiles.num_tiles(given) >= tiles.shares
    assert tiles.k_blocks(given) * tiles.block_k >= given.num_results
    assert tiles.num_tiles(given) * tiles.block_i * tiles.block_o >= given.reduced
