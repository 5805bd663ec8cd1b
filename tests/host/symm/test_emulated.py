"""Emulated groups: the text of a link, and what works on the CPU."""

from __future__ import annotations

import pytest
import torch

import plait
from plait import Group
from plait.errors import ArgumentError, GroupError, RankCountError, UnsupportedError
from plait.symm.transports.link import Link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("pcie", Link("pcie")),
        ("paced:360", Link("paced", 360.0)),
        ("paced:22.5", Link("paced", 22.5)),
        ("paced:160+traffic", Link("paced", 160.0, traffic=True)),
        ("paced:360@5", Link("paced", 360.0, latency_us=5.0)),
        ("paced:360@0.5+traffic", Link("paced", 360.0, traffic=True, latency_us=0.5)),
    ],
)
def test_link_text(text: str, link: Link):
    assert Link.parse(text) == link
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize(
    "text",
    ["", "nvlink", "PCIE", "pcie+traffic", "pcie:55", "paced", "paced:", "paced:0", "paced:-1",
     "paced:nan", "paced:inf", "paced:fast", "paced:+traffic", "paced:160+", "paced:160+traffics",
     "paced:160+traffic+traffic", "paced:160@", "paced:160@-1", "paced:160@nan", "paced:@3",
     "paced:160+traffic@5", "slow:160", None, 360],
)  # fmt: skip
def test_bad_link_text(text: object):
    with pytest.raises(ArgumentError, match=r"paced:160\+traffic") as caught:
        Link.parse(text)
    assert caught.value.argument == "link"
    assert caught.value.got == repr(text)


@pytest.mark.parametrize("world_size", [0, 65, 2.0, True])
def test_bad_world_size(world_size: object):
    with pytest.raises(RankCountError, match="from 1 to 64"):
        Group.emulated(world_size, link="pcie", device="cpu")


@pytest.fixture
def group():
    made = Group.emulated(3, link="paced:160+traffic", device="cpu")
    yield made
    made.close()


def test_the_live_rank_is_the_first(group: Group):
    assert (group.rank, group.world_size) == (0, 3)
    assert group.name.startswith("emulated 3 over paced:160+traffic")
    other = Group.emulated(3, link="paced:160+traffic", device="cpu")
    assert other.name != group.name
    other.close()


def test_memory_of_peers(group: Group):
    tensor = group.empty(4, 5, dtype=torch.bfloat16)
    tensor.fill_(1)
    peer = group.peer_tensor(tensor, 2)
    peer.fill_(2)
    assert peer.shape == tensor.shape
    assert tensor.eq(1).all()
    assert group.memory()["tensors"] == 40
    region = group.take_region(1000)
    assert len(region.buffer.peers) == 3
    assert region.capacity_bytes >= 1000


@pytest.mark.parametrize("call", ["barrier", "all_gather", "ag_gemm"])
def test_operators_say_that_they_need_a_gpu(group: Group, call: str):
    x, weight = torch.ones(2, 16), torch.ones(4, 16)
    calls = {
        "barrier": group.barrier,
        "all_gather": lambda: plait.all_gather(x, group=group),
        "ag_gemm": lambda: plait.ag_gemm(x, weight, group=group),
    }
    with pytest.raises(UnsupportedError, match="emulated peers on a GPU") as caught:
        calls[call]()
    assert "paced:160+traffic" in caught.value.got


def test_reference_sees_the_live_rank_everywhere(group: Group):
    x = torch.randn(2, 3)
    assert torch.equal(plait.all_gather(x, group=group, impl="reference"), torch.cat([x] * 3))


def test_subgroups(group: Group):
    smaller = group.new_group([2, 0])
    assert smaller is not None
    assert (smaller.rank, smaller.world_size) == (1, 2)
    assert group.new_group([1, 2]) is None
    smaller.close()


def test_closed(group: Group):
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.barrier()
