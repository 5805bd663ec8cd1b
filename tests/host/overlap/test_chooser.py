"""What `impl="auto"` takes: by table and model, alike on every rank, cheaply, and it says why.

GPUs are names here, and links figures: nothing runs on either. The H200's shipped table is that of
one result file, whatever else has been measured since.
"""

from __future__ import annotations

import functools
import itertools
import timeit
from types import SimpleNamespace

import pytest
import torch

import plait
from plait.cli.tune_overlap import entry_of, read_rows
from plait.device import DeviceInfo
from plait.errors import UnsupportedError
from plait.model.choose import choose as choose_faster
from plait.model.problem import Link
from plait.model.rates import H200 as RATES
from plait.overlap.common import chooser, plans
from plait.overlap.common.chooser import Sizes, choose, decide, measurements
from plait.overlap.gemm_ar.launch import choose_algorithm
from plait.runtime.prepared import PreparedProgram
from plait.runtime.tuning_store import (
    TuningEntry,
    TuningTable,
    read_table,
    user_table_path,
    write_table,
)
from plait.settings import override
from plait.symm.group import Group
from plait.symm.transports.base import LinkSpeed
from tests.host.runtime.device_fakes import LAUNCHES, FakeBound, fake_group
from tests.tiny.tree import ROOT

RESULTS = ROOT / "benchmarks/results/overlap_paced360_first_h200_2026-11-30.jsonl"
SHIPPED = chooser.SHIPPED_TABLES

H200, OTHER = "NVIDIA H200", "Some GPU"
BF16, FP32 = torch.bfloat16, torch.float32
NVLINK = LinkSpeed(360.0, 3.0)
GPT3, LLAMA = (49152, 12288), (8192, 28672)
WORLD, ROWS, K, N = 4, 32, 64, 48  # of one rank
_names = itertools.count()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    table = TuningTable(entry_of(row) for row in read_rows(RESULTS))
    write_table(folder / "nvidia-h200.json", table, H200)
    return folder


@pytest.fixture(autouse=True)
def _forget(shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(chooser, "SHIPPED_TABLES", shipped)
    chooser.forget_choices()
    with override(tuning_dir=str(tmp_path)):
        yield
    chooser.forget_choices()


@pytest.fixture
def gpu(monkeypatch):
    """A function that gives every device the name of a GPU."""

    def name(gpu: str) -> None:
        info = DeviceInfo("cpu", "cpu", "cpu", 132, 232_448, gpu)
        monkeypatch.setattr(chooser, "device_info", lambda device: info)

    name(H200)
    return name


def ranks(
    link: LinkSpeed | None = NVLINK, world_size: int = 8, symmetric: bool = True, own: bool = False
) -> list:
    """Stand-ins for each rank's view of a group."""
    return [
        SimpleNamespace(
            rank=rank,
            world_size=world_size,
            device=torch.empty(0).device,
            transport=SimpleNamespace(
                symmetric=symmetric, one_process=own, link_speed=lambda: link
            ),
        )
        for rank in range(world_size)
    ]


def sizes(M: int, N: int, K: int, dtype: torch.dtype = BF16, **changes) -> Sizes:
    return Sizes(M, N, K, dtype, dtype.itemsize)._replace(**changes)


def reduced(M: int, **changes) -> Sizes:
    return sizes(M, *LLAMA, algorithm=choose_algorithm(M, 8), **changes)


def entry(operator, shape, fused_us, unfused_us, link=NVLINK, world_size=8, dtype="bfloat16"):
    key = chooser.table_key(dtype, world_size, *link)
    return TuningEntry(
        operator, key, dict(zip("MNK", shape, strict=True)), {}, fused_us, unfused_us, {}, "today"
    )


def own_table(gpu: str, *entries: TuningEntry) -> None:
    write_table(user_table_path(gpu), TuningTable(entries), gpu)
    chooser.forget_choices()


# --- decisions
@pytest.mark.parametrize("M", [1, 64])
def test_a_reduction_that_was_slower_fused_is_unfused(gpu, M: int):
    (group, *_) = ranks()
    assert choose("gemm_ar", group, "auto", None, reduced(M)) == "unfused"
    record = plait.last_run()
    assert (record.operator, record.impl) == ("gemm_ar", "unfused")
    times = {1: "55.0 us fused, 49.8 us unfused", 64: "73.6 us fused, 64.9 us unfused"}
    assert record.reason == f"auto: measured {times[M]}"


@pytest.mark.parametrize(
    ("operator", "wanted", "chosen", "how"),
    [
        ("ag_gemm", sizes(4096, *GPT3), "fused", "measured 836 us fused, 1017 us unfused"),
        ("ag_gemm", sizes(6000, 28672, 8192), "fused", "measured at M=4096 and M=8192"),
        ("ag_gemm", sizes(16384, *GPT3), "fused", "predicted"),
        ("ag_gemm", sizes(16, *GPT3), "unfused", "predicted"),
        ("gemm_rs", sizes(8192, *LLAMA), "fused", "predicted"),
        ("gemm_rs", sizes(64, *LLAMA), "unfused", "predicted"),
        ("gemm_ar", reduced(2048), "fused", "predicted"),
        ("gemm_ar", reduced(2), "unfused", "predicted"),
        ("gemm_ar", reduced(48), "unfused", "predicted"),
        ("gemm_ar", reduced(4096), "fused", "measured 561 us fused, 673 us unfused"),
    ],
)
def test_choices_on_an_h200(operator, wanted, chosen, how):
    assert decide(operator, 8, NVLINK, H200, wanted)[0] == chosen
    assert decide(operator, 8, NVLINK, H200, wanted)[1].startswith(f"auto: {how}")


def test_the_reason_names_both_times_that_were_compared():
    impl, reason = decide("gemm_rs", 8, NVLINK, H200, sizes(8192, *LLAMA))
    words = reason.split()
    assert words[:2] == ["auto:", "predicted"]
    assert words[3:5] == ["us", "fused,"]
    assert words[6:] == ["us", "unfused"]
    assert impl == "fused"
    assert float(words[2]) < float(words[5])


def test_more_rows_than_the_crossover_stay_fused():
    for operator, (n, k) in (("ag_gemm", GPT3), ("gemm_rs", LLAMA), ("gemm_ar", LLAMA)):
        found = []
        for M in (1, 16, 256, 512, 1024, 2048, 4096, 8192):
            named = choose_algorithm(M, 8) if operator == "gemm_ar" else None
            wanted = sizes(M, n, k, algorithm=named)
            found.append(decide(operator, 8, NVLINK, H200, wanted)[0])
        assert found == sorted(found, reverse=True), (operator, found)  # unfused, then fused
        assert {*found} == {"fused", "unfused"}


def test_the_model_with_its_fixed_costs_reproduces_the_table():
    """Within 15 %, in the right order; the entries are what the fixed costs were taken from."""
    entries = measurements(read_table(chooser.shipped_table_path(H200)))
    assert len(entries) == 8
    for each in entries:
        named = None
        if each.problem.operator == "gemm_ar":
            named = choose_algorithm(each.problem.M, each.problem.world_size)
        link = Link(each.bandwidth_gb_s, each.latency_us)
        found = choose_faster(each.problem, link, RATES, algorithm=named)
        assert found.fused_us == pytest.approx(each.fused_us, rel=0.15), each
        assert found.unfused_us == pytest.approx(each.unfused_us, rel=0.15), each
        assert found.impl == ("fused" if each.fused_us <= each.unfused_us else "unfused"), each


def test_partial_sums_of_another_dtype_are_another_call():
    wide = sizes(4096, *LLAMA, travel_bytes=4)
    _, reason = decide("gemm_rs", 8, NVLINK, H200, wide)
    assert reason.startswith("auto: predicted")  # the measured ones travelled as bf16
    assert decide("gemm_rs", 8, NVLINK, H200, sizes(4096, *LLAMA))[1].startswith("auto: measured")
    narrow = decide("gemm_rs", 8, LinkSpeed(160.0, 3.0), H200, sizes(4096, *LLAMA))[1]
    wider = decide("gemm_rs", 8, LinkSpeed(160.0, 3.0), H200, wide)[1]
    assert float(wider.split()[5]) > float(narrow.split()[5])


def test_nothing_to_compute_needs_no_prediction():
    for shape in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        assert decide("ag_gemm", 8, NVLINK, H200, sizes(*shape))[0] == "fused"


# --- what is not known
def test_an_unknown_gpu_is_fused():
    impl, reason = decide("gemm_ar", 8, NVLINK, OTHER, reduced(1))
    assert impl == "fused"
    assert reason == "auto: the fused kernel takes this call; no rates of Some GPU for bfloat16"


def test_rates_are_those_of_two_byte_operands():
    impl, reason = decide("gemm_ar", 8, NVLINK, H200, reduced(1)._replace(dtype=FP32))
    assert impl == "fused"
    assert reason.endswith("no rates of NVIDIA H200 for float32")


def test_an_unknown_link_is_fused_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(chooser, "decide", None)
    (group, *_) = ranks(link=None)
    assert choose("gemm_ar", group, "auto", None, reduced(1)) == "fused"
    assert plait.last_run().reason == "auto: the fused kernel takes this call"
    assert choose("gemm_ar", ranks()[0], "auto", None) == "fused"  # nor without sizes
    (alone,) = ranks(world_size=1)
    assert choose("gemm_ar", alone, "auto", None, reduced(1)) == "fused"


def test_virtual_ranks_are_fused():
    def fn(group: Group) -> str:
        assert group.transport.link_speed() is None
        plait.ag_gemm(torch.randn(2, 4), torch.randn(3, 4), group=group)
        return plait.last_run().reason

    assert plait.run_virtual(fn, 2) == ["auto: the fused kernel takes this call"] * 2


@pytest.mark.parametrize(
    ("link", "speed"),
    [
        ("paced:360", (360.0, 3.0)),
        ("paced:160@5+traffic", (160.0, 5.0)),
        ("pcie", (55.0, 3.0)),
    ],
)
def test_emulated_groups_know_their_link(link: str, speed: tuple):
    group = Group.emulated(3, link=link, device="cpu")
    assert group.transport.link_speed() == LinkSpeed(*speed)
    part = group.new_group([0, 2])
    assert part.transport.link_speed() == speed
    part.close()
    group.close()


# --- impl by name
def test_an_implementation_by_name_is_not_second_guessed(gpu, monkeypatch):
    monkeypatch.setattr(chooser, "decide", None)
    for group, impl in itertools.product(ranks()[:1], ("fused", "unfused", "reference")):
        assert choose("gemm_ar", group, impl, None, reduced(1)) == impl
        assert plait.last_run().reason == f"impl={impl!r}"
    with pytest.raises(UnsupportedError, match="last dim"):
        choose("ag_gemm", ranks()[0], "fused", "the last dim", sizes(64, *GPT3))


def test_obstacles_come_first(gpu, monkeypatch):
    monkeypatch.setattr(chooser, "decide", None)
    assert choose("ag_gemm", ranks()[0], "auto", "the last dim", sizes(4096, *GPT3)) == "unfused"
    assert plait.last_run().reason == "the last dim"
    (group, *_) = ranks(symmetric=False)
    assert choose("ag_gemm", group, "auto", None, sizes(4096, *GPT3)) == "unfused"
    assert "no symmetric memory" in plait.last_run().reason


# --- agreement
def test_all_ranks_choose_alike(gpu):
    for M in (1, 64, 700, 1024, 4096):
        records = []
        for group in ranks():
            chooser.forget_choices()  # as each rank is a process of its own
            choose("gemm_ar", group, "auto", None, reduced(M))
            records.append(plait.last_run())
        assert len(set(records)) == 1


def test_a_users_own_table_counts_only_where_no_other_process_decides(gpu):
    own_table(H200, entry("gemm_ar", (1, *LLAMA), 10.0, 20.0))
    assert choose("gemm_ar", ranks(own=True)[0], "auto", None, reduced(1)) == "fused"
    assert plait.last_run().reason == "auto: measured 10.0 us fused, 20.0 us unfused"
    assert choose("gemm_ar", ranks()[0], "auto", None, reduced(1)) == "unfused"


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(
        plans, "PreparedProgram", functools.partial(PreparedProgram, bind=FakeBound)
    )
    made = fake_group(WORLD, f"chooser {next(_names)}")
    LAUNCHES.clear()
    yield made
    made.close()


CALLS = {
    "ag_gemm": ((WORLD * ROWS, WORLD * N, K), lambda x, w, **rest: plait.ag_gemm(x, w, **rest)),
    "gemm_rs": ((ROWS, N, WORLD * K), lambda x, w, **rest: plait.gemm_rs(x, w, **rest)),
    "gemm_ar": ((ROWS, N, WORLD * K), lambda x, w, **rest: plait.gemm_ar(x, w, **rest)),
}


@pytest.mark.parametrize("operator", CALLS)
def test_operators_ask_with_the_sizes_of_all_ranks_whatever_the_layout(gpu, group, operator):
    shape, call = CALLS[operator]
    gpu(OTHER)
    own_table(OTHER, entry(operator, shape, 9.0, 8.0, world_size=WORLD))
    x, weight = torch.randn(ROWS, K, dtype=BF16), torch.randn(N, K, dtype=BF16)
    shifted = torch.randn(ROWS * K + 1, dtype=BF16)[1:].view(ROWS, K)
    wide = torch.randn(ROWS, 2 * K, dtype=BF16)[:, ::2]
    stacked = x.view(2, ROWS // 2, K)
    turned = torch.randn(K, N, dtype=BF16).t()
    operands = [(x, weight), (shifted, weight), (wide, turned), (x, turned)]
    if operator != "gemm_rs":  # whose dim 0 of the stack would have too few for the ranks
        operands.append((stacked, weight))
    for each in operands:
        call(*each, group=group)
        assert plait.last_run().impl == "unfused", each[0].stride()
        assert plait.last_run().operator == operator
        assert plait.last_run().reason == "auto: measured 9.0 us fused, 8.0 us unfused"


@pytest.mark.parametrize("operator", CALLS)
def test_plans_keep_what_was_chosen(gpu, group, operator):
    shape, call = CALLS[operator]
    gpu(OTHER)
    own_table(OTHER, entry(operator, shape, 7.0, 8.0, world_size=WORLD))
    x, weight = torch.randn(ROWS, K, dtype=BF16), torch.randn(N, K, dtype=BF16)
    for _ in range(5):  # until the regions have grown and both have a plan
        call(x, weight, group=group)
    record = plait.last_run()
    assert (record.impl, record.detail) == ("fused", "planned")
    assert record.reason == "auto: measured 7.0 us fused, 8.0 us unfused"
    call(x, weight, group=group, impl="unfused")  # the key of a plan holds impl
    assert (plait.last_run().impl, plait.last_run().detail) == ("unfused", "")


# --- the table
def test_the_shipped_table_of_the_h200_is_one(monkeypatch):
    monkeypatch.setattr(chooser, "SHIPPED_TABLES", SHIPPED)
    entries = read_table(chooser.shipped_table_path(H200)).entries
    found = measurements(TuningTable(entries))
    assert {each.problem.operator for each in found} == {"ag_gemm", "gemm_rs", "gemm_ar"}
    assert len(found) == len(entries)
    first = measurements(TuningTable(entry_of(row) for row in read_rows(RESULTS)))
    assert {each.problem for each in first} <= {each.problem for each in found}


@pytest.mark.parametrize(
    ("link", "serves"),
    [
        ((360.0, 3.0), True),
        ((320.0, 3.0), True),
        ((360.0, 2.7), True),
        ((160.0, 3.0), False),
        ((300.0, 3.0), False),
        ((360.0, 5.0), False),
    ],
)
def test_entries_serve_links_that_are_nearly_as_fast(link, serves):
    _, reason = decide("gemm_ar", 8, LinkSpeed(*link), H200, reduced(1))
    assert reason.startswith("auto: measured" if serves else "auto: predicted")


def test_the_nearest_link_counts():
    slow, fast = LinkSpeed(340.0, 3.0), LinkSpeed(400.0, 3.0)
    own_table(
        OTHER,
        entry("ag_gemm", (64, 64, 64), 1.0, 2.0, link=slow),
        entry("ag_gemm", (64, 64, 64), 4.0, 3.0, link=fast),
    )
    for speed, impl in ((345.0, "fused"), (380.0, "unfused"), (430.0, "unfused")):
        link = LinkSpeed(speed, 3.0)
        assert decide("ag_gemm", 8, link, OTHER, sizes(64, 64, 64), True)[0] == impl


def test_dtypes_of_one_size_share_entries():
    half = reduced(1)._replace(dtype=torch.float16)
    assert decide("gemm_ar", 8, NVLINK, H200, half)[1].startswith("auto: measured")
    assert decide("gemm_ar", 4, NVLINK, H200, reduced(1))[1].startswith("auto: predicted")


def test_other_operators_entries_are_passed_over(gpu):
    products = TuningEntry("matmul", {"dtype": "bfloat16"}, {"M": 1, "N": 1, "K": 1}, {}, 1.0, 2.0,
                           {}, "today")  # fmt: skip
    own_table(H200, products, entry("ag_gemm", (8, 8, 8), 1.0, 2.0))
    assert decide("ag_gemm", 8, NVLINK, H200, sizes(8, 8, 8), True)[1].startswith("auto: measured")


# --- costs
def test_a_choice_is_made_once(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(chooser, "decide", lambda *args: asked.append(args) or ("fused", "why"))
    monkeypatch.setattr(chooser, "_MAX_CHOICES", 4)
    (group, *_) = ranks()
    for _ in range(3):
        choose("gemm_rs", group, "auto", None, sizes(512, *LLAMA))
    assert len(asked) == 1
    assert plait.last_run().reason == "why"
    for M in range(1, 12):
        choose("gemm_rs", group, "auto", None, sizes(M, *LLAMA))
    assert len(chooser._choices) <= 4
    with override(tuning_dir="elsewhere"):
        choose("gemm_rs", group, "auto", None, sizes(11, *LLAMA))
    assert len(asked) == 13


def test_a_repeated_choice_takes_no_time(gpu):
    group = Group.emulated(8, link="paced:360", device="cpu")

    def again() -> None:
        choose("gemm_ar", group, "auto", None, reduced(1))

    again()
    best = min(timeit.repeat(again, number=500, repeat=9)) / 500
    assert best < 20e-6  # some 2 us on an idle core; a miss takes a thousand times as long
    group.close()
