"""What every transport must do; each check is called on all ranks of a group of at least two.

Run as a worker, it checks ProcessTransport.
"""

from __future__ import annotations

import pytest
import torch

from plait.errors import UnsupportedError
from plait.symm.transports.base import Transport
from plait.symm.transports.emulated import EmulatedTransport


def _who_answers(transport: Transport) -> list[int]:
    """The rank whose value stands at each rank's place after an exchange."""
    if isinstance(transport, EmulatedTransport):
        return [transport.rank] * transport.world_size
    return list(range(transport.world_size))


def identity(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.world_size
    assert transport.executor.device == transport.device
    assert transport.executor.num_sms >= 1
    transport.executor.synchronize()


def exchange_is_in_rank_order(transport: Transport) -> None:
    for turn in range(3):
        got = transport.exchange({"rank": transport.rank, "turn": turn})
        assert got == [{"rank": rank, "turn": turn} for rank in _who_answers(transport)]


def exchange_takes_tensors(transport: Transport) -> None:
    def value(rank: int) -> torch.Tensor:
        whole = torch.arange(20, dtype=torch.float32).view(4, 5) + rank
        return whole.to(transport.device, torch.bfloat16).t()[: rank + 2]

    got = transport.exchange(value(transport.rank))
    for tensor, rank in zip(got, _who_answers(transport), strict=True):
        assert tensor.device == transport.device
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, value(rank))


def pinned_words_are_zero(transport: Transport) -> None:
    words = transport.pinned(5)
    assert words.dtype == torch.int32
    assert words.device.type == "cpu"
    assert words.tolist() == [0] * 5
    words[3] = 7
    assert transport.pinned(5).tolist() == [0] * 5


def buffers_are_seen_by_peers(transport: Transport) -> None:
    if not transport.symmetric:
        with pytest.raises(UnsupportedError, match="unfused"):
            transport.allocate(64, "test")
        return
    buffer = transport.allocate(40, "test")
    assert buffer.local.dtype == torch.uint8
    assert buffer.local.is_contiguous()
    assert buffer.nbytes >= 40
    assert len(buffer.peers) == transport.world_size
    assert buffer.peers[transport.rank].data_ptr() == buffer.local.data_ptr()
    assert len(set(buffer.addresses())) == transport.world_size
    assert all(address % 16 == 0 for address in buffer.addresses())
    buffer.local.fill_(transport.rank + 1)
    transport.executor.synchronize()
    transport.exchange(None)
    if not isinstance(transport, EmulatedTransport):
        seen = [int(peer[39]) for peer in buffer.peers]
        assert seen == [rank + 1 for rank in range(transport.world_size)]
    transport.exchange(None)
    buffer.peers[(transport.rank + 1) % transport.world_size].fill_(transport.rank + 100)
    transport.executor.synchronize()
    transport.exchange(None)
    if not isinstance(transport, EmulatedTransport):
        assert int(buffer.local[0]) == (transport.rank - 1) % transport.world_size + 100
    transport.free(buffer)
    transport.free(buffer)  # once more does no harm


def words_start_at_zero(transport: Transport) -> None:
    if not transport.symmetric:
        return
    buffer = transport.allocate(256, "test words", words=True)
    assert not any(int(peer.count_nonzero()) for peer in buffer.peers)
    other = transport.allocate(256, "more test words", words=True)
    assert not set(buffer.addresses()) & set(other.addresses())
    transport.exchange(None)
    transport.free(buffer)
    transport.free(other)


def subgroups_keep_the_given_order(transport: Transport) -> None:
    last = transport.world_size - 1
    chosen = (last, 0)
    group = transport.subgroup(chosen, "check")
    assert (group is None) == (transport.rank not in chosen)
    if group is not None:
        assert group.world_size == 2
        assert chosen[group.rank] == transport.rank
        assert group.device == transport.device
        expected = [chosen[rank] for rank in _who_answers(group)]
        assert group.exchange(transport.rank) == expected
        group.close()
    exchange_is_in_rank_order(transport)
    again = transport.subgroup(chosen, "check again")  # the same ranks may meet twice
    if again is not None:
        again.close()


def closes_twice(transport: Transport) -> None:
    everybody = transport.subgroup(tuple(range(transport.world_size)), "to close")
    assert everybody is not None
    if everybody.symmetric:
        everybody.allocate(64, "left over")
    everybody.exchange(None)
    everybody.close()
    everybody.close()
    exchange_is_in_rank_order(transport)


CHECKS = {
    check.__name__: check
    for check in (
        identity,
        exchange_is_in_rank_order,
        exchange_takes_tensors,
        pinned_words_are_zero,
        buffers_are_seen_by_peers,
        words_start_at_zero,
        subgroups_keep_the_given_order,
        closes_twice,
    )
}


if __name__ == "__main__":
    from functools import partial

    from plait import Group
    from tests.processes import process_group, worker_main

    with process_group():
        transport = Group.from_process_group().transport
        worker_main({name: partial(check, transport) for name, check in CHECKS.items()}, 40)
