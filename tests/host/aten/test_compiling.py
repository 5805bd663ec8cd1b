"""Calls whose kernels are not compiled yet: PLAIT_COMPILE=background, and `plait.warmup`."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import plait
from plait.ops.aten import compiling, dispatch, registration, spec, warmup
from plait.ops.engine.call import Call
from plait.ops.engine.precompile import KernelJob
from plait.settings import override
from tests.host.ops.engine.conftest import ADD
from tests.recorded_launches import GpuCall


class Workers:
    """Compiles a job when told to, if at all."""

    made: list[Workers]

    def __init__(self, arch, num_workers, on_done):
        assert arch == "sm90"
        self.jobs, self.on_done = [], on_done
        self.made.append(self)

    def submit(self, job):
        self.jobs.append(job)

    def finish(self, complaint=""):
        while self.jobs:
            self.on_done(self.jobs.pop(), complaint)


class Served(GpuCall):
    """A call that would be a GPU's, served with sevens."""

    def run(self) -> None:
        for each in self.results:
            each.fill_(7)


@pytest.fixture
def workers(monkeypatch):
    """Calls on the CPU are a GPU's, `add` is plait's, and worker processes are made-up."""
    kind = type("Made", (Workers,), {"made": []})
    monkeypatch.setattr(dispatch, "Call", Served)
    monkeypatch.setattr(compiling, "CompileWorkers", kind)
    monkeypatch.setattr(compiling, "_background", compiling._Background())
    with spec.only(ADD):
        yield kind.made
        registration.uninstall()


def add(size, dtype=torch.float32):
    """ "plait" or "aten": who has added."""
    ones = torch.ones(size, dtype=dtype)
    with plait.use("add", device="cpu"):
        value = torch.add(ones, ones)[0].item()
    return {7: "plait", 2: "aten"}[value]


def test_aten_serves_until_a_kernel_is_compiled(workers):
    with override(compile="background"), plait.report() as counted:
        assert [add(5), add(5)] == ["aten", "aten"]
        (made,) = workers
        assert len(made.jobs) == 1  # asked for once
        made.finish()
        assert add(5) == "plait"
        assert add(7) == "plait"  # another size, the same class
        assert add(32) == "aten"  # a multiple of 16 is another class
        assert add(5, torch.float64) == "aten"
        assert len(made.jobs) == 2
        made.finish()
        assert [add(32), add(5, torch.float64)] == ["plait", "plait"]
    assert counted.fallbacks == {compiling.COMPILING: 4}
    assert counted.served == 4


def test_a_kernel_that_does_not_compile_is_told_and_left_to_aten(workers):
    with override(compile="background"), plait.report() as counted:
        add(5)
        with pytest.warns(UserWarning, match="add_scaled_kernel does not compile.*no such tile"):
            workers[0].finish("no such tile")
        assert add(5) == "aten"
        assert not workers[0].jobs
    assert counted.fallbacks == {compiling.COMPILING: 1, compiling.FAILED: 1}


def test_sync_asks_nobody(workers):
    assert add(5) == "plait"
    assert not workers


def test_explain_says_that_a_kernel_is_being_compiled(workers):
    ones = torch.ones(5)
    with override(compile="background"), plait.use("add", device="cpu"):
        told = plait.explain(torch.add, ones, ones)
    assert str(told.calls[0]).split(maxsplit=2)[1:] == ["aten", compiling.COMPILING]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_has_workers_of_its_own(workers):
    with override(compile="background"):
        add(5)
        child = os.fork()
        if child == 0:
            add(5)
            os._exit(0 if len(workers) == 2 and len(workers[1].jobs) == 1 else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(workers) == 1


def test_threads_ask_once(workers):
    def work():
        for _ in range(20):
            add(5)

    with override(compile="background"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    (made,) = workers
    assert len(made.jobs) == 1


class _Kernel:
    def __init__(self, loaded):
        self._loaded = loaded

    def _init_handles(self):
        self._loaded.append(torch.cuda.current_device())


@pytest.fixture
def loaded(workers, monkeypatch):
    """What a warm-up has loaded, by device."""
    found, current = [], [0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *raised):
            current.pop()

    class Instant(workers_kind(workers)):
        def submit(self, job):
            self.on_done(job, "")

        def close(self):
            pass

    monkeypatch.setattr(warmup, "CompileWorkers", Instant)
    monkeypatch.setattr(warmup, "device_info", lambda device: Served(torch.device("cpu")).info)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(KernelJob, "compile", lambda self: _Kernel(found))
    return found


def workers_kind(made):
    return type("Kind", (Workers,), {"made": made})


def test_warm_up_compiles_what_a_function_needs_and_runs_it_once(workers, loaded):
    calls = []

    def function(x, *, twice):
        calls.append(twice)
        y = torch.add(x, x)
        return torch.add(y, y).double().add(x.double())

    x = torch.ones(5)
    with plait.use("add", device="cpu"), plait.report() as counted:
        warmed = plait.warmup(function, x, twice=True)
    assert calls == [True]
    assert torch.equal(warmed.result, torch.full((5,), 5.0, dtype=torch.float64))  # by ATen
    assert warmed.kernels == len(loaded) == 2
    assert counted.fallbacks == {compiling.COLLECTED: 3}
    with override(compile="background"):
        assert add(9) == "plait"  # loaded already
    assert not any(made.jobs for made in workers)


def test_warm_up_of_a_function_that_fails(workers, loaded):
    with pytest.raises(ZeroDivisionError), plait.use("add", device="cpu"):
        plait.warmup(lambda: torch.add(torch.ones(5), torch.ones(5)) / (1 // 0))
    assert not loaded
    assert add(5) == "plait"  # nothing is collected any more


def test_warm_up_with_nothing_on_does_nothing(workers, loaded):
    assert plait.warmup(torch.add, torch.ones(5), 1).kernels == 0
    assert not loaded


def test_calls_of_the_cpu_wait_for_nothing():
    call = Call(torch.device("cpu"))
    with override(compile="background"), compiling.collecting() as jobs:
        assert compiling.postponed(call) == ""
    assert not jobs
