"""Prepared programs and planned calls on a GPU, eager and in graphs; kernels that wait give up."""

import faulthandler
import threading

import pytest
import torch
import triton
import triton.language as tl

import plait
from plait.backends.commands import Copy, Launch, Program, Signal, StreamWait
from plait.backends.nvidia.driver import find_driver
from plait.backends.nvidia.executor import CudaExecutor
from plait.runtime.prepared import PreparedProgram
from plait.settings import override
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

ROWS, COLS = 96, 64


@pytest.fixture(autouse=True)
def watchdog():
    """A hang prints every stack and ends the process; waits give up long before."""
    if find_driver() is None:
        pytest.skip("cuda.bindings is not installed")
    faulthandler.dump_traceback_later(100, exit=True)
    with override(deadline_s=5.0):
        yield
    faulthandler.cancel_dump_traceback_later()


@triton.jit
def _advance_kernel(epoch_ptr, mirror_ptr):
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    tl.store(mirror_ptr, epoch)


@triton.jit
def _consume_kernel(
    epoch_ptr, word_ptr, buffer_ptr, out_ptr, tail_ptr, num_elements, BLOCK: tl.constexpr
):
    """out = 2 * buffer once the word has reached the epoch, -1 where it never does."""
    epoch = tl.load(epoch_ptr)
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    tries = 0
    while (seen < epoch) & (tries < 2000000):
        seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
        tries += 1
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    value = tl.load(buffer_ptr + offsets, mask=mask)
    value = tl.where(seen >= epoch, 2 * value, -1.0)
    tl.store(out_ptr + offsets, value, mask=mask)
    tl.store(tail_ptr, tl.load(tail_ptr) + 1, mask=tl.program_id(0) == 0)


class _Exchange:
    """x goes by copy engine into a buffer on `comm`; a kernel on `main` waits for the signal."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device())
        self.buffer = torch.full((ROWS, COLS), float("nan"), device=device)
        self.corner = torch.full((ROWS, 9), float("nan"), device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.word = torch.zeros(1, dtype=torch.int32, device=device)
        self.mirror = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.executor = CudaExecutor(self.device)

    def tensors(self, value: float) -> dict[str, torch.Tensor]:
        x = torch.arange(ROWS * COLS, device=self.device).view(ROWS, COLS) + value
        out = torch.full((ROWS + 1, COLS), float("nan"), device=self.device)
        return {"x": x, "out": out, "corner": torch.zeros(ROWS, 7, device=self.device)}

    def program(self, x: torch.Tensor, out: torch.Tensor, corner: torch.Tensor) -> Program:
        half, ordered = ROWS // 2, {"epoch_ptr": self.epoch}
        consume = {
            **ordered,
            "word_ptr": self.word,
            "buffer_ptr": self.buffer,
            "out_ptr": out,
            "tail_ptr": out[ROWS, 1:],
            "num_elements": ROWS * COLS,
            "BLOCK": 1024,
        }
        return Program(
            "exchange"
        ).add(
            Launch(_advance_kernel, 1, {**ordered, "mirror_ptr": self.mirror}, num_warps=1),
            StreamWait("comm", on="main"),
            Copy(self.buffer[:half], x[:half]),
            Copy(self.buffer[half:], x[half:]),
            Copy(self.corner[:, 2:], x[:, 3:10]),  # rows with pitches of no round number of bytes
            Signal(self.word, self.mirror),
            Launch(_consume_kernel, triton.cdiv(ROWS * COLS, 1024), consume),
            StreamWait("main", on="comm"),
            Copy(corner, self.corner[:, 2:], "main"),
        )

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        assert_bitwise(tensors["out"][:ROWS], 2 * tensors["x"])
        assert_bitwise(tensors["corner"], tensors["x"][:, 3:10].contiguous())


def test_eager_with_new_tensors(device: torch.device):
    exchange = _Exchange(device)
    first = exchange.tensors(0.5)
    prepared = PreparedProgram(exchange.program(**first), first, exchange.executor)
    side = torch.cuda.Stream()
    for value in (1.0, 2.0, 3.0):
        tensors = exchange.tensors(value)
        tensors["out"][ROWS] = 0
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if value == 2.0 else None):
            prepared.run(tensors)
            prepared.run(tensors)
        torch.cuda.synchronize()
        exchange.check(tensors)
        assert tensors["out"][ROWS, 1].item() == 2
    assert first["out"].isnan().all()
    assert exchange.word.item() == exchange.epoch.item() == exchange.mirror.item() == 6


def test_in_a_graph_between_eager_runs(device: torch.device):
    exchange = _Exchange(device)
    tensors = exchange.tensors(0.0)
    prepared = PreparedProgram(exchange.program(**tensors), tensors, exchange.executor)
    prepared.run(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run(tensors)
        prepared.run(tensors)
    for replay in range(20):
        tensors["x"].copy_(exchange.tensors(float(replay))["x"])
        tensors["out"].fill_(float("nan"))
        graph.replay()
        exchange.check(tensors)
        if replay % 5 == 0:
            other = exchange.tensors(100.0 + replay)
            prepared.run(other)
            exchange.check(other)
    torch.cuda.synchronize()
    assert exchange.epoch.item() == exchange.word.item() == 1 + 2 * 20 + 4


def test_same_values_as_the_ordinary_way(device: torch.device):
    exchange = _Exchange(device)
    first, second = exchange.tensors(1.0), exchange.tensors(1.0)
    exchange.executor.run(exchange.program(**first))
    PreparedProgram(exchange.program(**second), second, exchange.executor).run(second)
    torch.cuda.synchronize()
    exchange.check(first)
    for name in ("out", "corner"):
        assert_bitwise(first[name][:ROWS], second[name][:ROWS])


def test_in_a_thread_that_never_used_the_device(device: torch.device):
    exchange = _Exchange(device)
    tensors = exchange.tensors(4.0)
    prepared = PreparedProgram(exchange.program(**tensors), tensors, exchange.executor)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            prepared.run(tensors)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors, errors
    exchange.check(tensors)


# --- planned calls, with one rank: nobody to wait for, all the same kernels
OPERATORS = {
    "ag_gemm": lambda x, w, b, group: plait.ag_gemm(x, w, b, group=group, impl="fused"),
    "gemm_rs": lambda x, w, b, group: plait.gemm_rs(x, w, b, group=group, impl="fused"),
    "gemm_ar": lambda x, w, b, group: plait.gemm_ar(x, w, b, group=group, impl="fused"),
}


def _operands(device: torch.device, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, w = torch.randn(rows, 128, device=device), torch.randn(256, 128, device=device)
    return x.to(dtype), w.to(dtype), torch.randn(256, device=device).to(dtype)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [300, 20])
def test_planned_calls(operator: str, dtype: torch.dtype, rows: int, device: torch.device):
    group = plait.Group.emulated(1, link="paced:360", device=device)
    try:
        for _ in range(8):  # the regions grow, then each gets a plan, then calls are planned
            x, w, b = _operands(device, rows, dtype)
            out = OPERATORS[operator](x, w, b, group)
            exact = x.double() @ w.double().t() + b.double()
            plain = torch.nn.functional.linear(x, w, b)
            assert_close_to_fp64(out.cpu(), exact.cpu(), plain.cpu())
        assert plait.last_run().detail == "planned"
        with override(prologue_delay_us=1.0):  # never planned
            assert_bitwise(OPERATORS[operator](x, w, b, group), out)
            assert plait.last_run().detail == ""
        group.synchronize()
    finally:
        group.close()


@pytest.mark.parametrize("operator", OPERATORS)
def test_planned_calls_in_a_graph(operator: str, device: torch.device):
    group = plait.Group.emulated(1, link="paced:360", device=device)
    call = OPERATORS[operator]
    try:
        x, w, b = _operands(device, 300, torch.bfloat16)
        for _ in range(6):
            call(x, w, b, group)
        assert plait.last_run().detail == "planned"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call(x, w, b, group) for _ in range(3)]
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            eager = call(x, w, b, group)
            for out in outs:
                assert_bitwise(out, eager)
        group.synchronize()
    finally:
        group.close()


def test_a_profiler_sees_planned_launches(device: torch.device):
    group = plait.Group.emulated(1, link="paced:360", device=device)
    seen: list[str] = []

    def hook(metadata) -> None:
        seen.append(metadata.get()["name"])

    try:
        x, w, b = _operands(device, 300, torch.bfloat16)
        for _ in range(6):
            out = plait.gemm_ar(x, w, b, group=group)
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            again = plait.gemm_ar(x, w, b, group=group)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        assert_bitwise(out, again)
        assert any("gemm_ar" in name for name in seen)
        assert plait.last_run().detail == ""
    finally:
        group.close()


def test_plans_hold_no_tensors_of_calls(device: torch.device):
    group = plait.Group.emulated(1, link="paced:360", device=device)
    try:
        x, w, b = _operands(device, 4096, torch.bfloat16)
        group.workspace.take(64 << 20)
        group.workspace.take(64 << 20)
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            plait.ag_gemm(x, w, b, group=group)
        assert plait.last_run().detail == "planned"
        group.synchronize()
        # Results would be 2 MiB each; tables and the like are a few KiB.
        assert torch.cuda.memory_allocated() - before < 1 << 19
    finally:
        group.close()
