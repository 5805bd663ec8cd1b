"""Time stamps of tiles: each tile has one row, in order; without a trace nothing is stamped."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch

import plait
from plait.ops.matmul.configs import Config
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common import plans
from plait.overlap.common.trace import is_tracing
from plait.overlap.common.trace_events import TileEvent, lanes_of, summarize, to_slices
from plait.overlap.common.trace_link import pacer_start_ns
from plait.settings import override
from plait.symm.transports.emulation import FRACTION, Emulation
from plait.symm.transports.link import Link
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual
from tests.host.overlap import ag_gemm_cases, sum_cases
from tests.host.runtime.device_fakes import FakeExecutor, fake_group

OPERATORS = ("ag_gemm", "gemm_rs", "one_shot", "two_shot")
STEPS = {
    "ag_gemm": [("wait", "compute", "store")],
    "gemm_rs": [("compute", "store", "wait", "sum")],
    "one_shot": [("compute", "store"), ("wait", "sum")],
    "two_shot": [("compute", "store", "wait", "sum"), ("wait", "store")],
}
_names = itertools.count()


def make_call(operator, world_size):
    """A call of a rank, with ragged rows (one rank has none) where that is possible."""
    rows = [40, 17, 0][:world_size]
    if operator == "ag_gemm":
        case = ag_gemm_cases.make_case(rows, 16, 150)
        return lambda group: ag_gemm_cases.call(case, group)[0]
    if operator == "gemm_rs":
        case = sum_cases.make_case("gemm_rs", world_size, sum(rows), 16, 150, rows_per_rank=rows)
    else:
        case = sum_cases.make_case("gemm_ar", world_size, 130, 16, 150, algorithm=operator)
    return lambda group: sum_cases.call(case, group, impl="fused")


class Programs:
    """What every rank ran: launches of GEMM kernels, in the order of their coming."""

    def __init__(self):
        self.launches = []

    def __call__(self, program):
        self.launches += [each for each in program.launches() if "gemm" in each.kernel.fn.__name__]
        return program


def run(call, world_size, trace=None, **world):
    """Every rank's result, and the launches."""
    programs = Programs()

    def fn(group):
        with trace or nullcontext():
            return call(group)

    return run_virtual(fn, world_size, rewrite_program=programs, **world), programs.launches


def places_of(launch, operator):
    """(segment, tile) of all tiles of a launch, in any order; pieces count several times."""
    args = launch.args
    pieces = args.get("PIECES", 1)
    num_n = -(-args["N"] // (pieces * args["BLOCK_N"]))
    if operator == "one_shot":
        num_tiles = -(-args["M"] // args["BLOCK_M"]) * num_n
        return [(None, tile) for tile in range(num_tiles)]
    rows = args["table_ptr"].view(4, -1)[0].tolist()
    return [
        (segment, tile)
        for segment, count in enumerate(rows)
        for tile in range(-(-count // args["BLOCK_M"]) * num_n)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_tile_has_one_row_and_its_stamps_are_ordered(operator, world_size):
    call, trace = make_call(operator, world_size), plait.trace()
    plain, untraced = run(call, world_size)
    traced, launches = run(call, world_size, trace)
    for rank, (out, expected) in enumerate(zip(traced, plain, strict=True)):
        assert_bitwise(out, expected, f"traced result of rank {rank}")
    assert not any("trace_ptr" in each.args or "TRACE" in each.args for each in untraced)

    events = trace.events()
    assert {event.rank for event in events} == set(range(world_size))
    places = places_of(launches[0], operator)
    for rank in range(world_size):
        for loop, names in enumerate(STEPS[operator]):
            own = [each for each in events if (each.rank, each.loop) == (rank, loop)]
            found = [(None if operator == "one_shot" else e.segment, e.tile) for e in own]
            assert sorted(found, key=str) == sorted(places, key=str)
            assert [event.index for event in own] == list(range(len(places)))
            for event in own:
                check_event(event, names, operator)


def check_event(event, names, operator):
    is_own = event.segment == event.rank
    only_sent = operator in ("gemm_rs", "two_shot") and event.loop == 0 and not is_own
    assert [name for name, _, _ in event.steps] == list(names[:2] if only_sent else names)
    assert event.sm == event.block  # virtual ranks: every block has an SM of its own
    assert event.start_ns > 0
    for (_, start, end), following in zip(
        event.steps, [*event.steps[1:], ("", event.end_ns, 0)], strict=True
    ):
        assert start <= end == following[1]
    if operator == "ag_gemm":
        _, start, end = event.steps[0]
        assert start == end or not is_own
        assert bool(event.awaits) != is_own


def test_tiles_of_peers_wait_for_the_copy_engine():
    """Which is later than the first tiles; one wait is for all tiles of a chunk."""
    trace = plait.trace()
    run(make_call("ag_gemm", 2), 2, trace)
    for rank in range(2):
        waits = [e.steps[0] for e in trace.events() if e.rank == rank and e.segment != rank]
        assert any(start < end for _, start, end in waits)


def test_blocks_are_busy_with_one_tile_at_a_time():
    trace = plait.trace()
    run(make_call("two_shot", 2), 2, trace)
    blocks = defaultdict(list)
    for event in trace.events():
        blocks[event.rank, event.block].append(event)
    assert len(blocks) > 2
    for own in blocks.values():
        for before, after in itertools.pairwise(sorted(own, key=lambda e: (e.loop, e.index))):
            assert before.end_ns <= after.start_ns


def test_a_last_wave_in_pieces():
    case = ag_gemm_cases.make_case([16, 16, 16], 32, 3 * 128)
    trace = plait.trace()
    with override(cpu_blocks=2):
        _, launches = run(lambda group: ag_gemm_cases.call(case, group)[0], 3, trace)
    assert [each.args["PIECES"] for each in launches[:2]] == [1, 2]
    own = [event for event in trace.events() if event.rank == 1]
    assert [(e.launch, e.index, e.piece) for e in own] == [
        *((0, index, 0) for index in range(8)),
        (1, 8, 0),
        (1, 8, 1),
    ]
    assert sorted((e.segment, e.tile) for e in own if not e.piece) == [
        (segment, tile) for segment in range(3) for tile in range(3)
    ]
    assert trace.summary()[1].waves == 5


def test_several_calls_and_slices_count_up():
    call, trace = make_call("gemm_rs", 2), plait.trace()

    def twice(group):
        call(group)
        return call(group)

    run(twice, 2, trace)
    assert [(each.rank, each.call) for each in trace.summary()] == [(0, 0), (0, 1), (1, 0), (1, 1)]


# --- switching it on


def test_a_trace_is_of_the_thread_that_enters_it():
    call, trace = make_call("ag_gemm", 2), plait.trace()

    def fn(group):
        if group.rank == 0:
            with trace:
                return call(group)
        assert not is_tracing()
        return call(group)

    run_virtual(fn, 2)
    assert {event.rank for event in trace.events()} == {0}
    assert not is_tracing()


def test_the_inner_trace_takes_the_calls():
    call, outer, inner = make_call("gemm_rs", 2), plait.trace(), plait.trace()

    def fn(group):
        with outer:
            with inner:
                call(group)
            assert is_tracing()

    run_virtual(fn, 2)
    assert inner.events()
    assert not outer.events()


def test_a_traced_kernel_is_not_flattened(monkeypatch):
    config = Config(16, 64, 16, 4, 2, 8, True, desc_store=True, flatten=True)
    monkeypatch.setattr(ag_gemm_launch, "choose_config", lambda *args: config)
    case = ag_gemm_cases.make_case([16, 16], 16, 64)
    for trace, flatten in ((None, True), (plait.trace(), False)):
        _, launches = run(lambda group: ag_gemm_cases.call(case, group)[0], 2, trace)
        assert {each.args["FLATTEN"] for each in launches} == {flatten}


@pytest.fixture
def group():
    made = fake_group(3, f"trace {next(_names)}")
    yield made
    made.close()


def test_traced_calls_are_not_planned(group):
    assert plans.available(group)
    x, weight = torch.randn(64, 16), torch.randn(32, 16)
    with plait.trace() as trace:
        assert not plans.available(group)
        for _ in range(3):
            plait.gemm_rs(x[:63], weight, group=group)
    assert len(group.executor.ran) == len(trace.calls) == 3
    assert group.workspace not in plans._caches
    assert trace.events() == []  # nothing ran: rows stay empty
    assert trace.summary() == []


# --- the link


class EmulatingExecutor(FakeExecutor):
    """Adds the peers' part to programs, fills in what the pacer would, and stamps waits.

    The pacer starts at `START`; block after block, tiles wait for the link and take 10 ns.
    """

    START, LATENCY_US = 5_000_000, 3.0
    driver = None

    def __init__(self, group):
        super().__init__()
        self.__dict__.pop("driver", None)
        self.emulation = Emulation(
            Link.parse("paced:100"), group.world_size, self, group.transport.is_peer
        )

    def __setattr__(self, name, value):
        if name != "driver":
            super().__setattr__(name, value)

    def get(self, key, build):
        return torch.tensor(build() or [[0, 0, 0, 0]]).t().contiguous()

    def run(self, program):
        emulated = program.derived["emulated"] = self.emulation.emulate(program)
        (pacer,) = [e for e in emulated.launches() if e.kernel.fn.__name__ == "_pacer_kernel"]
        table = pacer.args["table_ptr"]
        table[3] = table[2].cumsum(0) + pacer.args["latency"]
        self.released_ns = (table[3] / FRACTION).tolist()
        for launch in program.launches():
            if "trace_ptr" in launch.args:
                self.stamp(launch.args["trace_ptr"])

    def stamp(self, rows):
        """Tiles of rank 0, 1, 2, ... one after the other; those of rank 2 come first over it."""
        now = self.START - 500
        for index, row in enumerate(rows):
            segment = (0, 2, 1)[index * 3 // len(rows)]
            ready = 0 if segment == 0 else self.START + int(self.released_ns[2 - segment]) + 1
            waited = max(now, ready)
            row[:] = torch.tensor([index, segment, 0, now, waited, waited + 10, waited + 20, 0])
            now = waited + 20


def test_transfers_are_on_the_clock_of_the_tiles(group):
    executor = group.transport.executor = EmulatingExecutor(group)
    group.executor = executor
    x, weight = torch.randn(1, 512), torch.randn(32, 512)
    with plait.trace() as trace:
        plait.ag_gemm(x, weight, group=group)
    transfers = trace.transfers()
    assert [(each.peer, each.word, each.nbytes) for each in transfers] == [
        (2, 2, 2048), (1, 1, 2048),
    ]  # fmt: skip
    for number, each in enumerate(transfers):
        # 2,048 bytes at 100 GB/s take 20.48 ns, one after the other.
        assert each.start_ns == pytest.approx(executor.START + number * 20.48, abs=1.01)
        assert each.end_ns - each.start_ns == pytest.approx(20.48, abs=0.01)
    events = trace.to_perfetto()["traceEvents"]
    (link,) = [e for e in events if e["ph"] == "M" and e["args"].get("name") == "link"]
    on_link = [e for e in events if e["ph"] == "X" and e["tid"] == link["tid"]]
    assert [e["name"] for e in on_link] == ["from rank 2", "from rank 1"]
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0


def test_the_pacer_starts_as_late_as_no_wait_contradicts():
    tiles = [
        event(steps=(("wait", 90, end), ("compute", end, end + 5)), awaits=words)
        for end, words in ((150, (0,)), (160, (0, 1)), (400, (1,)), (90, ()), (91, (7,)))
    ]
    assert pacer_start_ns(tiles, {0: 40.0, 1: 65.0}) == 95.0
    assert pacer_start_ns(tiles, {2: 1.0}) is None


# --- lanes, summary, file


def event(rank=0, launch=0, sm=0, block=0, loop=0, segment=0, steps=(("compute", 0, 10),), **more):
    values = {"call": 0, "operator": "op", "kernel": "k", "index": 0, "tile": 0, "piece": 0}
    return TileEvent(
        rank=rank, launch=launch, sm=sm, block=block, loop=loop, segment=segment, steps=steps,
        **values, **more,
    )  # fmt: skip


def test_blocks_side_by_side_on_an_sm_have_lanes_of_their_own():
    tiles = [
        event(sm=3, block=0, steps=(("compute", 0, 10),)),
        event(sm=3, block=1, steps=(("compute", 5, 9),)),
        event(sm=3, block=0, launch=1, steps=(("compute", 9, 20),)),
        event(sm=4, block=2, steps=(("compute", 1, 2),)),
    ]
    assert list(lanes_of(tiles).values()) == [(3, 0), (4, 0), (3, 1), (3, 1)]
    _, lanes = to_slices(tiles, [])
    assert lanes == [(0, "SM 3"), (0, "SM 3 #2"), (0, "SM 4")]


def test_the_summary_shares_out_all_sm_time():
    tiles = [
        event(block=0, sm=0, steps=(("wait", 100, 110), ("compute", 110, 150))),
        event(block=0, sm=0, steps=(("store", 150, 160), ("sum", 160, 200))),
        event(block=1, sm=1, steps=(("compute", 120, 180),), segment=1),
    ]
    found = summarize(tiles)
    shares = {"wait": 0.05, "compute": 0.5, "store": 0.05, "sum": 0.2, "idle": 0.2}
    assert found.shares == pytest.approx(shares)
    assert (found.span_ns, found.num_lanes, found.num_tiles, found.waves) == (100, 2, 3, 2)
    assert (found.first, found.last) == (tiles[0], tiles[1])


def test_the_file_has_a_process_a_rank_and_a_thread_an_sm(tmp_path):
    trace = plait.trace()
    run(make_call("gemm_rs", 3), 3, trace)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(3)}
    lanes = {e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {(e.rank, f"SM {e.sm}") for e in trace.events()}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(event.steps) for event in trace.events())
    assert {e["name"] for e in slices} == {"wait", "compute", "store", "sum"}
    for tid, (pid, _) in lanes.items():
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid)
        assert all(e["pid"] == pid for e in slices if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(own))
    assert {"segment", "tile", "block"} <= set(slices[0]["args"])
