"""One call: what a kernel of plait is handed, what goes back to ATen, and how it is told."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import time

import pytest
import torch

import plait
from plait.errors import ArgumentError
from plait.ops.aten import registration, report, spec, targets
from plait.ops.aten.wrapped import wrapped


def test_a_kernel_gets_what_the_dispatcher_hands_over(marked):
    add = marked("add.Tensor")
    x = torch.ones(2, requires_grad=True)
    with plait.use("add", device="cpu"):
        y = torch.add(x, 2.5, alpha=3)
        y.sum().backward()
    ((args, kwargs),) = add.calls
    assert args[1:] == (2.5,)
    assert kwargs == {"alpha": 3}
    assert (y == 77).all()
    assert torch.equal(x.grad, torch.ones(2))  # autograd is ATen's


def test_a_kernel_may_call_what_it_serves(marked):
    inner = marked("add.Tensor", run=lambda a, b: torch.add(a, b) * 10)
    with plait.use("add", device="cpu"), plait.report() as counted:
        assert torch.add(torch.ones(1), torch.ones(1)).item() == 20
        assert plait.explain(torch.add, torch.ones(1), 1).result.item() == 20
    assert counted.served == 2
    del inner

    def fails(*args):
        raise ZeroDivisionError

    marked("mul.Tensor", run=fails)
    with plait.use(["add", "mul"], device="cpu"):
        with pytest.raises(ZeroDivisionError):
            torch.mul(torch.ones(1), torch.ones(1))
        assert torch.add(torch.ones(1), torch.ones(1)).item() == 20  # the guard is down again


def test_report_counts_by_reason(marked):
    marked("add.Tensor", supports=lambda a, *rest: "" if a.dim() == 1 else "not 1-d")
    x = torch.ones(2)
    with plait.use("add", device="cpu"), plait.report() as counted:
        x + x
        x + x
        x.view(1, 2) + x
        with plait.use((), "add"):
            x + x  # off: not counted
    found = {(row.key, row.reason): row.calls for row in counted.rows}
    assert found == {("add.Tensor", report.PLAIT): 2, ("add.Tensor", "not 1-d"): 1}
    assert counted.rows[0].host_us is None
    assert "plait served 2 calls" in str(counted)
    assert plait.report().served >= 2


def test_what_no_kernel_of_plait_is_asked_about(marked):
    """A lazy conjugate reaches the slot of mm; torch resolves it before most others."""
    mm = marked("mm")
    x = torch.full((2, 2), 1j)
    with plait.use("mm", device="cpu"), plait.report() as counted:
        y = x.conj() @ x
    assert torch.equal(y, torch.full((2, 2), 2 + 0j))
    assert counted.fallbacks == {"a conjugated or negated view": 1}
    assert not mm.calls


def test_times_only_if_asked(marked):
    marked("add.Tensor", run=lambda a, b: time.sleep(0.002) or a)
    with plait.use("add", device="cpu"), plait.report(timing=True) as counted:
        torch.ones(2) + torch.ones(2)
    assert 1500 < counted.rows[0].host_us < 1e6
    assert " us" in str(counted)
    assert report.WATCHING.timings == 0


def test_counts_of_threads_are_all_there(marked):
    marked("neg", run=lambda a: a)
    x = torch.ones(1)

    def work():
        with plait.use("neg", device="cpu"):
            for _ in range(2000):
                torch.neg(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with plait.report() as counted:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert counted.served == 8000


def test_counting_is_cheap():
    counter = report.Counter("none", "CPU")
    rounds = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(200):
            counter.count("why")
        rounds.append((time.perf_counter() - start) / 200 * 1e6)
    assert min(rounds) < 0.6  # 0.1 us on a quiet machine


def test_explain_says_which_way_and_why(marked):
    marked("exp", supports=lambda a: "" if a.dim() == 1 else "not 1-d")
    marked("sum.dim_IntList")

    def function(x):
        y = torch.softmax(x, 0).exp()
        y.view(1, -1).exp()
        (y * 1).sum().backward()
        return y

    x = torch.ones(3, requires_grad=True)
    with plait.use("exp", device="cpu"):
        told = plait.explain(function, x)
    paths = [(each.key, each.path, each.reason) for each in told.calls]
    assert ("exp", "plait", "") in paths
    assert ("exp", "aten", "not 1-d") in paths
    assert ("_softmax", "aten", "plait has no kernel for it") in paths
    assert ("sum.dim_IntList", "aten", "not enabled") not in paths  # `sum` reaches it inside ATen
    assert ("_softmax_backward_data", "aten", "plait has no kernel for it") in paths
    assert ("view", "aten", "no operator that plait overrides") in paths
    assert told.result.shape == (3,)
    assert str(told).splitlines()[0].split() == ["_softmax", "aten", *paths[0][2].split()]

    told = plait.explain(torch.sum, x, 0)
    assert told.calls[0].reason == "not enabled"
    plait.enable("sum", device="cpu")
    with plait.use((), "*"):
        assert plait.explain(torch.sum, x, 0).calls[0].reason == "off in this thread"
    assert plait.explain(torch.sum, x, 0).calls[0].path == "plait"
    with pytest.raises(ZeroDivisionError):
        plait.explain(lambda: 1 / 0)
    assert report.WATCHING.listeners == 0


def test_two_operators_cannot_serve_one_key(marked):
    marked("exp")
    with pytest.raises(ArgumentError, match="marked serves it"):
        marked("exp")
    with pytest.raises(ArgumentError, match="that are targets"):
        spec.add(spec.OpSpec("x", ("reshape",), run=lambda x: x))


NUMBERS = [True, False, 0, 3, -(2**40), 0.0, -0.0, 2.5, math.inf, math.nan, 1j, complex(-0.0, 2)]
DTYPES = (torch.bool, torch.int8, torch.int64, torch.float16, torch.float32, torch.float64)
TENSORS = [
    torch.ones(shape, dtype=dtype) for shape in ((), (2,)) for dtype in (*DTYPES, torch.complex64)
]


def _numbers():
    found = []
    for number in NUMBERS:
        for x in TENSORS:
            for call in (torch.add, torch.mul, torch.pow, torch.eq, torch.div, torch.sub):
                for args in ((x, number), (number, x)):
                    try:
                        y = call(*args)
                        found.append((y.dtype, y.shape, str(y.tolist())))
                    except (RuntimeError, TypeError) as error:
                        found.append((type(error), str(error)))
            y = x.clone()
            try:
                y.add_(number)
                found.append((y.dtype, str(y.tolist())))
                found.append(str(torch.mul(x, number, out=torch.empty(0, dtype=x.dtype))))
            except RuntimeError as error:
                found.append(str(error))
            try:
                found.append(str(torch.where(torch.tensor([True, False]), x, number)))
            except RuntimeError as error:
                found.append(str(error))
    return found


def test_numbers_in_tensor_slots_promote_as_in_pytorch(marked):
    marked()
    plain = _numbers()
    registration.install(targets.targets(), "CPU")
    assert len(plain) > 1000
    assert _numbers() == plain
    with torch.inference_mode():
        assert _numbers() == plain


@pytest.mark.parametrize("number", NUMBERS)
def test_a_wrapped_number_is_one(number):
    made = wrapped(number)
    assert repr(made.item()) == repr(number)
    assert wrapped(number) is made
    assert wrapped(number, fresh=True) is not made
    one = torch.ones((), dtype=torch.float16)
    assert torch.result_type(one, made) == torch.result_type(one, number)
    assert not made.is_inference()
    assert not made.requires_grad


def test_a_number_that_fits_no_dtype_is_left_to_aten():
    assert wrapped(2**70) == 2**70


def test_copies_subclasses_and_functorch(marked):
    """What people do with tensors, under an override of everything."""

    class Logged(torch.Tensor):
        pass

    def everything():
        x = torch.arange(6.0).view(2, 3)
        logged = (x.as_subclass(Logged) + 1).sum()
        layer = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        twin = copy.deepcopy(layer)
        again = pickle.loads(pickle.dumps(x[:, 1:]))
        grads = torch.func.vmap(torch.func.grad(lambda v: (v * 2).sum().exp()))(x)
        jacobian = torch.func.jacrev(lambda v: torch.softmax(v, 0))(x[0])
        _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
        hessian = torch.func.hessian(lambda v: (v**3).sum())(x[0])
        functional = torch.func.functionalize(lambda v: v.clone().add_(1))(x)
        sparse = torch.eye(3).to_sparse() @ x.T
        nested = torch.nested.nested_tensor([x[0], x[1, :2]]).sin().unbind()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ x.T
        found = [logged, twin(x), again, grads, jacobian, tangent, hessian, functional, sparse]
        return [*found, low, *nested]

    marked()
    plain = everything()
    registration.install(targets.targets(), "CPU")
    for a, b in zip(plain, everything(), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
