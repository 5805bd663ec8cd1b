"""What operators of plait launch for ATen's calls compiles for a GPU of sm_90, without one.

The samples of PyTorch's operator database and the calls of compile_cases.py are run with every
operator recording what it would launch on an H200. Of the distinct compiled kernels a few of each
operator and kernel are compiled; COMPILE_CLASSES=1000 takes all, which takes an hour.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

import plait
from plait.ops.aten import dispatch, registration, spec
from plait.ops.engine.signature import Schema
from plait.testing.compile_sm90 import compile_for, kernel_class
from tests.host.aten import opinfo
from tests.host.ops import compile_cases
from tests.opinfo_harness import quick
from tests.recorded_launches import recorded

CLASSES = int(os.environ.get("COMPILE_CLASSES", "2"))  # of each operator and kernel
SAMPLES = {torch.float32: 4, torch.bfloat16: 2, torch.int64: 2}  # of each entry
CHUNKS = 8
MAX_SPILL_BYTES = 0  # of a thread
# On a GPU these leave to ATen whatever cuDNN's backward may have to do with.
NOT_ON_A_GPU = {"batch_norm_backward_with_reserve", "batch_norm_with_update"}


@pytest.fixture(scope="module")
def launches():
    """An operator and one of its launches each, of distinct kernels."""
    spec.load_catalog()
    device = torch.device("cpu")
    with quick(device), plait.use(sorted(spec.served()), device=device):
        with recorded(by_aten=False) as found:
            for dtype in (torch.bfloat16, torch.float32):
                for call in compile_cases.large(dtype):
                    opinfo.outcome(lambda call=call: call().sum().backward())
                for key, args in compile_cases.direct(dtype):
                    _record(key, args)
        with recorded(by_aten=True) as small:
            for info in opinfo.entries():
                for dtype, count in SAMPLES.items():
                    if dtype in info.supported_dtypes(device.type):
                        _run(info, dtype, count, device)
    registration.uninstall()
    for operator, each in small.items():
        found.setdefault(operator, []).extend(each)
    operators = {spec.find(key).name for key in spec.served()}
    missed = sorted(operators - found.keys() - NOT_ON_A_GPU)
    assert not missed, f"no sample reaches {missed}: add calls to compile_cases.py"
    return _distinct(found)


def _record(key, args):
    if key not in spec.served():
        return
    packet, _, name = key.partition(".")
    schema = Schema(getattr(getattr(torch.ops.aten, packet), name or "default"))
    dispatch.compute(spec.find(key), schema, schema.bind(args, {}))


def _run(info, dtype, count, device):
    opinfo.seed_all(0)
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes(device.type)
    samples = info.sample_inputs(device.type, dtype, requires_grad=grad)
    run = opinfo.run_backward if grad else opinfo.run_forward
    for sample in opinfo.spread(samples, count):
        opinfo.outcome(lambda sample=sample: run(info, sample))


def _distinct(launches):
    """Of each operator and kernel the classes at both ends of what was recorded come first."""
    found = {}
    for operator, each in sorted(launches.items()):
        counts = Counter()
        for launch in _from_both_ends(each):
            kernel = launch.kernel.fn.__name__
            if counts[kernel] == CLASSES:
                continue
            name = kernel_class(launch.kernel, launch.args, **launch.options)
            if name not in found:
                counts[kernel] += 1
                found[name] = (operator, launch)
    return list(found.values())


def _from_both_ends(each):
    half = (len(each) + 1) // 2
    mixed = zip(each[:half], reversed(each[len(each) - half :]), strict=True)
    return [launch for pair in mixed for launch in pair]


@pytest.mark.newest_triton
@pytest.mark.filterwarnings("ignore")  # the database uses what is deprecated
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_launches_compile_without_spills(launches, chunk):
    spilled = {}
    for operator, launch in launches[chunk::CHUNKS]:
        compiled = compile_for(launch.kernel, launch.args, **launch.options)
        if compiled.spill_bytes > MAX_SPILL_BYTES:
            spilled[operator, launch.kernel.fn.__name__] = compiled.spill_bytes
    assert not spilled
