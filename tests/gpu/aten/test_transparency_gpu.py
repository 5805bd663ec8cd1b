"""On a GPU, too, an override of every target gives what plain PyTorch gives, to the bit.

`pytest -n 12 tests/gpu/aten` shards over processes. OPINFO_SAMPLES limits the samples of each
entry, dtype and kind; 0 takes all. Operators of PyTorch that differ from run to run by themselves
(atomic adds) are found by running them again without overrides, and printed.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

from plait.ops.aten import gate, registration, report, spec, targets
from tests.aten_stress import run_stress
from tests.host.aten import opinfo

SAMPLES = int(os.environ.get("OPINFO_SAMPLES", "0")) or None
CHUNKS = 48
AGAIN = 6  # plain runs that tell whether PyTorch itself repeats its result
STRESS_SECONDS = float(os.environ.get("STRESS_SECONDS", "60"))


@pytest.fixture(autouse=True)
def _alone(monkeypatch, device):
    # The whole function formats a traceback for every kind of GPU, and is called for every sample.
    torch.cuda.init()

    def seed(number):
        torch.cuda.default_generators[0].manual_seed(number)
        return torch.default_generator.manual_seed(number)

    monkeypatch.setattr(torch, "manual_seed", seed)
    # And for every sample PyTorch reads the source of all callers, to find a test of its own.
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None, raising=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a warning belongs to whoever calls first
    with spec.only():
        yield
        registration.uninstall()
    torch.set_warn_always(always)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the database uses what is deprecated
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_sample_is_the_same_to_the_bit(chunk, device):
    entries = opinfo.entries()[chunk::CHUNKS]
    plain = {opinfo.title(each): opinfo.records(each, SAMPLES, device.type) for each in entries}
    torch.cuda.synchronize()

    refused = registration.install(targets.targets(), registration.dispatch_key_of(device))
    gate.turn(frozenset(targets.targets()), frozenset())
    with report.report() as counted:
        over = {opinfo.title(each): opinfo.records(each, SAMPLES, device.type) for each in entries}
        torch.cuda.synchronize()
    registration.uninstall()
    assert len(refused) < len(targets.targets()) / 10, refused
    assert len({row.key for row in counted.rows}) > 20

    different, unstable, total = [], [], 0
    for entry in entries:
        before, after = plain[opinfo.title(entry)], over[opinfo.title(entry)]
        assert [each[:4] for each in before] == [each[:4] for each in after]
        total += len(before)
        places = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if places:
            alone = [opinfo.records(entry, SAMPLES, device.type) for _ in range(AGAIN)]
            for i in places:
                seen = [before[i], *(each[i] for each in alone)]
                varies = any(each != before[i] for each in seen)
                (unstable if varies else different).append((before[i], after[i]))
    print(f"\n{total} records, {sum(row.calls for row in counted.rows)} overridden calls")
    for a, _ in unstable:
        print(f"  differs from run to run by itself: {a[:4]}")
    assert not different, "\n".join(
        f"{a[:4]}\n  plain {str(a[4])[:1500]}\n  over  {str(b[4])[:1500]}" for a, b in different
    )
    assert len(unstable) <= max(2, total // 20)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["bitwise", "shipped"])
def test_threads_compute_while_one_flips(kind, device):
    print(run_stress(STRESS_SECONDS, device, kind))
