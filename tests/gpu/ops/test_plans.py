"""Launch plans on a GPU: graphs, streams, threads, profilers, background compilation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import triton

import plait
from plait.ops.aten import compiling, registration
from plait.settings import override
from plait.testing.compare import assert_close_to_fp64

KEYS = ("sum", "_softmax", "native_layer_norm")


@pytest.fixture(autouse=True)
def _overridden(device):
    with plait.use(KEYS, device=device):
        yield
    registration.uninstall()


def served(function: Callable[[], object]) -> tuple[int, dict[str, int]]:
    """Calls that plait served in a function, and fallbacks by reason."""
    with plait.report() as counted:
        function()
    return counted.served, counted.fallbacks


def check_sum(x: torch.Tensor, got: torch.Tensor) -> None:
    with plait.use((), "*"):
        assert_close_to_fp64(got, x.double().sum(-1), x.sum(-1), plain_error_share=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_planned_calls_compute_on_their_own_tensors(device, dtype):
    for turn in range(6):
        x = torch.randn(37, 1001, device=device, dtype=dtype)
        assert served(lambda x=x: check_sum(x, x.sum(-1)))[0] == 1, turn
    keep = [torch.randn(8, 64, device=device, dtype=dtype) for _ in range(50)]
    got = [each.sum(-1) for each in keep]
    for x, each in zip(keep, got, strict=True):
        check_sum(x, each)


def test_out_in_place_and_aliasing(device):
    x = torch.randn(16, 128, device=device)
    out = torch.empty(16, device=device)
    for _ in range(3):
        assert torch.sum(x, -1, out=out) is out
        check_sum(x, out)
        again = torch.empty(0, device=device)
        torch.sum(x, -1, out=again)  # resized: ATen's
        check_sum(x, again)
    w = torch.randn(128, device=device)
    b = torch.randn(128, device=device)
    with plait.use((), "*"):
        expected = torch.nn.functional.layer_norm(x, (128,), w, b)
    torch.nn.functional.layer_norm(x, (128,), w, w)  # one tensor in two places
    got = torch.nn.functional.layer_norm(x, (128,), w, b)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_other_addresses_modulo_16(device):
    base = torch.randn(8 * 1024 + 8, device=device)
    for turn in range(3):
        for offset in range(5):
            x = base[offset : offset + 8 * 1024].view(8, 1024)
            check_sum(x, x.sum(-1))
            assert served(lambda x=x: x.sum(-1)) == (1, {}), (turn, offset)


def test_graph_capture_and_replay(device):
    x = torch.randn(64, 4096, device=device)
    many = torch.randn(4, 2**20, device=device)  # several blocks a row: scratch memory

    def function():
        return x.sum(-1), torch.softmax(x, -1), many.sum(-1)

    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = function()
    for _ in range(20):
        x.normal_()
        many.normal_()
        graph.replay()
        expected = function()
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
    check_sum(x, got[0])


def test_side_streams(device):
    """The launch goes to the current stream: behind what that stream has to do before."""
    x = torch.zeros(64, 4096, device=device)
    x.sum(-1)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    for turn in range(1, 20):
        stream = streams[turn % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            x.fill_(turn)
            got = x.sum(-1)
        torch.cuda.current_stream().wait_stream(stream)
        assert got.eq(4096 * turn).all()


def test_threads(device):
    wrong, turns = [], 60

    def work(number):
        stream = torch.cuda.Stream(device)
        with plait.use(KEYS, device=device), torch.cuda.stream(stream):
            for turn in range(turns):
                size = 33 + (turn * 7 + number) % 12
                x = torch.randn(5, size, device=device)
                got = x.sum(-1)
                with plait.use((), "*"):
                    expected = x.double().sum(-1)
                if not torch.allclose(got.double(), expected, atol=1e-4):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    count, _ = served(lambda: [*map(threading.Thread.start, threads), *(t.join() for t in threads)])
    assert not wrong
    assert count == 6 * turns


def test_backward_threads_use_plans(device):
    x = torch.randn(32, 257, device=device, requires_grad=True)
    with plait.use(("_softmax_backward_data",), device=device):

        def step():
            torch.softmax(x, -1).square().sum().backward()

        step()
        count, fallbacks = served(step)
    assert count >= 3
    assert not fallbacks
    with plait.use((), "*"):
        y = x.detach().clone().requires_grad_()
        for _ in range(2):
            torch.softmax(y, -1).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_a_profiler_hears_of_planned_launches(device):
    x = torch.randn(8, 64, device=device)
    x.sum(-1)
    heard = []
    hook = lambda metadata: heard.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        check_sum(x, x.sum(-1))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert heard
    x.sum(-1)


def test_several_gpus(device):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    other = torch.device(device.type, 1)
    for _ in range(3):
        x = torch.randn(5, 100, device=other)
        check_sum(x, x.sum(-1))
        y = torch.randn(5, 100, device=device)
        check_sum(y, y.sum(-1))


@pytest.mark.timeout(120)
def test_background_compilation(device, tmp_path, monkeypatch):
    """ATen serves until the kernel is there; then plait does. No call takes long."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.randn(3, 7, 11, 13, device=device, dtype=torch.float16).permute(3, 1, 0, 2)
    longest, reasons, end = 0.0, set(), time.monotonic() + 100
    with override(compile="background"):
        while time.monotonic() < end:
            start = time.monotonic()
            count, fallbacks = served(lambda: x.sum((1, 3)))
            longest = max(longest, time.monotonic() - start)
            reasons |= set(fallbacks)
            if count:
                break
            time.sleep(0.01)
    print(f"\nlongest call {longest * 1e3:.1f} ms, reasons {sorted(reasons)}")
    assert count == 1
    assert reasons == {compiling.COMPILING}
    assert longest < 0.5


@pytest.mark.timeout(200)
def test_warm_up_leaves_nothing_to_compile(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.randn(3, 5, 7, 1000, device=device, dtype=torch.float16, requires_grad=True)

    def step():
        return torch.softmax(x.transpose(1, 2), 1).sum((0, 3)).sum()

    start = time.monotonic()
    warmed = plait.warmup(step)
    took = time.monotonic() - start
    start = time.monotonic()
    count, fallbacks = served(lambda: step().item())
    first = time.monotonic() - start
    print(f"\n{warmed.kernels} kernels in {took:.1f} s; the first step took {first * 1e3:.1f} ms")
    assert warmed.kernels > 0
    assert count >= 3
    assert not fallbacks
    assert first < 0.5
    torch.testing.assert_close(step(), warmed.result, rtol=1e-2, atol=1e-2)
