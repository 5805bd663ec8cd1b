"""One live rank with emulated peers: right for known contents of the peers' memory, and paced."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator

import pytest
import torch

import plait
from plait.collectives.segments import padded_rows
from plait.settings import override
from plait.symm.workspace import NUM_REGIONS
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from tests.gpu.emulated_peers import fill_slots

WORLD = 4
LINKS = ("paced:360", "paced:100+traffic", "pcie")
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A hang prints every stack and ends the process; waits give up long before."""
    faulthandler.dump_traceback_later(100, exit=True)
    with override(deadline_s=5.0):
        yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=LINKS)
def group(request: pytest.FixtureRequest, device: torch.device) -> Iterator[plait.Group]:
    made = plait.Group.emulated(WORLD, link=request.param, device=device)
    yield made
    made.close()


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(DTYPE)


def check_rounds(
    group: plait.Group,
    call: Callable[[], torch.Tensor],
    x: torch.Tensor,
    check: Callable[[torch.Tensor], None],
) -> None:
    """Three eager rounds and 20 replays of a graph, each with another `x`, and an eager call."""
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        check(call())
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        out.zero_()
        graph.replay()
        check(out)
    group.synchronize()
    check(call())
    group.synchronize()


def test_one_sm_is_the_pacers(group: plait.Group, device: torch.device) -> None:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert group.executor.num_sms == sms - 1


def test_barrier(group: plait.Group) -> None:
    for _ in range(3):
        group.barrier()
    group.synchronize()


def test_all_gather(group: plait.Group, device: torch.device) -> None:
    rows, features = 300, 256
    x = randn(rows, features, device=device)
    parts = [randn(rows, features, device=device) for _ in range(WORLD)]
    for _ in range(2):
        plait.all_gather(x, group=group)
    fill_slots(group, parts, padded_rows(rows))

    def check(out: torch.Tensor) -> None:
        assert_bitwise(out, torch.cat([x, *parts[1:]]))

    check_rounds(group, lambda: plait.all_gather(x, group=group), x, check)


def test_ag_gemm(group: plait.Group, device: torch.device) -> None:
    rows, features, cols = 256, 512, 640
    x, weight = randn(rows, features, device=device), randn(cols, features, device=device)
    parts = [randn(rows, features, device=device) for _ in range(WORLD)]

    def call() -> torch.Tensor:
        return plait.ag_gemm(x, weight, group=group, impl="fused")

    for _ in range(2):
        call()
    fill_slots(group, parts, padded_rows(rows))

    def check(out: torch.Tensor) -> None:
        whole = torch.cat([x, *parts[1:]])
        assert_close_to_fp64(out, whole.double() @ weight.double().t(), whole @ weight.t())

    check_rounds(group, call, x, check)


@pytest.mark.parametrize("algorithm", ["direct", "staged"])
def test_gemm_rs(group: plait.Group, device: torch.device, algorithm: str) -> None:
    rows, features, cols = 256, 512, 640
    x, weight = randn(rows * WORLD, features, device=device), randn(cols, features, device=device)
    parts = [randn(rows, cols, device=device) for _ in range(WORLD)]

    def call() -> torch.Tensor:
        return plait.gemm_rs(x, weight, group=group, impl="fused", algorithm=algorithm)

    for _ in range(2):
        call()
    fill_slots(group, parts, rows)

    def check(out: torch.Tensor) -> None:
        own = x[:rows]
        others = torch.stack(parts[1:])
        exact = own.double() @ weight.double().t() + others.double().sum(0)
        plain = (own @ weight.t()).float() + others.float().sum(0)
        assert_close_to_fp64(out, exact, plain.to(DTYPE))

    check_rounds(group, call, x, check)


@pytest.mark.parametrize(("rows", "algorithm"), [(16, "one_shot"), (512, "two_shot")])
def test_gemm_ar_ends(group: plait.Group, device: torch.device, rows: int, algorithm: str) -> None:
    """The values of the peers' tiles are whatever lies there: only the protocol is checked."""
    x, weight = randn(rows, 256, device=device), randn(640, 256, device=device)

    def call() -> torch.Tensor:
        return plait.gemm_ar(x, weight, group=group, algorithm=algorithm, impl="fused")

    call()
    call()
    check_rounds(group, call, x, lambda out: None)


def test_backward_ends(group: plait.Group, device: torch.device) -> None:
    x = randn(256, 512, device=device).requires_grad_()
    weight = randn(640, 512, device=device).requires_grad_()
    for _ in range(3):
        plait.ag_gemm(x, weight, group=group, impl="fused").sum().backward()
    group.synchronize()


# --- time
def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a replay of `call` as a graph; `call` ran before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(11):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def both_ways_ms(nbytes: int, device: torch.device) -> float:
    """Time of copying so many bytes from pinned memory and as many back, at once."""
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    other = torch.cuda.Stream(device)

    def call() -> None:
        main = torch.cuda.current_stream(device)
        other.wait_stream(main)
        with torch.cuda.stream(other):
            there[0].copy_(here[0], non_blocking=True)
        here[1].copy_(there[1], non_blocking=True)
        main.wait_stream(other)

    call()
    return milliseconds(call)


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="it takes time, and other workers use the link and the GPU meanwhile",
)
@pytest.mark.parametrize("link", ["paced:100", "paced:360", "paced:100@200", "pcie"])
@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])
def test_communication_alone_takes_the_links_time(
    link: str, operator: str, device: torch.device
) -> None:
    """24 MiB come in: as pushed chunks, or tile by tile."""
    rows, width = 1024, 4096
    group = plait.Group.emulated(WORLD, link=link, device=device)
    if operator == "ag_gemm":
        x, weight = randn(rows, width, device=device), randn(256, width, device=device)
    else:
        x, weight = randn(rows * WORLD, 256, device=device), randn(width, 256, device=device)

    def call() -> torch.Tensor:
        return getattr(plait, operator)(x, weight, group=group, impl="fused")

    def alone() -> torch.Tensor:
        with group.executor.communication_only():
            return call()

    for each in (call, alone):
        for _ in range(NUM_REGIONS):
            each()
    group.synchronize()
    nbytes = (WORLD - 1) * rows * width * DTYPE.itemsize
    rate, latency_us = {"paced:360": (360, 3), "pcie": (55, 3)}.get(link, (100, 3))
    if "@" in link:
        latency_us = 200
    expected_ms = nbytes / rate / 1e6 + latency_us / 1e3
    slack = 1.0
    if link == "pcie":  # a real link, as it is here
        expected_ms, slack = both_ways_ms(nbytes, device), 1.25
    time, overlapped = milliseconds(alone), milliseconds(call)
    group.close()
    assert expected_ms / slack - 0.002 <= time <= expected_ms * slack + 0.030
    assert overlapped >= 0.95 * time - 0.010
