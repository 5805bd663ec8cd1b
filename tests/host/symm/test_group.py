"""Groups: names, memory, order, agreement, and what is left after they are closed."""

import gc
import re
import tracemalloc

import pytest
import torch

import plait
from plait.errors import CapacityError, GroupError, RanksDisagreeError
from plait.settings import override
from plait.symm import group as group_module
from plait.symm.group import Group, get_group, world_size_of
from plait.symm.virtual.observe import Observer
from plait.symm.workspace import NUM_REGIONS
from plait.testing.compare import assert_bitwise
from plait.testing.ranks import run_virtual


def numbered(group, rows=2, cols=4):
    return torch.full((rows, cols), float(group.rank))


def gathered(world_size, rows=2, cols=4):
    return torch.arange(float(world_size)).repeat_interleave(rows)[:, None].expand(-1, cols)


# --- names


def test_a_name_finds_each_rank_its_own_group():
    def fn(group):
        assert group.name == "team"
        assert get_group("team") is group
        assert world_size_of("team") == 3
        group.barrier()
        assert get_group("team") is group
        return repr(group)

    found = run_virtual(fn, 3, name="team", device=torch.device("cpu"))
    assert found == [f"Group('team', rank {rank} of 3, cpu)" for rank in range(3)]
    with pytest.raises(GroupError, match="the name of an open group of this rank, got 'team'"):
        get_group("team")


def test_a_name_is_taken_until_its_group_is_closed():
    def fn(group):
        first = group.new_group(name="twice")
        with pytest.raises(GroupError, match="name: expected a name that no open group has"):
            group.new_group(name="twice")
        first.close()
        return group.new_group(name="twice").rank

    assert run_virtual(fn, 2) == [0, 1]


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [-1]])
def test_ranks_of_a_new_group_must_be_distinct_and_exist(ranks):
    with pytest.raises(GroupError, match="ranks: expected distinct ranks from 0 to 1"):
        run_virtual(lambda group: group.new_group(ranks), 2)


def test_a_new_group_has_its_own_ranks_and_memory():
    def fn(group):
        pair = group.new_group([2, 0])
        if group.rank == 1:
            assert pair is None
            return None
        assert pair.name == f"{group.name}.1"
        pair.barrier()
        whole = plait.all_gather(numbered(group), group=pair)
        return pair.rank, pair.world_size, pair.members, whole[:, 0].tolist()

    expected = (2, (2, 0), [2.0, 2.0, 0.0, 0.0])
    assert run_virtual(fn, 3) == [(1, *expected), None, (0, *expected)]


def test_groups_of_some_ranks_interleave_with_different_numbers_of_calls():
    def fn(group):
        left, right = group.new_group([0, 1]), group.new_group([1, 2])
        whole = []
        for step in range(6):
            # The middle rank's regions of the two groups are in no common rhythm.
            order = (left, right) if step % 2 else (right, left)
            for each in order:
                for _ in range(1 if each is left else 2):
                    if each is not None:
                        whole.append(
                            (each is left, plait.all_gather(numbered(group) + step, group=each))
                        )
            plait.all_gather(numbered(group), group=group)
        return whole

    for results in run_virtual(fn, 3, seed=5):
        steps = {True: 0, False: 0}
        for is_left, whole in results:
            step = steps[is_left] if is_left else steps[is_left] // 2
            first = 0 if is_left else 1
            assert_bitwise(whole, gathered(2) + first + step)
            steps[is_left] += 1


# --- closed groups


def test_a_closed_group_takes_no_calls():
    def fn(group):
        other = group.new_group(name="other")
        x = other.empty(2, 4)
        other.close()
        other.close()
        calls = [
            other.barrier,
            other.synchronize,
            other.check,
            lambda: other.workspace,
            lambda: other.empty(3),
            lambda: other.new_group(),
            lambda: other.peer_tensor(x, 0),
        ]
        for call in calls:
            with pytest.raises(
                GroupError, match="group: expected an open group, got 'other', which"
            ):
                call()
        operators = [
            lambda: plait.all_gather(numbered(group), group=other),
            lambda: plait.ag_gemm(numbered(group), torch.ones(3, 4), group=other),
        ]
        for call in operators:
            with pytest.raises(
                GroupError, match=r"group: expected the name of an open group .*'other'"
            ):
                call()
        assert repr(other) == f"Group('other', rank {group.rank} of 2, {group.device}, closed)"
        group.barrier()
        return True

    assert run_virtual(fn, 2) == [True, True]


def test_a_group_ends_with_its_virtual_ranks():
    def fn(group):
        return group, group.new_group([1, 0], "kept")

    for pair in run_virtual(fn, 2):
        for group in pair:
            assert isinstance(group, Group)
            assert group.closed
            with pytest.raises(GroupError, match="expected an open group"):
                group.barrier()
    assert run_virtual(fn, 2)[0][1].closed  # the names are free again


# --- tensors


def test_peers_see_what_empty_gave_them():
    def fn(group):
        x = group.empty(2, 3, dtype=torch.int32)
        y = group.empty(0, 3)
        assert (x.shape, x.dtype, x.is_contiguous(), y.shape) == ((2, 3), torch.int32, True, (0, 3))
        x.copy_(torch.arange(6).view(2, 3) + 10 * group.rank)
        group.barrier()
        peer = (group.rank + 1) % group.world_size
        assert_bitwise(group.peer_tensor(x, group.rank), x)
        found = [group.peer_tensor(x, peer), group.peer_tensor(x[1:, ::2], peer), y]
        assert group.peer_tensor(y, peer).shape == (0, 3)
        result = [each.clone() for each in found]
        group.barrier()
        return result

    for rank, (whole, view, _) in enumerate(run_virtual(fn, 3)):
        expected = (torch.arange(6, dtype=torch.int32) + 10 * ((rank + 1) % 3)).view(2, 3)
        assert_bitwise(whole, expected)
        assert_bitwise(view, expected[1:, ::2])


def test_tensors_of_no_group_or_another_group_are_refused():
    def fn(group):
        other = group.new_group(name="other")
        x = other.empty(2, 4)
        for tensor in (x, x[1:], torch.zeros(2, 4)):
            with pytest.raises(
                GroupError, match=r"tensor: expected a tensor from empty\(\) of group"
            ):
                group.peer_tensor(tensor, 0)
        for peer in (-1, 2):
            with pytest.raises(GroupError, match="peer: expected a rank from 0 to 1"):
                other.peer_tensor(x, peer)
        for view in (x, x[1:]):
            with pytest.raises(
                GroupError, match="x: expected a tensor of group 'virtual' or an ordin"
            ):
                plait.all_gather(view, group=group)
            with pytest.raises(
                GroupError, match=r"weight: .* in the symmetric memory of group 'other'"
            ):
                plait.ag_gemm(numbered(group), view, group=group)
        other.close()
        plait.all_gather(x, group=group)  # ordinary memory now
        return True

    assert run_virtual(fn, 2) == [True, True]


# --- memory


def test_memory_is_reported_and_the_workspace_grows():
    def fn(group):
        before = group.memory()
        group.empty(4, 4)
        sizes = []
        for rows in (1, 1, 40, 40, 40, 2):
            plait.all_gather(numbered(group, rows), group=group)
            memory = group.memory()
            sizes.append([memory[f"region {index}"] for index in range(NUM_REGIONS)])
        return before, memory, sizes

    for before, memory, sizes in run_virtual(fn, 2):
        assert before == {"tensors": 0}
        assert memory["tensors"] == 64
        assert memory["signals"] > 0
        assert memory["retired"] == 0
        assert sizes[0][0] >= 2 * 16 > sizes[0][1] == 0
        assert sizes[3] >= [2 * 40 * 16] * 2
        assert sizes[3] == sizes[4] == sizes[5]


def test_every_rank_learns_that_the_ranks_disagree():
    heard = []

    def fn(group):
        operator = plait.all_gather if group.rank else plait.all_reduce
        try:
            operator(torch.ones(4), group=group)
        except RanksDisagreeError as error:
            heard.append((group.rank, str(error)))
            raise

    with pytest.raises(RanksDisagreeError):
        run_virtual(fn, 3)
    assert sorted(rank for rank, _ in heard) == [0, 1, 2]
    assert all("all_gather" in text and "all_reduce" in text for _, text in heard)


def test_forty_eight_layers_share_one_workspace():
    """Two operators a layer, and not a byte more than the first layer took."""
    weights = [torch.randn(16, 16) for _ in range(2)]

    def fn(group):
        x, memory = torch.randn(4, 16), []
        for _ in range(48):
            hidden = plait.ag_gemm(x, weights[group.rank], group=group)
            x = plait.gemm_rs(hidden, weights[group.rank], group=group) / 16
            memory.append(group.memory())
        return memory

    for memory in run_virtual(fn, 2):
        assert memory[0] == memory[-1]
        assert memory[0]["region 0"] > 0


def test_more_than_the_workspace_is_refused_with_the_setting_to_change():
    def fn(group):
        limit = group.workspace.capacity_bytes
        assert limit == 4096
        with pytest.raises(CapacityError) as caught:
            group.take_region(limit + 1)
        text = str(caught.value)
        assert "PLAIT_WORKSPACE_BYTES: expected at least 8194 bytes for this call" in text
        assert "got 8192 bytes" in text
        with pytest.raises(CapacityError, match="not even one row a rank fits"):
            plait.all_gather(torch.ones(1, 3000), group=group)
        region = group.take_region(limit)
        for offset, shape in ((0, (1025,)), (4096, (1,)), (-4, (1,)), (2, (1,))):
            with pytest.raises(
                CapacityError, match="offset_bytes: expected an aligned range within"
            ):
                region.data(0, offset, shape, torch.float32)
        with pytest.raises(CapacityError, match="word: expected 0 <= word"):
            region.word(0, -1)
        # Slices make room for what does not fit at once.
        return plait.all_gather(numbered(group, 100, 8), group=group)

    with override(workspace_bytes=8192):
        for whole in run_virtual(fn, 2):
            assert_bitwise(whole, gathered(2, 100, 8))


def test_making_and_closing_groups_leaves_nothing():
    def registered(group):
        world = group.transport.world
        device = world.virtual_device
        return [
            len(group_module._groups),
            len(group_module._resolvers),
            len(group_module._symmetric_owner),
            len(group.transport._buffers),
            len(device._regions),
            len(device.wake_words),
            len(device._members),
            len(world.exchanges),
        ]

    def fn(group):
        group.barrier()
        counts, python_bytes = [], []
        for index in range(200):
            other = group.new_group([1, 0])
            other.empty(8)
            if index % 20 == 0:
                other.barrier()
            other.close()
            if index % 50 == 49:
                group.barrier()
                gc.collect()
                counts.append(registered(group))
                python_bytes.append(tracemalloc.get_traced_memory()[0])
                group.barrier()
        return counts, python_bytes

    tracemalloc.start()
    try:
        for counts, python_bytes in run_virtual(fn, 2, check=False):
            assert counts == counts[:1] * 4
            # Two counters a group stay until the virtual ranks end: a few hundred bytes.
            assert python_bytes[-1] - python_bytes[0] < 150 * 1000
    finally:
        tracemalloc.stop()
    assert not group_module._groups
    assert not group_module._resolvers
    assert not group_module._symmetric_owner


# --- order and agreement


def test_a_barrier_orders_memory():
    def fn(group):
        x = group.empty(1)
        seen = []
        for step in range(3):
            x.fill_(step)
            group.barrier()
            seen += [int(group.peer_tensor(x, peer)) for peer in range(group.world_size)]
            group.barrier()
        return seen

    for seed in range(4):
        for seen in run_virtual(fn, 3, seed):
            assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


class Barriers(Observer):
    """How often each rank's barrier began and ended, in one line of events."""

    def __init__(self):
        self.events = []

    def item_started(self, item):
        if item.operator == "barrier":
            self.events.append(("begins", item.rank))

    def item_finished(self, item):
        if item.operator == "barrier":
            self.events.append(("ends", item.rank))


@pytest.mark.parametrize("schedule", ["random", "late:0", "late:2", "waiter_first"])
def test_no_barrier_ends_before_all_have_begun(schedule):
    log = Barriers()
    run_virtual(
        lambda group: [group.barrier() for _ in range(3)], 3, 1, schedule=schedule, observers=[log]
    )
    begun, ended = [0, 0, 0], [0, 0, 0]
    for what, rank in log.events:
        if what == "begins":
            begun[rank] += 1
        else:
            ended[rank] += 1
            assert min(begun) >= ended[rank]
    assert begun == ended == [3, 3, 3]


def disagree(*calls, prepare=True):
    """The error of ranks that make one of `calls` each."""

    def fn(group):
        for _ in range(NUM_REGIONS * prepare):
            plait.all_gather(numbered(group, 64), group=group)
        calls[group.rank](group)

    with pytest.raises(RanksDisagreeError) as caught:
        run_virtual(fn, len(calls))
    return caught.value


def gather(rows):
    return lambda group: plait.all_gather(numbered(group, rows), group=group)


def gemm(k):
    return lambda group: plait.ag_gemm(torch.ones(2, k), torch.ones(3, k), group=group)


def empty(rows):
    return lambda group: group.empty(rows)


def split(rank):
    return lambda group: group.new_group([rank])


@pytest.mark.parametrize("prepare", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ((gather(2), lambda group: group.barrier()), ["all_gather|workspace", "barrier"]),
        ((gather(2), gemm(4)), ["all_gather|workspace", "ag_gemm"]),
        ((gather(2), gather(4)), [r"\(2, 2\)|workspace", r"\(4, 4\)|workspace"]),
        ((gemm(4), gemm(8)), ["ag_gemm .*K=4", "ag_gemm .*K=8"]),
        ((empty(2), empty(3)), [r"empty \[2\]", r"empty \[3\]"]),
        ((split(0), split(1)), [r"new_group \[0\]", r"new_group \[1\]"]),
    ],
)
def test_ranks_that_disagree_are_shown_both_calls(calls, words, prepare):
    error = disagree(*calls, prepare=prepare)
    assert sorted(error.signatures) == [0, 1]
    for rank, pattern in enumerate(words):
        lines = [line for line in str(error).splitlines() if f"rank {rank}: #" in line]
        assert len(lines) == 1
        assert re.search(pattern, lines[0]), str(error)
    assert "same operators in the same order" in error.remedy
