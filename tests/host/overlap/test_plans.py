"""Plans of overlapped calls: what they depend on, what they allocate, when they are forgotten.

Nothing is computed here: a fake executor notes which addresses each call's kernels get.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

import plait
from plait.overlap.common import plans
from plait.runtime.prepared import PreparedProgram
from plait.settings import override
from plait.symm.group import Group
from tests.host.runtime.device_fakes import LAUNCHES, FakeBound, fake_group

WORLD, ROWS, K, N = 4, 32, 64, 48
_names = itertools.count()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(
        plans, "PreparedProgram", functools.partial(PreparedProgram, bind=FakeBound)
    )
    made = fake_group(WORLD, f"plans {next(_names)}")
    LAUNCHES.clear()
    yield made
    made.close()


def cache_of(group: Group) -> plans.PlanCache:
    return plans._caches[group.workspace]


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, K).to(dtype), torch.randn(N, K).to(dtype)


def warm(group: Group, call) -> None:
    """Until the regions have grown and both have a plan."""
    for _ in range(4):
        call()
    LAUNCHES.clear()


def gemm(launches=None) -> dict[str, int]:
    """Addresses of the last launch of a GEMM."""
    return [args for name, _, args in launches or LAUNCHES if "gemm" in name][-1]


def test_ag_gemm_is_planned_once_for_each_region(group: Group):
    x, weight = operands()
    for _ in range(6):
        plait.ag_gemm(x, weight, group=group)
    assert len(cache_of(group)) == 2
    assert group.executor.num_transformed == 4  # two calls whose regions grew, then two plans
    assert group.executor.ran == []
    assert plait.last_run().detail == "planned"
    assert plait.last_run().impl == "fused"


def test_a_planned_call_uses_its_own_tensors(group: Group):
    warm(group, lambda: plait.ag_gemm(*operands(), group=group))
    x, weight = operands()
    out = plait.ag_gemm(x, weight, group=group)
    assert out.shape == (WORLD * ROWS, N)
    assert out.dtype == torch.bfloat16
    seen = gemm()
    assert _plain(seen["x"]) == x.data_ptr()
    assert _plain(seen["w0"]) == weight.data_ptr()
    assert _plain(seen["out_ptr"]) == seen["pre0_ptr"] == out.data_ptr()
    first = group.executor.driver.log.copy()
    assert any(entry[0] == "copy" for entry in first)
    names = [name for name, _, _ in LAUNCHES]
    assert names.index("_prologue_kernel") < names.index("_ag_gemm_kernel")


def _plain(address) -> int:
    return address[1] if isinstance(address, tuple) else address


def test_rows_that_are_pushed_come_from_this_call(group: Group):
    warm(group, lambda: plait.ag_gemm(*operands(), group=group))
    x, weight = operands()
    plait.ag_gemm(x, weight, group=group)
    region = group.workspace.regions[(group.workspace._calls - 1) % 2]
    sent = region.data(1, 0, (ROWS, K), x.dtype)
    assert torch.equal(sent, x)


def test_every_result_has_its_place(group: Group):
    x, gate = operands()
    up, biases = torch.randn_like(gate), [torch.randn(N).bfloat16() for _ in range(2)]

    def call():
        return plait.ag_gemm(
            x, [gate, up], biases, group=group, activation="swiglu", return_gathered=True
        )

    warm(group, call)
    out, gathered = call()
    assert out.shape == (WORLD * ROWS, N)
    assert gathered.shape == (WORLD * ROWS, K)
    assert torch.equal(gathered[:ROWS], x)  # own rows of rank 0 are copied on main
    seen = gemm()
    assert _plain(seen["w1"]) == up.data_ptr()
    assert seen["bias1_ptr"] == biases[1].data_ptr()
    pre = torch.ops.plait.ag_gemm(
        x, [gate], biases[:1], group.name, 0, [], "silu", x.dtype, "auto", False, True
    )
    assert [tuple(each.shape) for each in pre] == [(WORLD * ROWS, N)] * 2


def test_gemm_rs_and_gemm_ar_are_planned(group: Group):
    x, weight = operands()
    bias = torch.randn(N).bfloat16()
    for call, shape in (
        (lambda: plait.gemm_rs(x, weight, bias, group=group), (ROWS // WORLD, N)),
        (lambda: plait.gemm_ar(x, weight, bias, group=group), (ROWS, N)),
        (lambda: plait.gemm_ar(x, weight, group=group, algorithm="two_shot"), (ROWS, N)),
    ):
        warm(group, call)
        out = call()
        assert plait.last_run().detail == "planned"
        assert tuple(out.shape) == shape
        assert gemm()["out_ptr"] == out.data_ptr()
    own = torch.randn(ROWS // WORLD, 16).bfloat16()
    arguments = (x, weight, None, group.name, 0, [], x.dtype, x.dtype, "auto", own)
    warm(group, lambda: torch.ops.plait.gemm_rs(*arguments))
    calls = group.workspace._calls
    out, whole = torch.ops.plait.gemm_rs(*arguments)
    assert plait.last_run().detail == "planned"
    assert group.workspace._calls == calls + 2  # one region for the sums and one for the gather
    assert tuple(whole.shape) == (ROWS, 16)
    assert torch.equal(whole[: ROWS // WORLD], own)


CHANGES = {
    "rows": lambda x, w: ((torch.randn(2 * ROWS, K).bfloat16(), w), {}),
    "strides": lambda x, w: ((x, w.t().contiguous().t()), {}),
    "address": lambda x, w: ((x, torch.randn(N * K + 1).bfloat16()[1:].view(N, K)), {}),
    "dtype": lambda x, w: ((x.half(), w.half()), {}),
    "activation": lambda x, w: ((x, w), {"activation": "relu"}),
    "out_dtype": lambda x, w: ((x, w), {"out_dtype": torch.float32}),
    "bias": lambda x, w: ((x, w, torch.randn(N).bfloat16()), {}),
    "rows_per_rank": lambda x, w: ((x, w), {"rows_per_rank": [ROWS, 5, ROWS, 9]}),
    "impl": lambda x, w: ((x, w), {"impl": "fused"}),
    "gathered": lambda x, w: ((x, w), {"return_gathered": True}),
    "weights": lambda x, w: ((x, [w, w.clone()]), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_signature_is_another_plan(group: Group, change: str):
    x, weight = operands()
    plait.ag_gemm(torch.cat([x] * 8), weight, group=group)  # the regions are large enough for all
    plait.ag_gemm(torch.cat([x] * 8), weight, group=group)
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    known = len(cache_of(group))
    arguments, options = CHANGES[change](x, weight)
    plait.ag_gemm(*arguments, group=group, **options)
    assert plait.last_run().detail == ""
    assert len(cache_of(group)) == known + 1


def test_tf32_is_part_of_the_signature(group: Group):
    x, weight = operands(torch.float32)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            for _ in range(5):
                plait.ag_gemm(x, weight, group=group)
            assert plait.last_run().detail == "planned"
            known = len(cache_of(group))
        assert known == 4  # for two regions
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_bad_input_is_refused_beside_a_plan(group: Group):
    x, weight = operands()
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    with pytest.raises(plait.errors.ShapeError):
        plait.ag_gemm(x, weight[:, 1:], group=group)
    with pytest.raises(plait.errors.DtypeError):
        plait.ag_gemm(x, weight.half(), group=group)
    with pytest.raises(plait.errors.ArgumentError):
        plait.ag_gemm(x, weight, group=group, impl="best")


def test_plans_are_bounded(group: Group, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plans, "_MAX_PLANS", 3)
    weight = operands()[1]
    for rows in (64, 64, 1, 2, 3, 4, 5):
        plait.ag_gemm(torch.randn(rows, K).bfloat16(), weight, group=group)
    assert len(cache_of(group)) == 3


def test_one_tensor_in_two_roles_runs_the_ordinary_way(group: Group):
    x = torch.randn(ROWS, K).bfloat16()
    for _ in range(5):
        plait.ag_gemm(x, x, group=group)
    assert plait.last_run().detail == ""
    assert len(group.executor.ran) == 5


def test_growth_settings_and_close_forget_plans(group: Group):
    x, weight = operands()
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    large = torch.cat([x] * 4)
    plait.ag_gemm(large, weight, group=group)  # one region grows
    plait.ag_gemm(x, weight, group=group)
    assert plait.last_run().detail == ""
    warm(group, lambda: plait.ag_gemm(large, weight, group=group))
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    with override(prologue_delay_us=5.0):
        plait.ag_gemm(x, weight, group=group)
        assert plait.last_run().detail == ""
        assert len(group.executor.ran) == 1
    with override(debug=True):
        plait.ag_gemm(x, weight, group=group)
        assert len(group.executor.ran) == 2
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    plait.ag_gemm(x, weight, group=group)
    assert plait.last_run().detail == "planned"
    known = len(plans._caches)
    group.close()
    gc.collect()
    assert len(plans._caches) == known - 1
    with pytest.raises(plait.errors.GroupError, match="open group"):
        plait.ag_gemm(x, weight, group=group)


def test_a_timeout_is_raised_beside_a_plan(group: Group):
    x, weight = operands()
    warm(group, lambda: plait.ag_gemm(x, weight, group=group))
    group._status[0] = 1
    with pytest.raises(plait.errors.PeerTimeoutError):
        plait.ag_gemm(x, weight, group=group)
    assert LAUNCHES == []


def test_calls_are_counted_alike_with_and_without_a_plan(group: Group):
    """In debug mode ranks compare numbered calls; some may have run planned before, some not."""
    x, weight = operands()
    warm(group, lambda: plait.gemm_ar(x, weight, group=group))
    before = group._sequence
    plait.gemm_ar(x, weight, group=group)
    planned, before = group._sequence - before, group._sequence
    with override(prologue_delay_us=5.0):
        plait.gemm_ar(x, weight, group=group)
    assert group._sequence - before == planned == 1


def test_gradients_reach_planned_calls(group: Group):
    x, weight = operands()
    warm(group, lambda: plait.ag_gemm(x.clone().requires_grad_(), weight, group=group))
    out = plait.ag_gemm(x.clone().requires_grad_(), weight, group=group)
    assert plait.last_run().detail == "planned"
    assert out.requires_grad
    assert out.is_leaf is False
