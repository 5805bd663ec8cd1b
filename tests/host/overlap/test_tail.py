"""The last wave of tiles: how it is cut, and AG+GEMM whose last wave is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.ops.matmul.configs import Config
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common.tail import Part, cut_last_wave
from plait.settings import override
from plait.testing.ranks import run_virtual
from tests.host.overlap.ag_gemm_cases import GATES, call, check_results, make_case, run_case

BF16, FP32 = torch.bfloat16, torch.float32
LEAST_COLUMNS = 64


def waves_of(parts, num_sms):
    """Time in waves of whole tiles, if a piece takes its share of a tile's time."""
    return sum(-(-part.count * part.pieces // num_sms) / part.pieces for part in parts)


# --- the cut


def test_the_example_of_the_docstring():
    assert cut_last_wave(448, 131, 256) == [Part(0, 393), Part(393, 55, 2)]


@given(
    st.integers(0, 5000), st.integers(1, 264), st.sampled_from([16, 32, 64, 128, 256])
)  # fmt: skip
def test_all_tiles_once_in_no_more_waves(num_tiles, num_sms, block_n):
    parts = cut_last_wave(num_tiles, num_sms, block_n)
    covered = [tile for part in parts for tile in range(part.first, part.first + part.count)]
    assert covered == list(range(num_tiles))
    assert waves_of(parts, num_sms) <= -(-num_tiles // num_sms)
    for part in parts:
        assert block_n % part.pieces == 0
        assert part.pieces == 1 or block_n // part.pieces >= LEAST_COLUMNS
    if len(parts) > 1:  # a second launch costs time, so it must gain some
        whole, last = parts
        assert whole.pieces == 1
        assert whole.count % num_sms == 0
        assert whole.count > 0
        assert 0 < last.count < num_sms
        assert last.pieces > 1
        assert waves_of(parts, num_sms) < -(-num_tiles // num_sms)


@pytest.mark.parametrize(
    ("num_tiles", "num_sms", "block_n", "why"),
    [
        (0, 8, 256, "no tiles"),
        (5, 8, 256, "one wave: nothing to hide a second launch behind"),
        (16, 8, 256, "the last wave is full"),
        (15, 8, 256, "cut, it would be two waves of pieces"),
        (17, 8, 64, "the pieces would be too narrow"),
    ],
)
def test_what_is_left_whole(num_tiles, num_sms, block_n, why):
    assert cut_last_wave(num_tiles, num_sms, block_n) == [Part(0, num_tiles)], why


@pytest.mark.parametrize(("rest", "pieces"), [(1, 2), (66, 2)])
def test_fewer_tiles_are_not_cut_more_finely_than_pays(rest, pieces):
    """A quarter of a tile runs at 0.72 of the rate: 0.35 of a wave's time, a half takes 0.56."""
    finest = cut_last_wave(132 + rest, 132, 128)[-1]
    assert finest == Part(132, rest, pieces)
    assert cut_last_wave(132 + 1, 132, 256)[-1] == Part(132, 1, 4)


# --- AG+GEMM with a cut last wave


class Launches:
    """Remembers the AG+GEMM launches of all ranks while programs pass through."""

    def __init__(self):
        self.found = []

    def __call__(self, program):
        prologue = program.launches()[0]
        own = [each for each in program.launches() if "gemm" in each.kernel.fn.__name__]
        closing = sum(each.grid for each in own if each.args["FINISH"])
        assert prologue.args["num_arrivals"] == (closing or 1)  # or a kernel of one block closes
        self.found.append(own)
        return program

    def args(self, name):
        """The argument in the launches of each program."""
        return [[each.args[name] for each in own] for own in self.found]


def run_cut(case, blocks, pieces=2, **world):
    """Run on `blocks` blocks a rank and require that every rank cut its last wave."""
    launches = Launches()
    with override(cpu_blocks=blocks):
        run_case(case, rewrite_program=launches, **world)
    assert launches.args("PIECES") == [[1, pieces]] * case.world_size
    for first, count in zip(launches.args("first_tile"), launches.args("num_tiles"), strict=True):
        assert first == [0, count[0]]  # whole waves, then what is left of the tiles
        assert count[0] % blocks == 0
        assert 0 < count[1] < blocks
    assert all(whole == pieces * piece for whole, piece in launches.args("BLOCK_N"))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equal_rows(dtype, bias):
    """The result may then be stored by a descriptor, of blocks as wide as a piece."""
    run_cut(make_case([16, 16, 16], 32, 3 * 128, dtype, bias=bias), 2)


@pytest.mark.parametrize("n", [3 * 128, 3 * 128 - 56, 2 * 128 + 8, 2 * 128 + 1])
@pytest.mark.parametrize(
    ("rows", "blocks"), [([40, 1, 17], 5), ([0, 9, 30], 4), ([7, 0, 0], 2)], ids=str
)
def test_uneven_rows_and_columns_that_end_within_a_piece(rows, blocks, n):
    """N may end in a tile's left piece, so that its right one is empty."""
    run_cut(make_case(rows, 16, n, BF16, bias=True), blocks)


def test_quarters_of_a_tile(monkeypatch):
    config = Config(16, 256, 32, 4, 2, 8, True)
    monkeypatch.setattr(ag_gemm_launch, "choose_config", lambda *args: config)
    run_cut(make_case([9, 20, 30], 16, 5 * 256 - 72, BF16, bias=True), 4, pieces=4)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("rows", "blocks"), [([16] * 3, 2), ([40, 1, 17], 5)], ids=str)
def test_gates_with_bias(activation, rows, blocks):
    case = make_case(rows, 16, 3 * 128 - 8, BF16, num_weights=2, bias=True, activation=activation)
    run_cut(case, blocks)


def test_the_whole_rows_are_gathered_too():
    case = make_case([24, 3, 40], 16, 3 * 128, BF16, bias=True, return_gathered=True)
    run_cut(case, 5)


@pytest.mark.parametrize("schedule", ["late:0", "late:2", "waiter_first", "copies_last"])
def test_schedules(schedule):
    run_cut(make_case([9, 9, 9], 16, 3 * 128, BF16), 2, schedule=schedule)


def test_rounds_reuse_the_regions():
    """`finish` counts the blocks of both launches: else a region is free too early, or never."""
    cases = [make_case([40, 1, 17], 16, 3 * 128, BF16, bias=True) for _ in range(5)]
    with override(cpu_blocks=2):
        results = run_virtual(lambda group: [call(case, group) for case in cases], 3)
    for rank, rounds in enumerate(results):
        for case, outs in zip(cases, rounds, strict=True):
            check_results(case, rank, outs)
