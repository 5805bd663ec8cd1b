"""The recorded timeline: spans, calls, the trace and the picture."""

import builtins
import json

import pytest

from plait.check.picture import save_png
from plait.check.timeline import TimelineRecorder
from plait.errors import ArgumentError, MissingDependencyError
from plait.symm.virtual.observe import Block, Item


class World:
    now_ns = 0


class Script:
    """Two ranks: a kernel of two blocks, whose second waits, beside a copy to the other rank."""

    def __init__(self):
        self.world = World()
        self.recorder = TimelineRecorder()
        self.recorder.world_started(self.world)

    def at(self, now_ns):
        self.world.now_ns = now_ns
        return self.recorder

    def call(self, rank, begin, operator="ag_gemm"):
        copy = Item(rank, "comm", "copy", operator, "copy", 0, nbytes=4096, peer=1 - rank)
        launch = Item(rank, "main", "launch", operator, "_gemm", 0, num_blocks=2)
        blocks = [Block(launch, 0), Block(launch, 1)]
        for item in (copy, launch):
            self.at(begin).enqueued(item)
        self.at(begin + 100).item_started(copy)
        self.at(begin + 200).item_started(launch)
        for block in blocks:
            self.at(begin + 200).block_started(block)
        self.at(begin + 300).block_asleep(blocks[1], 0x1000)
        self.at(begin + 5000).item_finished(copy)
        self.at(begin + 5100).block_woken(blocks[1])
        self.at(begin + 9000).block_finished(blocks[1])
        self.at(begin + 4000).block_finished(blocks[0])  # ends first, is run last
        self.at(begin + 4000).item_finished(launch)
        self.at(begin + 9000).host_synchronized(rank, "main")
        self.at(begin + 9000).host_synchronized(rank, "comm")


@pytest.fixture
def script():
    s = Script()
    for begin in (0, 20_000):
        for rank in (0, 1):
            s.call(rank, begin)
    s.call(0, 40_000, "gemm_rs")
    s.call(1, 40_000, "gemm_rs")
    s.at(60_000).world_ended(s.world)
    return s


def test_spans_of_one_call(script):
    spans = [x for x in script.recorder.spans if x.rank == 1 and x.call == 0]
    found = {(x.lane, x.kind, x.name, x.start_ns, x.end_ns) for x in spans}
    assert found == {
        ("comm copy engine", "copy", "copy to rank 0", 100, 5000),
        ("main kernel", "kernel", "_gemm", 200, 9000),
        ("main block 0", "compute", "_gemm", 200, 4000),
        ("main block 1", "compute", "_gemm", 200, 9000),
        ("main block 1", "wait", "wait", 300, 5100),
    }


def test_windows(script):
    recorder = script.recorder
    assert recorder.window_ns("ag_gemm", 0) == (100, 9000)
    assert recorder.window_ns("ag_gemm") == (20_100, 29_000)
    assert recorder.window_ns() == (40_100, 49_000)
    with pytest.raises(ArgumentError, match="operators: ag_gemm, gemm_rs"):
        recorder.window_ns("moe")
    with pytest.raises(ArgumentError, match="call 2 of ag_gemm"):
        recorder.window_ns("ag_gemm", 2)


def test_trace_is_valid_json(script, tmp_path):
    script.recorder.save_json(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == 2 * ["comm copy engine"] + sorted(
        2 * ["main kernel", "main block 0", "main block 1"]
    )
    assert len({tid for _, tid in lanes}) == 8  # viewers merge equal thread ids
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(script.recorder.spans) == 30
    copy = next(e for e in spans if e["cat"] == "copy" and e["pid"] == 0)
    assert (copy["ts"], copy["dur"], copy["args"]["bytes"]) == (0.1, 4.9, 4096)
    assert (copy["args"]["peer"], lanes[0, copy["tid"]]) == (1, "comm copy engine")


def test_a_stopped_world_closes_what_is_open():
    s = Script()
    launch = Item(0, "main", "launch", "op", "_kernel", 0, num_blocks=1)
    later = Item(0, "main", "launch", "op", "_never", 1, num_blocks=1)
    block = Block(launch, 0)
    for item in (launch, later):
        s.at(0).enqueued(item)
    s.at(10).item_started(launch)
    s.at(10).block_started(block)
    s.at(20).block_asleep(block, 0x1000)
    s.at(70).world_ended(s.world)
    assert {(x.kind, x.start_ns, x.end_ns) for x in s.recorder.spans} == {
        ("wait", 20, 70),
        ("compute", 10, 70),
        ("kernel", 10, 70),
    }


def test_a_new_world_begins_a_new_timeline(script):
    script.recorder.world_started(script.world)
    assert script.recorder.spans == []


def test_picture(script, tmp_path):
    pytest.importorskip("matplotlib")
    save_png(script.recorder, tmp_path / "call.png", operator="ag_gemm", call=0)
    save_png(script.recorder, tmp_path / "one_block.png", operator="ag_gemm", max_blocks=1)
    sizes = []
    for name in ("call.png", "one_block.png"):
        data = (tmp_path / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(int.from_bytes(data[20:24], "big"))
    assert sizes[0] > sizes[1]  # fewer lanes, lower picture


def test_missing_matplotlib_is_named(script, tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        save_png(script.recorder, tmp_path / "x.png")
