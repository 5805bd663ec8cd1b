"""What peers send, and programs with their part added.

The arrivals that an operator describes must be the very signals that the other ranks of a virtual
world set on this rank: that is observed, not derived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.backends.commands import Arrival, Arrivals, Copy, Launch, Program, Signal, StreamWait
from plait.collectives.push import Chunks, push_tensors
from plait.collectives.segments import padded_rows
from plait.errors import UnsupportedError
from plait.overlap.common.arrivals import Tiles, partial_arrivals
from plait.symm import signals
from plait.symm.kernels import _barrier_kernel, _finish_kernel, _prologue_kernel
from plait.symm.regions import close_region, open_region
from plait.symm.transports.emulation import FRACTION, PACER_BLOCK, EmulatedProgram, Emulation
from plait.symm.transports.link import Link
from plait.symm.transports.pacer_kernels import _await_kernel, _pacer_kernel, _traffic_kernel
from plait.symm.virtual.observe import Block, Item, Observer
from plait.testing.compile_sm90 import compile_for

Word = tuple[int, int, int]  # sender, receiver, word in the receiver's buffer of words


class SignalLog(Observer):
    """READY words that a rank set on another, in the order of its setting them."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int, int]] = []
        self.sent: list[Word] = []

    def signal_words_added(self, rank: int, address: int, nbytes: int) -> None:
        self.buffers.append((rank, address, nbytes))

    def locate(self, address: int) -> tuple[int, int]:
        """(rank, word) of an address."""
        for rank, start, nbytes in self.buffers:
            if start <= address < start + nbytes:
                return rank, (address - start) // 4
        raise AssertionError("not the address of a signal word")

    def atomic(self, block: Block, address: int, *, release: bool, poll: bool, **_: Any) -> None:
        if release and not poll:
            self._add(block.rank, address)

    def signalled(self, item: Item, address: int) -> None:
        self._add(item.rank, address)

    def _add(self, sender: int, address: int) -> None:
        receiver, word = self.locate(address)
        within = (word - signals.GROUP_WORDS) % signals.REGION_WORDS
        if receiver != sender and word >= signals.GROUP_WORDS and within >= signals.READY:
            self.sent.append((sender, receiver, word))


def observe(
    fn: Callable[[plait.Group], Any], world_size: int
) -> tuple[SignalLog, list[tuple[Word, Word | None]]]:
    """The signals of a virtual world, and (arrival, its trigger) of every program that ran."""
    log = SignalLog()
    described: list[tuple[Word, Word | None]] = []

    def look(program: Program) -> Program:
        for arrivals in program.arrivals:
            for arrival in arrivals.build():
                receiver, word = log.locate(arrival.word.data_ptr())
                after = None
                if arrival.after is not None:
                    after = (receiver, *log.locate(arrival.after.data_ptr()))
                described.append(((arrival.peer, receiver, word), after))
        return program

    plait.run_virtual(
        fn, world_size, device="cpu", check=False, observers=[log], rewrite_program=look
    )
    return log, described


def _ragged(group: plait.Group) -> list[int]:
    return [5 - 2 * rank for rank in range(group.world_size)]


def all_gather(group: plait.Group) -> None:
    plait.all_gather(torch.ones(_ragged(group)[group.rank], 3), group=group,
                     rows_per_rank=_ragged(group))  # fmt: skip


def all_to_all(group: plait.Group) -> None:
    world = range(group.world_size)
    sends, receives = [(group.rank + p) % 3 for p in world], [(group.rank + p) % 3 for p in world]
    plait.all_to_all(torch.ones(sum(sends), 2), group=group, input_splits=sends,
                     output_splits=receives, max_rows=2)  # fmt: skip


def sums(group: plait.Group) -> None:
    x = torch.ones(7, 3)
    plait.reduce_scatter(x, group=group, rows_per_rank=[7 - 3 * (group.world_size - 1)]
                         + [3] * (group.world_size - 1))  # fmt: skip
    plait.all_reduce(x, group=group, algorithm="one_shot")
    plait.all_reduce(x, group=group, algorithm="two_shot")


def ag_gemm(group: plait.Group) -> None:
    x = torch.ones(_ragged(group)[group.rank], 16)
    plait.ag_gemm(x, torch.ones(8, 16), group=group, rows_per_rank=_ragged(group), impl="fused")


def gemm_rs(group: plait.Group) -> None:
    sizes = [40, 20, 0][: group.world_size]
    x = torch.ones(sum(sizes), 16)
    plait.gemm_rs(x, torch.ones(150, 16), group=group, rows_per_rank=sizes, impl="fused")


def ag_gemm_backward(group: plait.Group) -> None:
    x, weight = torch.ones(4, 16, requires_grad=True), torch.ones(8, 16, requires_grad=True)
    plait.ag_gemm(x, weight, group=group, impl="fused").sum().backward()


def gemm_ar_one_shot(group: plait.Group) -> None:
    plait.gemm_ar(torch.ones(5, 16), torch.ones(150, 16), group=group, algorithm="one_shot",
                  impl="fused")  # fmt: skip


def gemm_ar_two_shot(group: plait.Group) -> None:
    plait.gemm_ar(torch.ones(40, 16), torch.ones(150, 16), group=group, algorithm="two_shot",
                  impl="fused")  # fmt: skip


CALLS = [all_gather, all_to_all, sums, ag_gemm, gemm_rs, ag_gemm_backward, gemm_ar_one_shot,
         gemm_ar_two_shot]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_arrivals_are_what_the_peers_signal(call: Callable[..., None], world_size: int) -> None:
    log, described = observe(call, world_size)
    assert log.sent, "the ranks signalled nothing"
    assert Counter(word for word, _ in described) == Counter(log.sent)
    sent = set(log.sent)
    assert all(after is None or after in sent for _, after in described)


@pytest.mark.parametrize("call", [gemm_rs, gemm_ar_one_shot, gemm_ar_two_shot])
def test_tiles_wait_for_their_mirror_image(call: Callable[..., None]) -> None:
    _, described = observe(call, 2)
    assert all(after is not None for _, after in described)


@pytest.mark.parametrize("call", [all_gather, sums])
def test_one_senders_pieces_arrive_in_its_order(call: Callable[..., None]) -> None:
    log, described = observe(call, 3)
    for sender in range(3):
        for receiver in range(3):
            pair = (sender, receiver)
            assert [w for w, _ in described if w[:2] == pair] == [
                w for w in log.sent if w[:2] == pair
            ]


# --- programs with emulated peers
class HostTables:
    """Tables on the CPU."""

    def __init__(self) -> None:
        self.tables: dict[Any, torch.Tensor] = {}

    def get(self, key: Any, build: Callable[[], list[list[int]]]) -> torch.Tensor:
        if key not in self.tables:
            rows = build() or [[0, 0, 0, 0]]
            self.tables[key] = torch.tensor(rows, dtype=torch.int64).t().contiguous()
        return self.tables[key]


WORLD, ROWS, FEATURES = 3, 4, 8


def emulation(group: plait.Group, link: str) -> Emulation:
    return Emulation(Link.parse(link), WORLD, HostTables(), group.transport.is_peer)


@pytest.fixture
def group():
    made = plait.Group.emulated(WORLD, link="pcie", device="cpu")
    yield made
    made.close()


def push_program(group: plait.Group) -> Program:
    """A push of ROWS rows to every peer, a kernel that stands for the operator's, and the close."""
    region = group.take_region(1 << 16)
    sends = [torch.ones(ROWS, FEATURES)] * WORLD
    program = Program("push")
    program.add(open_region(region, 7, signals.Operator.USER))
    program.add(*push_tensors(group, region, sends, [ROWS] * WORLD, ROWS, Chunks(1, ROWS)))
    program.add(Launch(_finish_kernel, 7, {"ctx_ptr": region.ctx}))
    return program.add(StreamWait("main", on="comm"))


def tile_program(group: plait.Group) -> Program:
    region = group.take_region(1 << 16)
    tiles = Tiles((32,) * WORLD, 64, 16, 32, 4, 4)
    program = Program("tiles", [open_region(region, 1, signals.Operator.USER)])
    return program.add(partial_arrivals(region, tiles, 2), close_region(region))


def kinds(program: Program) -> list[Any]:
    return [
        (each.kernel, each.stream) if isinstance(each, Launch) else type(each)
        for each in program.commands
    ]


def on(program: Program, stream: str, *types: type) -> list[Any]:
    return [c for c in program.commands if isinstance(c, types) and c.stream == stream]


def test_paced_pushes(group: plait.Group) -> None:
    program = push_program(group)
    result = emulation(group, "paced:100").emulate(program)
    assert isinstance(result, EmulatedProgram)
    assert kinds(result) == [
        (_prologue_kernel, "main"), StreamWait, (_pacer_kernel, "peers"),
        StreamWait, Signal, Signal, (_finish_kernel, "main"), StreamWait, StreamWait,
    ]  # fmt: skip
    assert result.commands[1] == StreamWait("peers", on="main")
    assert result.commands[-1] == StreamWait("main", on="peers")
    pacer = result.commands[2].args
    arrivals = program.arrivals[0].build()
    assert [arrival.peer for arrival in arrivals] == [2, 1]
    trigger, target, cost, _ = pacer["table_ptr"].tolist()
    assert trigger == [0, 0]
    assert target == [arrival.word.data_ptr() for arrival in arrivals]
    assert cost == [round(ROWS * FEATURES * 4 / 100 * FRACTION)] * 2  # 100 GB/s = 100 bytes a ns
    assert pacer["num_entries"] == 2
    assert pacer["latency"] == 3000 * FRACTION
    assert pacer["CONSUME"]


def test_traffic_keeps_the_bytes_moving(group: plait.Group) -> None:
    result = emulation(group, "paced:100+traffic").emulate(push_program(group))
    moved = [c for c in on(result, "comm", Launch) if c.kernel is _traffic_kernel]
    assert [c.args["num_words"] for c in moved] == [ROWS * FEATURES] * 2
    assert len(on(result, "comm", Signal)) == 2


def test_pcie_copies_from_peers_and_to_them(group: plait.Group) -> None:
    program = push_program(group)
    result = emulation(group, "pcie").emulate(program)
    incoming = on(result, "peers", Copy, Signal)
    assert [type(each) for each in incoming] == [Copy, Signal] * 2
    region = group.workspace.regions[0]
    for copy, peer in zip(incoming[::2], (2, 1), strict=True):
        place = (peer * padded_rows(ROWS) * FEATURES * 4, (ROWS, FEATURES), torch.float32)
        assert copy.dst.data_ptr() == region.data(0, *place).data_ptr()
        assert copy.src.data_ptr() == region.data(peer, *place).data_ptr()
    assert [type(each) for each in on(result, "comm", Copy, Signal)] == [Copy, Signal] * 2
    (last,) = on(result, "peers", Launch)
    assert last.args["CONSUME"]
    assert last.args["table_ptr"].tolist() == [[0], [0], [0], [0]]


def test_tiles_are_paced_on_either_link(group: plait.Group) -> None:
    program = tile_program(group)
    arrivals = program.arrivals[0].build()
    for link in ("paced:50", "pcie"):
        result = emulation(group, link).emulate(program)
        (pacer,) = on(result, "peers", Launch)
        trigger, target, _, _ = pacer.args["table_ptr"].tolist()
        assert trigger == [each.after.data_ptr() for each in arrivals]
        assert target == [each.word.data_ptr() for each in arrivals]
        assert len(target) == 2 * 4


def test_each_prologue_has_its_pacer(group: plait.Group) -> None:
    first, second = push_program(group), tile_program(group)
    both = Program("both", arrivals=[*first.arrivals, *second.arrivals])
    both.add(*first.commands, *second.commands)
    launches = emulation(group, "paced:100").emulate(both).launches()
    assert [each.kernel for each in launches] == [
        _prologue_kernel, _pacer_kernel, _finish_kernel,
        _prologue_kernel, _pacer_kernel, _finish_kernel,
    ]  # fmt: skip
    for prologue, pacer, entries in ((launches[0], launches[1], 2), (launches[3], launches[4], 8)):
        assert pacer.args["num_entries"] == entries
        assert pacer.args["ctx_ptr"] is prologue.args["ctx_ptr"]


def test_a_copy_from_a_peer_waits_for_its_mirror_image(group: plait.Group) -> None:
    region = group.take_region(1 << 12)
    dst, src = region.data(0, 0, (4,), torch.float32), region.data(1, 0, (4,), torch.float32)
    word, after = region.word(0, signals.READY), region.word(1, signals.READY + 1)
    arrival = Arrival(1, word, 16, dst, src, after)
    program = Program("staged", [open_region(region, 1, signals.Operator.USER)])
    program.add(Arrivals(region.ctx, region.mirror, ("staged",), lambda: [arrival]))
    made = emulation(group, "pcie")
    result = made.emulate(program)
    assert kinds(result) == [
        (_prologue_kernel, "main"), StreamWait, (_pacer_kernel, "peers"), Copy, Signal,
        (_pacer_kernel, "peers"), StreamWait,
    ]  # fmt: skip
    gate, last = result.launches()[1:]
    assert gate.args["table_ptr"].tolist() == [[after.data_ptr()], [0], [0], [0]]
    assert (gate.args["CONSUME"], last.args["CONSUME"]) == (False, True)
    alone = made.communication_alone(program).launches()
    assert [each.kernel for each in alone] == [_prologue_kernel, _pacer_kernel, _await_kernel]


@pytest.mark.parametrize("link", ["paced:100", "pcie"])
def test_communication_alone(group: plait.Group, link: str) -> None:
    program = push_program(group)
    result = emulation(group, link).communication_alone(program)
    kernels = [each.kernel for each in result.launches()]
    assert kernels == [_prologue_kernel, _pacer_kernel, _await_kernel]
    prologue, _, last = result.launches()
    assert prologue.args["num_arrivals"] == 1
    assert program.launches()[0].args["num_arrivals"] == 7
    words = [each.word.data_ptr() for each in program.arrivals[0].build()]
    assert last.args["table_ptr"][1].tolist() == words
    assert bool(on(result, "comm", Copy)) == (link == "pcie")


def test_alone_tiles_wait_for_no_kernel(group: plait.Group) -> None:
    result = emulation(group, "paced:50").communication_alone(tile_program(group))
    assert all(not launch.args["table_ptr"][0].any() for launch in result.launches()[1:])


def test_a_barrier_is_empty(group: plait.Group) -> None:
    region = group.workspace.regions[2]
    args = {"ctx_ptr": region.ctx, "OP": int(signals.Operator.BARRIER)}
    program = Program("barrier", [Launch(_barrier_kernel, 1, args, num_warps=1)])
    assert emulation(group, "paced:100").emulate(program).commands == []


def test_unknown_arrivals_are_refused(group: plait.Group) -> None:
    region = group.take_region(64)
    program = Program("mine", [open_region(region, 1, signals.Operator.USER)])
    with pytest.raises(UnsupportedError, match="kernels of your own"):
        emulation(group, "paced:100").emulate(program)


def test_describing_arrivals_builds_none(group: plait.Group) -> None:
    def build() -> list[Any]:
        raise AssertionError("built")

    region = group.take_region(64)
    program = Program("op").add(Arrivals(region.ctx, region.mirror, (), build))
    assert program.commands == []
    assert len(program.arrivals) == 1


# --- the pacer itself
def _paced(world: int, entries: list[tuple[int | None, int]], set_triggers: int) -> list[Any]:
    """Run the pacer over (trigger index, ns) entries, the first `set_triggers` triggers set.

    Returns what rank 0's words say and when each entry was signalled, in ns.
    """

    def fn(group: plait.Group) -> Any:
        region = group.take_region(64)
        if group.rank:
            return None
        words = [region.word(0, signals.READY + i) for i in range(2 * len(entries))]
        group.executor.run(Program("open", [open_region(region, 1, signals.Operator.USER)]))
        for index in range(set_triggers):
            words[len(entries) + index].fill_(1)
        rows = [
            [0 if trigger is None else words[len(entries) + trigger].data_ptr(),
             words[index].data_ptr(), ns * FRACTION, 0]
            for index, (trigger, ns) in enumerate(entries)
        ]  # fmt: skip
        table = torch.tensor(rows, dtype=torch.int64).t().contiguous()
        args = {"ctx_ptr": region.ctx, "table_ptr": table, "num_entries": len(rows),
                "latency": 3000 * FRACTION, "BLOCK": PACER_BLOCK, "CONSUME": True}  # fmt: skip
        group.executor.run(Program("pace", [Launch(_pacer_kernel, 1, args, num_warps=1)]))
        group.executor.run(
            Program("await", [Launch(_await_kernel, 1, {k: args[k] for k in
                    ("ctx_ptr", "table_ptr", "num_entries", "BLOCK")}, num_warps=1)])
        )  # fmt: skip
        consumed = [int(region.word(0, signals.CONSUMED + p)) for p in range(world)]
        return [int(word) for word in words[: len(rows)]], table[3] / FRACTION, consumed

    with plait.settings.override(deadline_s=6e-6):
        return plait.run_virtual(fn, world, device="cpu", check=False)[0]


def test_pacer_books_the_link() -> None:
    words, times, consumed = _paced(3, [(None, 100)] * 200, 0)
    assert words == [1] * 200
    assert times.tolist() == [3000.0 + 100 * (i + 1) for i in range(200)]
    assert consumed == [1, 1, 1]  # the own one by the close


def test_pacer_waits_for_what_is_not_on_its_way() -> None:
    entries = [(None, 1000), (0, 500), (1, 500), (None, 10)]
    words, times, consumed = _paced(2, entries, 2)
    assert words == [1, 1, 1, 1]
    assert times.tolist() == [4000.0, 4500.0, 5000.0, 5010.0]
    words, _, consumed = _paced(2, entries, 1)
    assert words == [1, 1, 0, 0]  # nothing passes a piece that is not on its way
    assert consumed == [1, 0]


@pytest.mark.parametrize("kernel", [_pacer_kernel, _await_kernel, _traffic_kernel])
def test_kernels_are_small(kernel: Any) -> None:
    ctx, table = torch.zeros(64, dtype=torch.int64), torch.zeros(4, 300, dtype=torch.int64)
    args = {"ctx_ptr": ctx, "table_ptr": table, "num_entries": 300, "BLOCK": PACER_BLOCK}
    num_warps = 1
    if kernel is _pacer_kernel:
        args |= {"latency": 3000 * FRACTION, "CONSUME": True}
        num_warps = 4
    elif kernel is _traffic_kernel:
        x = torch.zeros(64, dtype=torch.bfloat16)
        args = {"dst_ptr": x, "src_ptr": x, "num_words": 32, "round_time": 1000, "BLOCK": 2048}
        num_warps = 4
    compiled = compile_for(kernel, args, num_warps=num_warps)
    assert compiled.spill_bytes == 0
    assert compiled.registers_per_block <= 8192
    assert compiled.shared_bytes <= 1024
    if kernel is _pacer_kernel:
        assert compiled.ptx.count(r"atom\.global\.(sys\.relaxed|relaxed\.sys)\.exch") >= 2
        assert r"ld\.volatile\.global" in compiled.ptx
