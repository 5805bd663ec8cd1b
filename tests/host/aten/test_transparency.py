"""Under an override of every target, PyTorch's operator database gives what plain PyTorch gives.

All of `targets()` are registered and on, with no operator behind them: every call goes through the
gate, is counted, and falls back. Set OPINFO_SAMPLES=1000 for all there are.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

from plait.ops.aten import gate, registration, report, spec, targets
from tests.host.aten import opinfo

SAMPLES = int(os.environ.get("OPINFO_SAMPLES", "20"))
CHUNKS = 24


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    # The whole function formats a traceback for every kind of GPU: half of the time, and the
    # database seeds often. What it does on the CPU is this.
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    # And for every sample it reads the source of all callers, to find a test of PyTorch's own.
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None, raising=False)
    always, threads = torch.is_warn_always_enabled(), torch.get_num_threads()
    torch.set_warn_always(True)  # else a warning belongs to whoever calls first
    torch.set_num_threads(1)
    with spec.only():  # the operators that ship round otherwise than ATen: only the way is tested
        yield
        registration.uninstall()
    torch.set_warn_always(always)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # the database uses what is deprecated
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_sample_is_the_same_to_the_bit(chunk):
    entries = opinfo.entries()[chunk::CHUNKS]
    plain = [each for entry in entries for each in opinfo.records(entry, SAMPLES)]

    registration.install(targets.targets(), "CPU")
    gate.turn(frozenset(targets.targets()), frozenset())
    with report.report() as counted:
        overridden = [each for entry in entries for each in opinfo.records(entry, SAMPLES)]

    assert len({row.key for row in counted.rows}) > 50
    assert len(plain) == len(overridden)
    different = [(a, b) for a, b in zip(plain, overridden, strict=True) if a != b]
    assert not different, "\n".join(
        f"{a[:4]}\n  plain {a[4]}\n  over  {b[4]}" for a, b in different
    )


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_difference_would_show():
    """The comparison notices an override that is off by one unit in the last place."""
    (entry,) = [each for each in opinfo.entries() if opinfo.title(each) == "exp"]
    plain = opinfo.records(entry, 2)
    library = torch.library.Library("aten", "IMPL")
    original = torch.library.get_kernel("aten::exp", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def off(x):
        found = original.call_boxed(keys, x)
        return torch.nextafter(found, found + 1) if found.dtype == torch.float32 else found

    library.impl("exp", off, "CPU")
    try:
        assert opinfo.records(entry, 2) != plain
    finally:
        library._destroy()
    assert opinfo.records(entry, 2) == plain
