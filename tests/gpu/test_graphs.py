"""CUDA graphs of operators: thousands of replays between eager calls, and public bug cases.

Emulated peers send what lies in their memory, so it is filled first; all data are whole numbers
whose sums are exact. The same with real peers: `d04` to `d07` of tests/rank_cases.py, which
test_processes.py runs.
"""

from __future__ import annotations

import faulthandler
import random
from collections.abc import Callable, Iterator

import pytest
import torch

import plait
from plait.collectives.segments import padded_rows
from plait.errors import CapacityError
from plait.ops.matmul.configs import Config
from plait.settings import override
from plait.testing.compare import assert_bitwise
from tests.gpu.emulated_peers import fill_slots
from tests.rank_cases import (
    BF16,
    Replay,
    Tally,
    overwrite_free_memory,
    random_base,
    whole_numbers,
)

NUM_REPLAYS = 1000
WORLD = 4
LINKS = ("paced:360", "pcie")
# A slot of a region is [ROWS, WIDTH] for every operator here, so that all find the same in it.
ROWS, WIDTH, FEATURES, COLS = 128, 256, 128, 192


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A hang prints every stack and ends the process; waits give up long before."""
    faulthandler.dump_traceback_later(200, exit=True)
    with override(deadline_s=5.0):
        yield
    faulthandler.cancel_dump_traceback_later()


class LiveRank:
    """Rank 0 of an emulated group, its inputs, its calls, and what they must give."""

    def __init__(self, world_size: int, link: str, device: torch.device) -> None:
        self.group = group = plait.Group.emulated(world_size, link=link, device=device)
        self.tally = Tally(device)
        shapes = {
            "x": (ROWS, WIDTH),  # gathered
            "weight": (COLS, WIDTH),
            "y": (world_size * ROWS, FEATURES),  # summed over ranks after a product
            "other": (WIDTH, FEATURES),
            "parts": (world_size, ROWS, WIDTH),  # what comes from each rank
        }
        self._bases = {
            name: random_base(*shape, seed=seed, device=device)
            for seed, (name, shape) in enumerate(shapes.items())
        }
        self.tensors = {name: whole_numbers(base, 0).to(BF16) for name, base in self._bases.items()}
        self.parts = self.tensors["parts"]
        x, weight, y, other = (self.tensors[name] for name in ("x", "weight", "y", "other"))
        fused = {"group": group, "impl": "fused"}
        self.calls: dict[str, Callable[[], torch.Tensor]] = {
            "all_gather": lambda: plait.all_gather(x, **fused),
            "ag_gemm": lambda: plait.ag_gemm(x, weight, **fused),
            "gemm_rs": lambda: plait.gemm_rs(y, other, **fused),
            "gemm_ar": lambda: plait.gemm_ar(y[:ROWS], other, algorithm="one_shot", **fused),
        }

    def change(self, turn: int) -> None:
        """Other inputs, in the same tensors."""
        for name in ("x", "weight", "y", "other"):
            self.tensors[name].copy_(whole_numbers(self._bases[name], turn))

    def expected(self, name: str) -> torch.Tensor:
        """What the call gives for the inputs as they are now."""
        x, weight, y, other = (self.tensors[name].float() for name in ("x", "weight", "y", "other"))
        whole = torch.cat([x, *self.parts[1:].float()])
        if name == "all_gather":
            return whole
        if name == "ag_gemm":
            return whole @ weight.t()
        return y[:ROWS] @ other.t() + self.parts[1:].float().sum(0)

    def run(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Eager calls, or what a graph captures."""
        return [self.calls[name]() for name in names]

    def check(self, turn: int, how: str, names: tuple[str, ...], outs: list[torch.Tensor]) -> None:
        """Note what is wrong, without waiting."""
        for name, out in zip(names, outs, strict=True):
            self.tally.check(f"{how} {name}", turn, out, self.expected(name))

    def warm_up(self, *sequences: tuple[str, ...]) -> None:
        """Call all that is to be captured in both regions, and fill these."""
        for names in (tuple(self.calls), *sequences):
            for extra in ((), tuple(self.calls)[:1], (), tuple(self.calls)[:1]):
                self.run(names + extra)
        self.group.synchronize()
        fill_slots(self.group, list(self.parts), ROWS)

    def done(self) -> None:
        """Raise what was noted, if anything was compared that way."""
        self.group.synchronize()
        if self.tally.compared:
            self.tally.done()
        self.group.close()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("world_size", [1, WORLD])
def test_two_graphs_and_eager_calls(world_size: int, link: str, device: torch.device) -> None:
    """1,000 replays, each with other inputs, of two graphs of several operators; between them
    eager calls of another operator each time, on the same regions."""
    live = LiveRank(world_size, link, device)
    first = ("ag_gemm", "gemm_rs", "gemm_ar", "all_gather")
    second = ("gemm_rs", "gemm_ar", "ag_gemm")  # an odd number: regions change places
    live.warm_up(first, second)
    graphs = {names: Replay(lambda n=names: live.run(n), device) for names in (first, second)}
    for turn in range(NUM_REPLAYS):
        live.change(turn)
        names = second if turn % 3 == 1 else first
        live.check(turn, "replayed", names, graphs[names].replay())
        if turn % 2:
            names = (list(live.calls)[turn // 2 % len(live.calls)],)
            live.check(turn, "eager", names, live.run(names))
        if turn % 100 == 99:
            live.group.synchronize()
    live.done()


@pytest.mark.parametrize("link", LINKS)
def test_one_call_many_replays_in_flight(link: str, device: torch.device) -> None:
    """Replays follow each other at once, without the host or other kernels between them."""
    live = LiveRank(WORLD, link, device)
    live.warm_up()
    graphs = {name: Replay(lambda n=name: live.run((n,)), device) for name in live.calls}
    for turn, name in enumerate(live.calls):
        live.change(turn)
        live.check(turn, "replayed", (name,), graphs[name].replay(NUM_REPLAYS // 4))
    live.done()


# --- public cases
@pytest.mark.parametrize("link", LINKS)
def test_d04_every_replay_uses_the_current_input(link: str, device: torch.device) -> None:
    """meta-pytorch/torchcomms#1177: the expected signal value was baked in at capture, so an old
    signal satisfied the wait of a later replay; mixing eager calls and replays broke the counters.
    AG+GEMM is captured, its input changes in place, 20 replays with eager calls between them."""
    live = LiveRank(WORLD, link, device)
    live.warm_up()
    graph = Replay(lambda: live.run(("ag_gemm",)), device)
    for turn in range(20):
        live.change(turn)
        want = live.expected("ag_gemm").to(BF16)
        assert_bitwise(graph.replay()[0], want, f"replay {turn}")
        if turn % 3 != 1:
            assert_bitwise(live.calls["ag_gemm"](), want, f"eager call after replay {turn}")
    live.done()


@pytest.mark.parametrize("config", [None, Config(16, 64, 128, 4, 4, 8, True, splits=8)], ids=str)
def test_d05_split_k_first_used_inside_capture(config: Config | None, device: torch.device) -> None:
    """ROCm/aiter#4715: the counters of a small-M split-K GEMM were zeroed once, before capture,
    and not again, so replays hung or added up. The first call of M=5 is captured here (M=7 has
    loaded the kernels), and replayed ten times; then an eager call."""
    weight = whole_numbers(random_base(256, 8192, seed=0, device=device), 0).to(BF16)
    xs = whole_numbers(random_base(7, 8192, seed=1, device=device), 0).to(BF16)

    def call(rows: int) -> torch.Tensor:
        return plait.matmul(xs[:rows], weight, impl="fused", config=config)

    want = (xs.float() @ weight.float().t()).to(BF16)
    for _ in range(2):
        assert_bitwise(call(7), want)
    graph = Replay(lambda: [call(5)], device)
    for turn in range(10):
        assert_bitwise(graph.replay()[0], want[:5], f"replay {turn}")
    assert_bitwise(call(5), want[:5])


def test_d05_an_operator_first_used_inside_capture(device: torch.device) -> None:
    """The same report, for operators with peers: a first call would have to allocate under capture.
    It says so at once, and does no harm: the calls that follow are right, eager and captured."""
    live = LiveRank(WORLD, "paced:360", device)
    live.group.barrier()  # the signal words exist, memory for data does not
    live.group.synchronize()
    with pytest.raises(CapacityError, match="before"):
        Replay(lambda: live.run(("gemm_rs",)), device)
    live.warm_up()
    graph = Replay(lambda: live.run(("gemm_rs",)), device)
    want = live.expected("gemm_rs").to(BF16)
    for turn in range(10):
        assert_bitwise(graph.replay()[0], want, f"replay {turn}")
    live.done()


@pytest.mark.parametrize("world_size", [1, WORLD])
def test_d06_dispatch_and_combine_with_new_routing(world_size: int, device: torch.device) -> None:
    """ROCm/mori#86: state was reset by the host, which a replay leaves out, and it hung. Dispatch
    and combine (two exchanges here) are captured and replayed 100 times with another routing.

    Own tokens come back doubled; what the peers send in either direction is `parts`.
    """
    live = LiveRank(world_size, "paced:360", device)
    group, parts = live.group, live.parts
    base = random_base(world_size * ROWS, WIDTH, seed=9, device=device)
    tokens = whole_numbers(base, 0).to(BF16)
    route = torch.arange(len(tokens), device=device)

    def call() -> list[torch.Tensor]:
        arrived = plait.all_to_all(tokens[route], group=group, impl="fused")
        back = plait.all_to_all(arrived * 2, group=group, impl="fused")
        return [arrived, torch.empty_like(back).index_copy(0, route, back)]

    live.warm_up()
    for _ in range(3):
        call()
    fill_slots(group, list(parts), padded_rows(ROWS))
    graph = Replay(call, device)
    for turn in range(100):
        generator = torch.Generator().manual_seed(turn)
        route.copy_(torch.randperm(len(tokens), generator=generator))
        tokens.copy_(whole_numbers(base, turn))
        sent = tokens[route]
        dispatched = torch.cat([sent[:ROWS], *parts[1:]])
        back = torch.cat([sent[:ROWS] * 2, *parts[1:]])
        outs = graph.replay() if turn % 5 else call()
        live.tally.check("dispatch", turn, outs[0], dispatched)
        live.tally.check("combine", turn, outs[1], tokens.index_copy(0, route, back))
    live.done()


@pytest.mark.parametrize("link", LINKS)
def test_d07_graphs_of_several_batch_sizes(link: str, device: torch.device) -> None:
    """deepseek-ai/DeepEP#93: an illegal access where graphs of batch sizes 1, 2, 4 and 8 shared
    one buffer, whose layout moved with each graph's own size. Captured smallest first, replayed in
    mixed order; before the last one (200) the buffer grows, and the others keep theirs."""
    group = plait.Group.emulated(WORLD, link=link, device=device)
    tally = Tally(device)
    weight = whole_numbers(random_base(COLS, WIDTH, seed=1, device=device), 0).to(BF16)
    base = random_base(WORLD, 200, WIDTH, seed=2, device=device)
    parts = whole_numbers(base, 0).to(BF16)
    xs, graphs = {}, {}
    for rows, filled in ((1, 8), (2, 8), (4, 8), (8, 8), (200, 200)):
        x = xs[rows] = torch.zeros(rows, WIDTH, dtype=BF16, device=device)

        def call(x: torch.Tensor = x) -> list[torch.Tensor]:
            return [plait.ag_gemm(x, weight, group=group, impl="fused")]

        for _ in range(4):
            call()
        group.synchronize()
        fill_slots(group, [part[:filled] for part in parts], padded_rows(filled))
        graphs[rows] = Replay(call, device)
    overwrite_free_memory(device)
    order = random.Random(0)
    for turn in range(300):
        rows = order.choice(list(xs))
        xs[rows].copy_(whole_numbers(base[0, :rows], turn))
        whole = torch.cat([xs[rows], *parts[1:, :rows]]).float()
        want = whole @ weight.float().t()
        tally.check(f"replay of {rows} rows", turn, graphs[rows].replay()[0], want)
        if rows == 200:
            out = plait.ag_gemm(xs[rows], weight, group=group, impl="fused")
            tally.check("eager", turn, out, want)
    group.synchronize()
    tally.done()
    group.close()
