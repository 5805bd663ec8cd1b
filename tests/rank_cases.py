"""What ranks with real peers must do: run by virtual ranks, processes on one GPU and several GPUs.

Each case is called by all ranks of a group and raises where something is wrong. The data are whole
numbers so small that all products and partial sums are exact: results are known bit for bit,
whatever is added first. They are compared on the device, so that no round waits for the host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import plait
from plait import Group
from plait.errors import PeerTimeoutError

BF16 = torch.bfloat16
_NEVER = 1 << 30


# --- data
def random_base(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    """What `whole_numbers` makes data of."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << 15, shape, generator=generator, dtype=torch.int32).to(device)


def whole_numbers(base: torch.Tensor, turn: int) -> torch.Tensor:
    """-1, 0 and 1, others in each of the first thousands of turns; made on the device."""
    return (base * (2 * turn + 1) >> 5) % 3 - 1


# --- operators: each takes x [world_size * rows, K] and weight [N, K], and uses a share of x or all
def _share(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x[: len(x) // group.world_size]


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, Group], torch.Tensor]] = {
    "ag_gemm": lambda x, w, g: plait.ag_gemm(_share(x, g), w, group=g, impl="fused"),
    "gemm_rs": lambda x, w, g: plait.gemm_rs(x, w, group=g, impl="fused"),
    "gemm_ar_one_shot": lambda x, w, g: plait.gemm_ar(
        _share(x, g), w, group=g, algorithm="one_shot", impl="fused"
    ),
    "gemm_ar_two_shot": lambda x, w, g: plait.gemm_ar(
        x, w, group=g, algorithm="two_shot", impl="fused"
    ),
    "all_gather": lambda x, w, g: plait.all_gather(_share(x, g), group=g, impl="fused"),
    "reduce_scatter": lambda x, w, g: plait.reduce_scatter(x, group=g, impl="fused"),
    "all_reduce": lambda x, w, g: plait.all_reduce(x, group=g, impl="fused"),
    "all_to_all": lambda x, w, g: plait.all_to_all(x, group=g, impl="fused"),
}
GEMMS = ("ag_gemm", "gemm_rs", "gemm_ar_one_shot", "gemm_ar_two_shot")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def expected(name: str, xs: torch.Tensor, ws: torch.Tensor, rank: int) -> torch.Tensor:
    """What rank `rank` should get, where rank r gave xs[r] and ws[r].

    In the dtype of xs, but sums over ranks, of partial sums in that dtype, are fp32 at least.
    """
    world_size = len(xs)
    wide = torch.promote_types(xs.dtype, torch.float32)
    shares = xs.chunk(world_size, 1)[0]
    if name == "ag_gemm":
        return shares.flatten(0, 1) @ ws[rank].t()
    if name == "gemm_rs":
        return (xs @ ws.mT).to(wide).sum(0).chunk(world_size)[rank]
    if name.startswith("gemm_ar"):
        return ((shares if name.endswith("one_shot") else xs) @ ws.mT).to(wide).sum(0)
    if name == "all_gather":
        return shares.flatten(0, 1)
    if name == "all_to_all":
        return torch.cat([x.chunk(world_size)[rank] for x in xs])
    total = xs.to(wide).sum(0)
    return total if name == "all_reduce" else total.chunk(world_size)[rank]


class Tally:
    """Counts wrong elements on the device; `done` waits and fails if there are any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # wrong, first turn

    @property
    def compared(self) -> bool:
        """Whether `check` was called at all."""
        return bool(self._found)

    def check(self, name: str, turn: int, got: torch.Tensor, want: torch.Tensor) -> None:
        """Compare with `want` after rounding it to the dtype of `got`; a NaN is wrong."""
        assert got.shape == want.shape, f"{name}: {list(got.shape)}, not {list(want.shape)}"
        if name not in self._found:
            zero = torch.zeros((), dtype=torch.int64, device=self._device)
            self._found[name] = zero, zero + _NEVER
        wrong, first = self._found[name]
        new = (got != want.to(got.dtype)).sum()
        wrong += new
        first.copy_(torch.minimum(first, (new == 0) * _NEVER + turn))

    def done(self) -> None:
        """Wait for the device; fail with the number of wrong elements and the first wrong turn."""
        failures = [
            f"{name}: {int(wrong)} wrong elements, first in turn {int(first)}"
            for name, (wrong, first) in self._found.items()
            if int(wrong)
        ]
        assert self.compared, "nothing was compared"
        assert not failures, "; ".join(failures)


class Rounds:
    """The data of all ranks for every turn, and the calls that use them; the same on all ranks."""

    def __init__(
        self,
        group: Group,
        rows: int | None = None,
        *,
        features: int | None = None,
        cols: int | None = None,
        dtype: torch.dtype = BF16,
        seed: int = 0,
    ) -> None:
        self.group, self.dtype = group, dtype
        small = group.device.type == "cpu"  # where kernels are interpreted
        rows = rows or (4 if small else 40)
        features = features or (16 if small else 128)
        cols = cols or (8 if small else 192)
        shape = (group.world_size, group.world_size * rows, features)
        self._xs = random_base(*shape, seed=seed, device=group.device)
        shape = (group.world_size, cols, features)
        self._ws = random_base(*shape, seed=seed + 1, device=group.device)
        self.tally = Tally(group.device)
        # Inputs that stay where they are, for graphs.
        self.x, self.w = (torch.empty(each.shape[1:], dtype=dtype, device=group.device)
                          for each in (self._xs, self._ws))  # fmt: skip

    def data(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [world_size, world_size * rows, K] and weight [world_size, N, K] of all ranks."""
        xs, ws = whole_numbers(self._xs, turn), whole_numbers(self._ws, turn + 1)
        return xs.to(self.dtype), ws.to(self.dtype)

    def eager(self, turn: int, names: Sequence[str]) -> None:
        """Call and compare, with new tensors."""
        xs, ws = self.data(turn)
        rank = self.group.rank
        outs = [CALLS[name](xs[rank], ws[rank], self.group) for name in names]
        self.compare(turn, names, outs)

    def place(self, turn: int) -> None:
        """Put the turn's own data where `captured` reads them."""
        xs, ws = self.data(turn)
        self.x.copy_(xs[self.group.rank])
        self.w.copy_(ws[self.group.rank])

    def captured(self, names: Sequence[str]) -> Replay:
        """A graph of these calls on `x` and `w`, after calls for every region."""

        def call() -> list[torch.Tensor]:
            return [CALLS[name](self.x, self.w, self.group) for name in names]

        self.place(0)
        for _ in range(2):
            call()
            CALLS[names[0]](self.x, self.w, self.group)  # so that each meets every region
            call()
        self.group.synchronize()
        return Replay(call, self.group.device)

    def replay(self, turn: int, names: Sequence[str], graph: Replay) -> None:
        """Replay with the turn's data and compare."""
        self.place(turn)
        self.compare(turn, names, graph.replay(), "replay ")

    def compare(
        self, turn: int, names: Sequence[str], outs: Sequence[torch.Tensor], how: str = ""
    ) -> None:
        """Against what the turn's data give."""
        xs, ws = (each.float() for each in self.data(turn))
        for name, out in zip(names, outs, strict=True):
            want = expected(name, xs, ws, self.group.rank)
            self.tally.check(how + name, turn, out, want)

    def done(self) -> None:
        """Wait for the calls; raise what went wrong on the device or in the values."""
        self.group.synchronize()
        self.tally.done()


class Replay:
    """Calls captured as a graph; where there are no graphs, made again into the same tensors."""

    def __init__(self, call: Callable[[], list[torch.Tensor]], device: torch.device) -> None:
        self._call, self._graph = call, None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.outs = call()
        else:
            self.outs = [torch.empty_like(out) for out in call()]

    def replay(self, times: int = 1) -> list[torch.Tensor]:
        """Replay without anything between; the tensors that hold the results until the next time.

        NaN where nothing was written.
        """
        for out in self.outs:
            out.fill_(float("nan"))
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()
            else:
                for out, new in zip(self.outs, self._call(), strict=True):
                    out.copy_(new)
        return self.outs


def _pause(group: Group, seconds: float) -> None:
    """Be late; a virtual rank on the CPU would only hold up the others' host code."""
    if group.device.type != "cpu":
        time.sleep(seconds)


# --- cases
def barriers(group: Group, num_rounds: int) -> None:
    """Barriers alone, and between calls."""
    for _ in range(num_rounds):
        group.barrier()
    rounds = Rounds(group)
    for turn in range(3):
        rounds.eager(turn, ["all_gather"])
        group.barrier()
    rounds.done()


def every_dtype(group: Group, num_rounds: int) -> None:
    """All operators in all dtypes of GEMMs."""
    for dtype in (BF16, torch.float16, torch.float32):
        rounds = Rounds(group, dtype=dtype)
        for turn in range(num_rounds):
            rounds.eager(turn, list(CALLS))
        rounds.done()


def many_rounds(group: Group, num_rounds: int) -> None:
    """Three GEMMs and a collective a round, host and device never meeting; sometimes one is late.

    Every round has other data: what is left of an earlier round would show.
    """
    rounds = Rounds(group)
    for turn in range(num_rounds):
        if turn % 20 == 19 and turn // 20 % group.world_size == group.rank:
            _pause(group, 0.05)
        names = ("ag_gemm", "gemm_rs", GEMMS[2 + turn % 2], COLLECTIVES[turn // 2 % 4])
        rounds.eager(turn, names)
    rounds.done()


def late_ranks(group: Group, seconds: float) -> None:
    """Each rank in turn comes late, well before the deadline: the others wait and get all."""
    rounds = Rounds(group)
    for late in range(group.world_size):
        for turn, name in enumerate(CALLS):
            if late == group.rank and turn % 4 == 0:
                _pause(group, seconds)
            rounds.eager(8 * late + turn, [name])
        rounds.done()


def full_grids(group: Group, num_rounds: int) -> None:
    """More tiles than SMs: kernels that wait could fill the GPU, and copies must get through."""
    small = group.device.type == "cpu"
    cols = 48 if small else 8192
    rounds = Rounds(group, None if small else 512, cols=cols, seed=7)
    for turn in range(num_rounds):
        rounds.eager(turn, GEMMS)
    rounds.done()


def gradients(group: Group, num_rounds: int) -> None:
    """The backward of AG+GEMM and GEMM+RS."""
    rounds, rank = Rounds(group), group.rank
    cols = rounds.w.shape[0]
    shape = (group.world_size, len(rounds.x), cols)
    base = random_base(*shape, seed=5, device=group.device)
    for turn in range(num_rounds):
        xs, ws = rounds.data(turn)
        grads = whole_numbers(base, turn)
        wide_xs, wide_ws, wide_grads = xs.float(), ws.float(), grads.float()
        x = _share(xs[rank], group).clone().requires_grad_()
        w = ws[rank].clone().requires_grad_()
        plait.ag_gemm(x, w, group=group, impl="fused").backward(grads[rank].to(BF16))
        whole = wide_xs.chunk(group.world_size, 1)[0].flatten(0, 1)
        dx = (wide_grads @ wide_ws).sum(0).chunk(group.world_size)[rank]
        rounds.tally.check("ag_gemm x.grad", turn, x.grad, dx)
        rounds.tally.check("ag_gemm w.grad", turn, w.grad, wide_grads[rank].t() @ whole)
        x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
        own = _share(grads[rank], group).to(BF16)
        plait.gemm_rs(x, w, group=group, impl="fused").backward(own)
        whole = wide_grads.chunk(group.world_size, 1)[0].flatten(0, 1)
        rounds.tally.check("gemm_rs x.grad", turn, x.grad, whole @ wide_ws[rank])
        rounds.tally.check("gemm_rs w.grad", turn, w.grad, whole.t() @ wide_xs[rank])
    rounds.done()


def d04_replays_between_eager_calls(group: Group, num_replays: int) -> None:
    """meta-pytorch/torchcomms#1177: the expected signal value was baked in at capture, an old
    signal satisfied a replay's wait, and eager calls between replays broke the counters."""
    first = ("ag_gemm", "gemm_rs", "all_gather", "gemm_ar_one_shot")
    second = ("gemm_ar_two_shot", "ag_gemm", "all_reduce")  # an odd number: regions change places
    rounds = Rounds(group)
    graphs = {names: rounds.captured(names) for names in (first, second)}
    for turn in range(num_replays):
        names = second if turn % 3 == 1 else first
        rounds.replay(turn, names, graphs[names])
        if turn % 2:
            rounds.eager(turn, [list(CALLS)[turn // 2 % len(CALLS)]])
    rounds.done()


def d06_replays_of_dispatch_and_combine(group: Group, num_replays: int) -> None:
    """ROCm/mori#86: state was reset by the host, so not in a replay, which hung. Dispatch and
    combine are two exchanges here, and each replay has another routing."""
    world_size, rank = group.world_size, group.rank
    rounds = Rounds(group)
    num_tokens = len(rounds.x)
    scale = torch.arange(num_tokens, device=group.device) // (num_tokens // world_size) + 2
    scale = scale.to(BF16)[:, None]  # of the rank to which the token at this place goes
    routes = torch.zeros(world_size, num_tokens, dtype=torch.int64, device=group.device)
    route = torch.arange(num_tokens, device=group.device)

    def call() -> list[torch.Tensor]:
        arrived = plait.all_to_all(rounds.x[route], group=group, impl="fused")
        back = plait.all_to_all(arrived * (rank + 2), group=group, impl="fused")
        return [arrived, torch.empty_like(back).index_copy(0, route, back)]

    rounds.place(0)
    for _ in range(3):
        call()
    group.synchronize()
    graph = Replay(call, group.device)
    for turn in range(num_replays):
        generator = torch.Generator().manual_seed(turn)
        orders = [torch.randperm(num_tokens, generator=generator) for _ in range(world_size)]
        routes.copy_(torch.stack(orders))
        route.copy_(routes[rank])
        rounds.place(turn)
        xs, _ = rounds.data(turn)
        sent = torch.stack([x[order] for x, order in zip(xs, routes, strict=True)])
        dispatched = expected("all_to_all", sent, sent, rank)
        combined = torch.empty_like(xs[rank]).index_copy(0, route, sent[rank] * scale)
        outs = graph.replay() if turn % 4 else call()
        for name, out, want in zip(("dispatch", "combine"), outs, (dispatched, combined),
                                   strict=True):  # fmt: skip
            rounds.tally.check(name, turn, out, want)
    rounds.done()


def d07_graphs_of_many_sizes(group: Group, num_replays: int) -> None:
    """deepseek-ai/DeepEP#93: graphs of batch sizes 1, 2, 4 and 8 shared one buffer whose layout
    moved between them. Here the buffer also grows after the first were captured."""
    names = ("ag_gemm", "gemm_rs", "gemm_ar_one_shot")
    sizes = (1, 2, 4, 8, 20 if group.device.type == "cpu" else 300)
    all_rounds = [Rounds(group, rows, seed=rows) for rows in sizes]
    graphs = [rounds.captured(names) for rounds in all_rounds]
    overwrite_free_memory(group.device)
    order = random.Random(0)  # the same on every rank
    for turn in range(num_replays):
        index = order.randrange(len(sizes))
        all_rounds[index].replay(turn, names, graphs[index])
        if turn % 3 == 0:
            order.choice(all_rounds).eager(turn, names)
    for rounds in all_rounds:
        rounds.eager(0, names)
        rounds.done()


def overwrite_free_memory(device: torch.device) -> None:
    """Whatever small tensors were freed so far, their bytes are no addresses any more."""
    for num_bytes in (512, 1024, 2048):
        kept = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(99)]
        del kept


def reserve(group: Group, nbytes: int = 1 << 20) -> None:
    """All the workspace that a case needs, so that nothing is allocated later."""
    for _ in range(2):
        group.take_region(nbytes, "reserve")


def subgroups(group: Group, num_rounds: int) -> None:
    """The last rank and the first as one group, the others (if any) in reverse order as another.

    Both compute at once. Every rank is in one and allocates equally often, as PyTorch's symmetric
    memory needs.
    """
    last = group.world_size - 1
    parts = [part for part in ([last, 0], list(range(last - 1, 0, -1))) if part]
    for part in parts:
        made = group.new_group(part)
        if made is not None:
            mine, members = made, part
    assert members[mine.rank] == group.rank
    reserve(mine)
    rounds, whole = Rounds(mine, seed=members[0]), Rounds(group)
    for turn in range(num_rounds):
        rounds.eager(turn, list(CALLS))
        whole.eager(turn, ["ag_gemm", "gemm_rs"])
    rounds.done()
    whole.done()
    mine.close()
    whole.eager(0, list(CALLS))
    whole.done()


def peer_that_dies(
    group: Group, die: Callable[[], None], deadline_s: float, others: Group | None = None
) -> None:
    """The last rank dies between calls: the others raise within the deadline and go on without.

    `others` is a group of all but the last rank; it stays usable.
    """
    victim, start = group.world_size - 1, 0.0
    for each in (group, others):
        if each is not None:
            reserve(each)
            rounds = Rounds(each)
            for turn in range(3):
                rounds.eager(turn, list(CALLS))
            rounds.done()
    rounds = Rounds(group)
    rounds.place(0)
    group.transport.exchange(None)
    if group.rank == victim:
        die()
        return
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as raised:  # noqa: PT012 - either may raise
        CALLS["ag_gemm"](rounds.x, rounds.w, group)
        group.synchronize()
    took_s = time.monotonic() - start
    assert took_s < deadline_s + 10, f"raised after {took_s:.1f} s"
    assert (raised.value.operator, raised.value.peer) == ("ag_gemm", victim)
    start = time.monotonic()
    for name in CALLS:  # the group stays broken, and says so at once
        with pytest.raises(PeerTimeoutError):
            CALLS[name](rounds.x, rounds.w, group)
    assert time.monotonic() - start < 1
    group.close()
    if others is not None:
        again = Rounds(others)
        again.eager(5, list(CALLS))
        again.done()
        others.close()
    rounds.place(1)
    assert int(rounds.x.abs().max()) == 1  # the process can still compute
