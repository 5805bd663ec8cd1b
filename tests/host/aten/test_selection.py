"""What `enable`, `disable` and `use` turn on, for whom and for how long."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import plait
from plait.errors import ArgumentError, DeviceError, UnsupportedError
from plait.ops.aten import gate, registration, targets

ADD = torch.ones(3)


def is_on() -> bool:
    return bool((torch.add(ADD, ADD) == 77).all())


@pytest.fixture
def add(marked):
    return marked("add.Tensor")


@pytest.mark.parametrize(
    ("names", "some", "others"),
    [
        ("add.Tensor", {"add.Tensor"}, {"add.out", "add_.Tensor"}),
        ("add", {"add.Tensor", "add.out", "add_.Tensor", "add.Scalar"}, {"addmm"}),
        ("add_", {"add_.Tensor", "add_.Scalar"}, {"add.Tensor"}),
        ("mm", {"mm", "mm.out"}, {"addmm"}),
        ("mm.default", {"mm"}, {"mm.out"}),
        ("aten::sum.dim_IntList", {"sum.dim_IntList"}, {"sum"}),
        ("reduction", {"sum.dim_IntList", "var_mean.correction", "amax"}, {"cumsum", "_softmax"}),
        ("scan", {"cumsum", "cummax"}, {"sum"}),
        ("*_backward", {"gelu_backward", "native_layer_norm_backward"}, {"gelu"}),
        (["mm", "scan"], {"mm", "cumsum"}, {"add.Tensor"}),
        ((), set(), {"mm"}),
    ],
)
def test_what_a_name_means(names, some, others):
    found = targets.select("include", names)
    assert some <= found
    assert not others & found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ad.Tensor", "Did you mean add.Tensor"),
        ("reductions", "Did you mean reduction"),
        ("sofplus", "softplus"),
        ("softmax.int", "composes softmax.int of other operators"),
        ("no_such_*", "plait.explain"),
        (7, "Names are strings"),
        (["mm"], "Names are strings"),
    ],
)
@pytest.mark.parametrize("call", [plait.enable, plait.use, plait.disable])
def test_an_unknown_name_is_an_error(call, name, hint):
    with pytest.raises(
        ArgumentError, match="include: expected a key, base name, group or"
    ) as error:
        call([name])
    assert hint in str(error.value)
    with pytest.raises(ArgumentError):
        call(7)
    assert not registration.registered("CPU")


def test_every_target_exists_or_is_refused_with_a_reason(marked):
    marked()
    refused = registration.install(targets.targets(), "CPU")
    assert registration.registered("CPU") | refused.keys() == targets.targets().keys()
    assert len(refused) < 20, refused
    assert "C++ reference" in refused["addr.out"]
    # On a GPU it has a kernel of its own.
    assert "PyTorch composes it" in refused.pop("_fused_rms_norm")
    assert {each.split(" of it ")[0] for key, each in refused.items() if key != "addr.out"} == {
        "torch has no kernel"
    }


def test_operators_composed_above_autograd_are_left_alone(marked):
    marked()
    assert registration.install(["reshape"], "CPU").keys() == {"reshape"}
    assert not registration.registered("CPU")


def test_what_plait_has_no_kernel_for(add):
    with pytest.raises(UnsupportedError, match="has a kernel for"):
        plait.enable("mm", device="cpu")
    with pytest.raises(DeviceError, match="device: expected one of cpu, cuda"):
        plait.enable("add", device="meta")
    plait.enable(device="cpu")  # nothing wins on a CPU
    assert not registration.registered("CPU")


def test_enable_and_disable(add):
    assert not is_on()
    plait.enable("pointwise", device="cpu")
    assert is_on()
    assert registration.registered("CPU") == {"add.Tensor"}
    plait.disable("mul")
    assert is_on()
    plait.disable("*", exclude="add")
    assert is_on()
    plait.disable()
    assert not is_on()
    plait.enable("add", exclude=["add.out"], device="cpu")
    assert is_on()


def test_use_nests_and_ends(add):
    with plait.use("add", device="cpu"):
        assert is_on()
        with plait.use((), "*"):
            assert not is_on()
            with plait.use("add", device="cpu"):
                assert is_on()
            assert not is_on()
        assert is_on()
        with pytest.raises(ZeroDivisionError), plait.use((), "add"):
            raise ZeroDivisionError
        assert is_on()
        plait.disable()
        assert is_on()  # an open block keeps what it chose
    assert not is_on()
    assert gate.STATE.open_blocks == 0


def test_one_block_within_itself(add):
    block = plait.use("add", device="cpu")
    with block:
        with block:
            assert is_on()
        assert is_on()
    assert not is_on()


def test_use_is_for_its_own_thread(add):
    seen = []
    with plait.use("add", device="cpu"):
        thread = threading.Thread(target=lambda: seen.append(is_on()))
        thread.start()
        thread.join()
        assert is_on()
    plait.enable("add", device="cpu")
    with plait.use((), "add"):
        thread = threading.Thread(target=lambda: seen.append(is_on()))
        thread.start()
        thread.join()
        assert not is_on()
    assert seen == [False, True]


def test_use_reaches_backward_and_reentrant_backward_threads(marked):
    """A backward pass inside a backward pass deep enough to be moved to another thread."""
    mul = marked("neg")
    threads = set()

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            if ctx.depth:
                with torch.enable_grad():
                    x = torch.ones(2, requires_grad=True)
                    Deep.apply(x, ctx.depth - 1).sum().backward()
            assert (torch.neg(grad.detach()) == 77).all()
            return grad, None

    x = torch.ones(2, requires_grad=True)
    with plait.use("neg", device="cpu"):
        Deep.apply(x, 70).sum().backward()
    assert len(threads) > 1
    assert len(mul.calls) == 71


def test_enter_and_leave_are_cheap(add):
    """Bound: 5 us on a quiet machine; here a machine under load, so the best of many rounds."""
    block_us = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(100):
            with plait.use("add", device="cpu"):
                pass
        block_us.append((time.perf_counter() - start) * 1e4)
    assert min(block_us) < 15


def test_uninstall_puts_the_originals_back(marked):
    table = torch._C._dispatch_dump_table("aten::add.Tensor")
    marked("add.Tensor")
    plait.enable("add", device="cpu")
    assert is_on()
    assert torch._C._dispatch_dump_table("aten::add.Tensor") != table
    with plait.use("add", device="cpu"), pytest.raises(ArgumentError, match=r"use\(\) blocks"):
        plait.uninstall()
    plait.uninstall()
    assert not is_on()
    assert torch._C._dispatch_dump_table("aten::add.Tensor") == table
    plait.enable("add", device="cpu")  # and again
    assert is_on()
