"""How the host processes of a group meet: gloo connections of its own, one process a rank.

Not `torch.distributed.new_group`: its timeout would not be plait's deadline everywhere, it sorts
the ranks, and it names a group after those that exist, so that one failed or destroyed group makes
ranks disagree about the next. Messages run on the CPU, whatever device the ranks compute on.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from plait.settings import settings

_meetings: Counter[tuple[int, ...]] = Counter()


class Hosts:
    """The processes of a group, in the group's own order of ranks.

    `name` is the same on all of them and never used twice; `store` is theirs alone.
    """

    def __init__(self, global_ranks: Sequence[int]) -> None:
        """Collective over `global_ranks` (ranks of the default process group, without repeats).

        Every later wait for a peer, and that for this call, raises PyTorch's error after
        PLAIT_DEADLINE_S.
        """
        self.global_ranks = tuple(global_ranks)
        self.rank = self.global_ranks.index(dist.get_rank())
        # All members count the meetings of exactly these ranks, failed ones included.
        _meetings[self.global_ranks] += 1
        members = ",".join(map(str, self.global_ranks))
        self.name = f"plait {members} #{_meetings[self.global_ranks]}"
        timeout = timedelta(seconds=settings().deadline_s)
        # A clone, because a timeout belongs to a connection and the default store has its own.
        default_store: Any = _get_default_store()
        self.store = PrefixStore(self.name, default_store.clone())
        self.store.set_timeout(timeout)
        self.gloo: Any = ProcessGroupGloo(self.store, self.rank, self.world_size, timeout)
        # A rank that closed at once would break the connections that its peers are still making.
        self.gloo.barrier().wait()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.global_ranks)

    def exchange(self, value: Any, device: torch.device) -> list[Any]:
        """Collective: every rank's `value` (anything that pickles) in rank order.

        A tensor may differ in shape from rank to rank; all arrive as copies on `device`.
        """
        is_tensor = isinstance(value, torch.Tensor)
        # A clone, because pickling a view would send the whole memory that it looks into.
        sent = pickle.dumps(value.detach().cpu().clone() if is_tensor else value)
        payload = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        size = torch.tensor([len(sent)]).view(torch.uint8)
        sizes = self.all_gather_bytes(size, [size.numel()] * self.world_size)
        counts = [int(each.view(torch.int64)) for each in sizes]
        received = self.all_gather_bytes(payload, counts)
        values = [pickle.loads(each.numpy().tobytes()) for each in received]
        return [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]

    def all_gather_bytes(self, sent: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Collective: every rank's uint8 vector, rank p's being `counts[p]` long."""
        longest = max(counts)
        if longest == 0:
            return [sent.new_empty(0) for _ in counts]
        # gloo gathers equal sizes only.
        padded = torch.nn.functional.pad(sent, (0, longest - sent.numel()))
        received = sent.new_empty(self.world_size, longest)
        self.gloo.allgather([list(received.unbind())], [padded]).wait()
        return [row[:count] for row, count in zip(received, counts, strict=True)]

    def all_to_all_bytes(
        self, sent: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Collective: give rank p the uint8 vector `sent[p]`, get `counts[p]` bytes from it."""
        received = sent[0].new_empty(sum(counts))
        splits = [each.numel() for each in sent]
        self.gloo.alltoall_base(received, torch.cat(list(sent)), list(counts), splits).wait()
        return list(received.split(list(counts)))

    def subgroup(self, ranks: Sequence[int]) -> Hosts | None:
        """Collective over the chosen ranks of this group; None on a rank that is not one."""
        if self.rank not in ranks:
            return None
        return Hosts([self.global_ranks[rank] for rank in ranks])

    def close(self) -> None:
        """Local: end the connections. Idempotent."""
        self.gloo = None


__all__ = ["Hosts"]
