"""Tile orders: every tile once on every rank, and the device form equals the host form."""

import random
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.backends.base import executor_for
from plait.backends.commands import Launch, Program
from plait.schedules import partition, rank_rotation, raster
from plait.schedules.lang import grouped_raster, segmented_tile
from plait.testing.compile_sm90 import compile_for

ORDERS = ("arrival", "departure")


def all_tiles(rows, num_n, block_m):
    return {
        (segment, m, n)
        for segment, count in enumerate(rows)
        for m in range(-(-count // block_m))
        for n in range(num_n)
    }


# --- raster


@pytest.mark.parametrize("group_m", [1, 2, 3, 8])
def test_grouped_raster_visits_every_tile_once(group_m):
    for num_m, num_n in product(range(1, 8), range(1, 6)):
        tiles = [raster.grouped_raster(t, num_m, num_n, group_m) for t in range(num_m * num_n)]
        assert sorted(tiles) == list(product(range(num_m), range(num_n)))


def test_grouped_raster_example():
    tiles = [raster.grouped_raster(t, 3, 2, 2) for t in range(6)]
    assert tiles == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@given(
    num_m=st.integers(1, 300),
    num_n=st.integers(1, 300),
    group_m=st.integers(1, 32),
    data=st.data(),
)
def test_grouped_raster_stays_in_its_group(num_m, num_n, group_m, data):
    tile = data.draw(st.integers(0, num_m * num_n - 1))
    m, n = raster.grouped_raster(tile, num_m, num_n, group_m)
    assert m // group_m == tile // (group_m * num_n)
    assert 0 <= m < num_m
    assert 0 <= n < num_n


# --- rotation


@pytest.mark.parametrize("world_size", range(1, 9))
def test_rotation_is_a_permutation_without_collisions(world_size):
    ranks = range(world_size)
    for order in (rank_rotation.arrival_segment, rank_rotation.departure_segment):
        for rank in ranks:
            assert sorted(order(step, rank, world_size) for step in ranks) == list(ranks)
        for step in ranks:  # at one step no two ranks use the same segment
            assert sorted(order(step, rank, world_size) for rank in ranks) == list(ranks)


def test_rotation_examples():
    assert [rank_rotation.arrival_segment(s, 1, 4) for s in range(4)] == [1, 0, 3, 2]
    assert [rank_rotation.departure_segment(s, 1, 4) for s in range(4)] == [2, 3, 0, 1]


# --- partition


@given(total=st.integers(0, 10**6), world_size=st.integers(1, 8))
def test_split_rows_is_fair(total, world_size):
    rows = partition.split_rows(total, world_size)
    assert len(rows) == world_size
    assert sum(rows) == total
    assert list(rows) == sorted(rows, reverse=True)
    assert rows[0] - rows[-1] <= 1


def test_partition_examples():
    assert partition.split_rows(7, 3) == (3, 2, 2)
    assert partition.row_offsets((3, 0, 4)) == (0, 3, 3, 7)
    assert partition.segment_tile_counts((3, 0, 4), 5, 2) == (10, 0, 10)
    assert partition.ceil_div(7, 2) == 4
    assert partition.ceil_div(0, 2) == 0
    assert partition.round_up(7, 4) == 8


# --- segments


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", range(1, 5))
def test_segmented_tiles_cover_each_tile_once_on_every_rank(world_size, order):
    for rows in product((0, 1, 4, 5), repeat=world_size):
        for rank in range(world_size):
            tiles = list(partition.segmented_tiles(rows, 2, 2, 2, rank, order))
            assert len(tiles) == partition.num_segmented_tiles(rows, 2, 2)
            assert len(set(tiles)) == len(tiles)
            assert set(tiles) == all_tiles(rows, 2, 2)


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    num_n=st.integers(1, 5),
    block_m=st.integers(1, 16),
    group_m=st.integers(1, 8),
    order=st.sampled_from(ORDERS),
    data=st.data(),
)
def test_segments_are_finished_one_after_the_other(rows, num_n, block_m, group_m, order, data):
    world_size = len(rows)
    rank = data.draw(st.integers(0, world_size - 1))
    tiles = list(partition.segmented_tiles(rows, num_n, block_m, group_m, rank, order))
    assert set(tiles) == all_tiles(rows, num_n, block_m)
    visited = list(dict.fromkeys(segment for segment, _, _ in tiles))
    if order == "arrival":
        planned = [(rank - step) % world_size for step in range(world_size)]
    else:
        planned = [(rank + 1 + step) % world_size for step in range(world_size)]
    assert visited == [segment for segment in planned if rows[segment]]
    assert [t[0] for t in tiles] == sorted((t[0] for t in tiles), key=visited.index)


def test_segmented_tile_beyond_the_end_says_so():
    with pytest.raises(IndexError, match="tile 4 of 4 tiles"):
        partition.segmented_tile(4, 0, (2, 2), 1, 1, 1, "arrival")


# --- device forms


@triton.jit
def _raster_kernel(out_ptr, num_m, num_n, GROUP_M: tl.constexpr):
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, n = grouped_raster(tile, num_m, num_n, GROUP_M)
        tl.store(out_ptr + 2 * tile, m)
        tl.store(out_ptr + 2 * tile + 1, n)


@triton.jit
def _segmented_kernel(
    out_ptr,
    rows_ptr,
    rank,
    world_size,
    num_tiles,
    num_n,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        step, segment, m, n = segmented_tile(
            tile, rank, world_size, rows_ptr, num_n, BLOCK_M, GROUP_M, ARRIVAL
        )
        tl.store(out_ptr + 4 * tile, step)
        tl.store(out_ptr + 4 * tile + 1, segment)
        tl.store(out_ptr + 4 * tile + 2, m)
        tl.store(out_ptr + 4 * tile + 3, n)


def run_on_device(kernel, num_tiles, width, args):
    """What two blocks of `kernel` write, one row a tile."""

    def fn(group):
        out = torch.full((num_tiles, width), -1, dtype=torch.int32, device=group.device)
        on_device = {
            name: torch.tensor(value, dtype=torch.int32, device=group.device)
            if isinstance(value, tuple)
            else value
            for name, value in args.items()
        }
        launch = Launch(kernel, grid=2, args={"out_ptr": out, **on_device}, stream="main")
        executor = executor_for(group.device)
        executor.run(Program("schedule", [launch]))
        executor.synchronize()
        return [tuple(row) for row in out.tolist()]

    return plait.run_virtual(fn, 1)[0]


@pytest.mark.newest_triton
@pytest.mark.parametrize("case", [(3, 2, 2), (1, 1, 1), (7, 3, 4), (5, 4, 8)])
def test_device_raster_equals_host_raster(case):
    num_m, num_n, group_m = case
    args = {"num_m": num_m, "num_n": num_n, "GROUP_M": group_m}
    expected = [raster.grouped_raster(t, *case) for t in range(num_m * num_n)]
    assert run_on_device(_raster_kernel, num_m * num_n, 2, args) == expected


def run_segmented(rows, rank, num_n, block_m, group_m, order):
    args = {
        "rows_ptr": tuple(rows),
        "rank": rank,
        "world_size": len(rows),
        "num_tiles": partition.num_segmented_tiles(rows, num_n, block_m),
        "num_n": num_n,
        "BLOCK_M": block_m,
        "GROUP_M": group_m,
        "ARRIVAL": order == "arrival",
    }
    return run_on_device(_segmented_kernel, args["num_tiles"], 4, args)


@pytest.mark.newest_triton
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8])
def test_device_segments_equal_host_segments(world_size, order):
    rows = [random.choice([0, 1, 4, 5, 9]) for _ in range(world_size)]
    rank, num_n = random.randrange(world_size), random.randint(1, 3)
    case = (rank, rows, num_n, random.choice([2, 4]), random.choice([1, 2, 3]), order)
    num_tiles = partition.num_segmented_tiles(rows, num_n, case[3])
    expected = [partition.segmented_tile(t, *case) for t in range(num_tiles)]
    assert run_segmented(rows, rank, *case[2:]) == expected


def test_device_segments_example():
    tiles = run_segmented((3, 0, 4), 2, 1, 2, 4, "arrival")
    assert tiles == [(0, 2, 0, 0), (0, 2, 1, 0), (2, 0, 0, 0), (2, 0, 1, 0)]


@pytest.mark.newest_triton
def test_device_forms_compile_for_sm90():
    words = torch.zeros(64, dtype=torch.int32)
    args = {
        "out_ptr": words,
        "rows_ptr": words,
        "rank": 3,
        "world_size": 7,
        "num_tiles": 100,
        "num_n": 7,
        "BLOCK_M": 128,
        "GROUP_M": 8,
        "ARRIVAL": True,
    }
    compiled = compile_for(_segmented_kernel, args)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64
