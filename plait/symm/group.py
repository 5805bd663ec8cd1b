"""Group: the ranks that work together, their symmetric memory and their health.

The same name on all ranks finds each rank's own Group, so that one compiled graph serves every
rank: operators carry the name, and `get_group` resolves it for the rank that calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.backends.commands import Launch, Program
from plait.errors import GroupError, PeerTimeoutError, RanksDisagreeError, UnsupportedError
from plait.settings import settings
from plait.symm import signals
from plait.symm.regions import close_region, open_region
from plait.symm.transports.base import SymmetricBuffer, Transport
from plait.symm.workspace import BARRIER_REGION, Region, Workspace


class Group:
    """One rank's view of a group of `world_size` ranks on `device`.

    Made by `plait.run_virtual` (virtual ranks) or `Group.from_process_group` (torch.distributed).
    """

    def __init__(
        self, name: str, transport: Transport, rank_resolver: Callable[[], int] | None = None
    ) -> None:
        self.name = name
        self.transport = transport
        self.rank, self.world_size, self.device = (
            transport.rank,
            transport.world_size,
            transport.device,
        )
        self.executor = transport.executor
        self.members: tuple[int, ...] = getattr(transport, "members", ())
        self.closed = False
        self._error: PeerTimeoutError | None = None
        self._sequence = 0
        self._tensors: dict[int, SymmetricBuffer] = {}
        self._workspace: Workspace | None = None
        self._status: torch.Tensor | None = None
        _register(self, rank_resolver)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size}, {self.device}{state})"

    @staticmethod
    def from_process_group(
        process_group: Any = None, *, device: torch.device | str | None = None
    ) -> Group:
        """Collective: a Group over a torch.distributed process group (default: the world).

        `device` is this rank's GPU, or "cpu" for gloo groups, whose operators run unfused.
        """
        from plait.symm.transports.process import make_process_group

        return make_process_group(process_group, device)

    @staticmethod
    def emulated(world_size: int, *, link: str, device: torch.device | str | None = None) -> Group:
        """One live rank (rank 0) of `world_size`; its peers are memory of this process.

        For measurements with one rank on the whole `device` (default: the current GPU, or the CPU
        without one, where programs raise UnsupportedError). `link` is one of

        - "pcie": peers are pinned host memory, the copy engine moves real bytes both ways;
        - "paced:360": peers are memory on the device and signals come no sooner than 360 GB/s one
          way and 3 us of latency allow ("paced:360@5": 5 us); copies of rows do not run;
        - "paced:360+traffic": and as many bytes move in the background.

        ArgumentError for other text. One SM is held by the pacer, the kernel that signals for the
        peers: operators use the others. It is a model: what "arrives" is what the region holds
        already, and peers do at each step what the live rank does. docs/design/emulation.md says
        what is modelled. Inside `with group.executor.communication_only():` calls make the same
        transfers without computing anything. Call each shape twice before a graph captures it.
        """
        from plait.symm.transports.emulated import make_emulated_transport

        return Group(*make_emulated_transport(world_size, link, device))

    def new_group(
        self, ranks: Sequence[int] | None = None, name: str | None = None
    ) -> Group | None:
        """Collective over this group: a group of some of its ranks (default: all), in their order.

        None on ranks that are left out. Groups have their own memory and order of calls.
        """
        self.require_open()
        chosen = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        if (
            len(set(chosen)) != len(chosen)
            or any(not 0 <= rank < self.world_size for rank in chosen)
            or not chosen
        ):
            raise GroupError(
                argument="ranks",
                expected=f"distinct ranks from 0 to {self.world_size - 1}",
                got=str(list(chosen)),
                remedy="Give each rank of the new group once.",
            )
        self.agree(f"new_group {list(chosen)} {name or ''}")
        self._children = getattr(self, "_children", 0) + 1
        full_name = name or f"{self.name}.{self._children}"
        transport = self.transport.subgroup(chosen, full_name)
        return None if transport is None else Group(full_name, transport, _resolvers.get(self.name))

    # --- memory
    @property
    def workspace(self) -> Workspace:
        """Collective at first use: the memory that all operators of this group share."""
        self.check()  # a broken group must not wait for a peer to make or grow memory
        if not self.transport.symmetric:
            raise UnsupportedError(
                argument="group",
                expected="symmetric memory between the ranks",
                got=f"{self!r}, whose ranks share none",
                remedy="Use impl='unfused' (or 'auto'), or ranks on GPUs or in plait.run_virtual.",
            )
        if self._workspace is None:
            self.agree("first use of symmetric memory")
            self._status = self.transport.pinned(16)
            self._workspace = Workspace(self.transport, self._status)
        return self._workspace

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective: an uninitialized contiguous tensor of the same shape on every rank, in
        symmetric memory; `peer_tensor` views the other ranks'. Freed by `close()`."""
        self.require_open()
        if not self.transport.symmetric:
            return torch.empty(shape, dtype=dtype, device=self.device)
        self.agree(f"empty {list(shape)} {dtype}")
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self.transport.allocate(nbytes, f"tensor {len(self._tensors)}")
        self._tensors[buffer.local.data_ptr()] = buffer
        _symmetric_owner[buffer.local.data_ptr()] = self.name
        return buffer.local[:nbytes].view(dtype).view(shape)

    def peer_tensor(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Rank `peer`'s counterpart of a tensor from `empty()`, or of a view of one."""
        self.require_open()
        if not 0 <= peer < self.world_size:
            raise GroupError(
                argument="peer",
                expected=f"a rank from 0 to {self.world_size - 1}",
                got=str(peer),
                remedy="Pass a rank of this group.",
            )
        buffer = self._tensors.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            raise GroupError(
                argument="tensor",
                expected=f"a tensor from empty() of group {self.name!r}",
                got=f"a tensor of {tuple(tensor.shape)} that is not",
                remedy="Pass the tensor that empty() returned.",
            )
        there = buffer.peers[peer].view(tensor.dtype)
        offset = there.storage_offset() + tensor.storage_offset()
        return there.as_strided(tensor.shape, tensor.stride(), offset)

    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory on this rank, by use."""
        report = {} if self._workspace is None else dict(self._workspace.memory())
        report["tensors"] = sum(buffer.nbytes for buffer in self._tensors.values())
        return report

    # --- order and health
    def barrier(self) -> None:
        """All ranks have come here: their earlier work on this group's streams is done."""
        if not self.transport.symmetric:
            self.require_open()
            self.transport.exchange(None)
            return
        region = self.workspace.regions[BARRIER_REGION]
        from plait.symm.kernels import _barrier_kernel

        args = {"ctx_ptr": region.ctx, "OP": int(signals.Operator.BARRIER)}
        self.run(
            Program("barrier", [Launch(_barrier_kernel, 1, args, num_warps=1)]), call="barrier"
        )

    def synchronize(self) -> None:
        """Wait on the host until this rank's work is done, then `check()`."""
        self.require_open()
        self.executor.synchronize()
        self.check()

    def run(self, program: Program, call: str) -> None:
        """Run a program of this group after its health and, in debug mode, agreement checks."""
        self.check()
        self.agree(call)
        self.executor.run(program)
        if self.device.type == "cpu":
            self.check()

    def launch(
        self,
        kernel: Any,
        grid: int,
        *,
        region: Region | None = None,
        num_warps: int = 4,
        num_stages: int = 3,
        operator: str = "user",
        **args: Any,
    ) -> None:
        """Run a kernel of your own, on every rank of the group if it signals or waits.

        Args:
            kernel: a `@triton.jit` function; it may call what `plait.symm.lang` offers.
            grid: blocks of its 1-D grid. Blocks that wait must all be resident: at most
                `executor.num_sms`.
            region: from `take_region(nbytes)`: room for data and signal words on every rank. The
                kernel gets it as `ctx_ptr`. It is opened before and closed after the kernel, so
                that no peer writes into it before this rank has read what the last call left.
            operator: name of the call in timelines and disagreements.
            args: the kernel's other arguments by name, constexprs included.

        Within one call each word READY + i of a rank has one writer, and every signal that is sent
        to a rank is waited for by that rank. PeerTimeoutError: a peer never came; UnsupportedError:
        the ranks share no memory.
        """
        program = Program(operator, members=self.members)
        if region is None:
            program.add(Launch(kernel, grid, args, num_warps, num_stages))
        else:
            context = {"ctx_ptr": region.ctx, **args}
            program.add(
                open_region(region, 1, signals.Operator.USER),
                Launch(kernel, grid, context, num_warps, num_stages),
                close_region(region),
            )
        self.run(program, f"{operator} {kernel.__name__}")

    def agree(self, call: str) -> None:
        """Raise RanksDisagreeError on every rank if another made a different call here.

        Always on for virtual ranks on the CPU; elsewhere with PLAIT_DEBUG=1, as it then meets the
        peers on the host.
        """
        self._sequence += 1
        signature = f"#{self._sequence} {call}"
        publish = getattr(self.transport, "publish", None)
        if publish is not None:
            publish(self._sequence, signature)
        elif settings().debug:
            signatures = self.transport.exchange(signature)
            if len(set(signatures)) > 1:
                raise RanksDisagreeError(dict(enumerate(signatures)))

    def exchange_tensor(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Collective on the host: copies of every rank's tensor, of any shape. For references."""
        self.check()
        self.agree(call)
        own = tensor.detach().clone()
        self.executor.synchronize()
        return list(self.transport.exchange(own))

    def require_open(self) -> None:
        """Raise GroupError if this group is closed."""
        if self.closed:
            raise GroupError(
                argument="group",
                expected="an open group",
                got=f"{self.name!r}, which is closed",
                remedy="Make a new group.",
            )

    def check(self) -> None:
        """Raise PeerTimeoutError if a wait of this group passed its deadline; cheap."""
        self.require_open()
        if self._error is not None:
            raise self._error
        if self._status is None or int(self._status[0]) == 0 or self._workspace is None:
            return
        words = self._workspace.word_views[self.rank]
        record = [
            int(word)
            for word in words[signals.RECORD : signals.RECORD + signals.NUM_RECORD_WORDS].cpu()
        ]
        rank, operator, word, peer, expected, seen, _region = record
        name = (
            signals.Operator(operator).name.lower()
            if operator in set(signals.Operator)
            else "an operator"
        )
        self._error = PeerTimeoutError(
            rank, name, signals.describe_word(word), peer, expected, seen
        )
        raise self._error

    def close(self) -> None:
        """Release this rank's memory; needs no peer, also after a timeout. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for address in self._tensors:
            _symmetric_owner.pop(address, None)
        self._tensors.clear()
        self._workspace = None
        self.transport.close()
        _unregister(self)

    def take_region(self, nbytes: int, call: str = "a call") -> Region:
        """The next region of the workspace, with room for `nbytes` (the same on every rank).

        Ranks whose calls differ would not meet to grow it, so `call` is compared first.
        """
        if self.workspace.must_grow(nbytes):
            self.agree(f"{call}, with {nbytes} bytes of workspace")
        return self.workspace.take(nbytes)


# --- names
_groups: dict[str, dict[int, Group]] = {}
_resolvers: dict[str, Callable[[], int]] = {}
_symmetric_owner: dict[int, str] = {}


def _register(group: Group, resolver: Callable[[], int] | None) -> None:
    key = _key(group, resolver)
    ranks = _groups.setdefault(group.name, {})
    if key in ranks and not ranks[key].closed:
        raise GroupError(
            argument="name",
            expected="a name that no open group has",
            got=repr(group.name),
            remedy="Close the other group first, or give this one another name.",
        )
    ranks[key] = group
    if resolver is not None:
        _resolvers[group.name] = resolver


def _key(group: Group, resolver: Callable[[], int] | None) -> int:
    return 0 if resolver is None else resolver()


def _unregister(group: Group) -> None:
    ranks = _groups.get(group.name, {})
    for key in [key for key, value in ranks.items() if value is group]:
        del ranks[key]
    if not ranks:
        _groups.pop(group.name, None)
        _resolvers.pop(group.name, None)


def close_groups(belongs: Callable[[Group], bool]) -> None:
    """Close every open group of this process for which `belongs` is true."""
    for group in [group for ranks in _groups.values() for group in ranks.values()]:
        if belongs(group):
            group.close()


def get_group(name: str) -> Group:
    """The calling rank's group of this name; GroupError if there is none."""
    ranks = _groups.get(name)
    if ranks:
        resolver = _resolvers.get(name)
        group = ranks.get(0 if resolver is None else resolver())
        if group is not None:
            return group
    raise GroupError(
        argument="group",
        expected="the name of an open group of this rank",
        got=repr(name),
        remedy="Pass a Group that is not closed, of run_virtual or from_process_group.",
    )


def world_size_of(name: str) -> int:
    """World size of a group by name, from any rank and thread (for shape inference)."""
    ranks = _groups.get(name)
    if not ranks:
        return get_group(name).world_size
    return next(iter(ranks.values())).world_size


def check_belongs(argument: str, tensor: torch.Tensor, group: Group) -> None:
    """Raise GroupError if a tensor lies in another group's symmetric memory."""
    if not _symmetric_owner:
        return
    owner = _symmetric_owner.get(tensor.untyped_storage().data_ptr())
    if owner is not None and owner != group.name:
        raise GroupError(
            argument=argument,
            expected=f"a tensor of group {group.name!r} or an ordinary tensor",
            got=f"a tensor in the symmetric memory of group {owner!r}",
            remedy="Copy it, or allocate it with this group's empty().",
        )


__all__ = ["Group", "check_belongs", "close_groups", "get_group", "world_size_of"]
