"""Virtual ranks on one GPU: every operator against its reference, with ranks delayed at random."""

from __future__ import annotations

import faulthandler

import pytest
import torch

import plait
from plait.backends.commands import Launch, Program
from plait.collectives.sizes import scattered_sizes
from plait.overlap.ag_gemm.reference import ag_gemm_reference
from plait.overlap.gemm_ar.reference import gemm_ar_reference
from plait.overlap.gemm_rs.reference import gemm_rs_reference
from plait.settings import override
from plait.symm.kernels import _barrier_kernel
from plait.symm.signals import Operator
from plait.symm.workspace import BARRIER_REGION
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from tests.rank_cases import CALLS, expected

WORLDS = (1, 2, 3, 4, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def watchdog():
    """A hang prints every stack and ends the process; waits give up long before."""
    faulthandler.dump_traceback_later(100, exit=True)
    with override(deadline_s=10.0, prologue_delay_us=200.0):
        yield
    faulthandler.cancel_dump_traceback_later()


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, count: int, seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def _check(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    assert_close_to_fp64(actual.cpu(), exact, plain)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ag_gemm(world_size: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    rows, features, cols, rounds = 200, 256, 320, 10
    xs = _random((rounds, rows, features), dtype, world_size, seed)
    weights = _random((cols, features), dtype, world_size, seed + 1)

    def fn(group: plait.Group) -> list[torch.Tensor]:
        x, weight = xs[group.rank].to(device), weights[group.rank].to(device)
        outs = [plait.ag_gemm(x[i], weight, group=group, impl="fused") for i in range(rounds)]
        group.synchronize()
        return [out.cpu() for out in outs]

    results = plait.run_virtual(fn, world_size, seed=seed, device=device)
    for rank, outs in enumerate(results):
        for i, out in enumerate(outs):
            exact = ag_gemm_reference([x[i].double() for x in xs], [weights[rank].double()])[0]
            plain = torch.cat([x[i] for x in xs]).to(device) @ weights[rank].to(device).t()
            _check(out, exact, plain.cpu())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_rs(world_size: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    rows, features, cols, rounds = 150 * world_size, 128, 264, 10
    xs = _random((rounds, rows, features), dtype, world_size, seed)
    weights = _random((cols, features), dtype, world_size, seed + 1)
    sizes = scattered_sizes(rows, world_size, [])

    def fn(group: plait.Group) -> list[torch.Tensor]:
        x, weight = xs[group.rank].to(device), weights[group.rank].to(device)
        outs = [plait.gemm_rs(x[i], weight, group=group, impl="fused") for i in range(rounds)]
        group.synchronize()
        return [out.cpu() for out in outs]

    results = plait.run_virtual(fn, world_size, seed=seed, device=device)
    wide = [weight.double() for weight in weights]
    for rank, outs in enumerate(results):
        for i, out in enumerate(outs):
            exact = gemm_rs_reference([x[i].double() for x in xs], wide, None, rank, sizes)
            plain = gemm_rs_reference([x[i] for x in xs], weights, None, rank, sizes)
            _check(out, exact, plain)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_gemm_ar(world_size: int, algorithm: str, device: torch.device, seed: int) -> None:
    rows, features, cols, rounds, dtype = 65, 128, 264, 10, torch.bfloat16
    xs = _random((rounds, rows, features), dtype, world_size, seed)
    weights = _random((cols, features), dtype, world_size, seed + 1)

    def fn(group: plait.Group) -> list[torch.Tensor]:
        x, weight = xs[group.rank].to(device), weights[group.rank].to(device)
        outs = [
            plait.gemm_ar(x[i], weight, group=group, algorithm=algorithm, impl="fused")
            for i in range(rounds)
        ]
        group.synchronize()
        return [out.cpu() for out in outs]

    results = plait.run_virtual(fn, world_size, seed=seed, device=device)
    wide = [weight.double() for weight in weights]
    for i in range(rounds):
        exact = gemm_ar_reference([x[i].double() for x in xs], wide)
        plain = gemm_ar_reference([x[i] for x in xs], weights)
        for outs in results:
            _check(outs[i], exact, plain)
            assert_bitwise(outs[i], results[0][i])


@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives(world_size: int, device: torch.device, seed: int) -> None:
    rounds = 10
    xs = _random((rounds, 24 * world_size, 40), torch.bfloat16, world_size, seed)

    def fn(group: plait.Group) -> list[tuple[torch.Tensor, ...]]:
        x = xs[group.rank].to(device)
        results = []
        for i in range(rounds):
            gathered = plait.all_gather(x[i], group=group)
            scattered = plait.reduce_scatter(x[i], group=group)
            reduced = plait.all_reduce(x[i], group=group)
            swapped = plait.all_to_all(x[i], group=group)
            results.append((gathered, scattered, reduced, swapped))
        group.synchronize()
        return [tuple(t.cpu() for t in each) for each in results]

    results = plait.run_virtual(fn, world_size, seed=seed, device=device)
    for i in range(rounds):
        parts = [x[i] for x in xs]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        total = total.bfloat16()
        for rank in range(world_size):
            gathered, scattered, reduced, swapped = results[rank][i]
            assert_bitwise(gathered, torch.cat(parts))
            assert_bitwise(scattered, total.chunk(world_size)[rank])
            assert_bitwise(reduced, total)
            assert_bitwise(swapped, torch.cat([part.chunk(world_size)[rank] for part in parts]))


def test_gradients(device: torch.device, seed: int) -> None:
    world_size, rows, hidden, inner = 4, 64, 128, 96
    xs = _random((rows, hidden), torch.float32, world_size, seed)
    gates = _random((inner, hidden), torch.float32, world_size, seed + 1)
    ups = _random((inner, hidden), torch.float32, world_size, seed + 2)
    downs = _random((hidden, inner), torch.float32, world_size, seed + 3)
    tensors = (xs, gates, ups, downs)

    def fn(group: plait.Group) -> list[torch.Tensor]:
        x, gate, up, down = (each[group.rank].to(device).requires_grad_() for each in tensors)
        h = plait.ag_gemm(x, [gate, up], group=group, activation="swiglu", impl="fused")
        y = plait.gemm_rs(h, down, group=group, impl="fused")
        y.square().sum().backward()
        group.synchronize()
        return [t.detach().cpu() for t in (y, x.grad, gate.grad, up.grad, down.grad)]

    def plain(dtype: torch.dtype, on: torch.device) -> list[list[torch.Tensor]]:
        x, gate, up, down = ([t.to(on, dtype).requires_grad_() for t in each] for each in tensors)
        whole = torch.cat(x)
        h = [
            torch.nn.functional.silu(whole @ g.t()) * (whole @ u.t())
            for g, u in zip(gate, up, strict=True)
        ]
        y = sum(a @ b.t() for a, b in zip(h, down, strict=True))
        y.square().sum().backward()
        parts = y.detach().chunk(world_size)
        return [
            [t.cpu() for t in (parts[r], x[r].grad, gate[r].grad, up[r].grad, down[r].grad)]
            for r in range(world_size)
        ]

    results = plait.run_virtual(fn, world_size, seed=seed, device=device)
    exact, low = plain(torch.float64, torch.device("cpu")), plain(torch.float32, device)
    for rank in range(world_size):
        for got, want, yardstick in zip(results[rank], exact[rank], low[rank], strict=True):
            _check(got, want, yardstick)


NUM_ROUNDS, NUM_INPUTS = 1000, 3


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_thousand_rounds(world_size: int, device: torch.device, seed: int) -> None:
    """1,000 rounds in all, of one call each: 250 with each of four orders of launching (late:0
    launches the consumers of rank 0's data before it sends), so about 125 of each operator. All
    prologues are delayed at random.

    Three sets of inputs take turns, so that what is left of another round would show. Equal inputs
    give equal bits in every round, compared on the device; each operator's results for each set,
    the first and last round among them, are held to fp64.
    """
    faulthandler.dump_traceback_later(250, exit=True)  # in place of the fixture's
    rows, features, cols = 24, 64, 80
    xs = torch.stack(
        _random((NUM_INPUTS, world_size * rows, features), torch.bfloat16, world_size, seed), 1
    )
    ws = torch.stack(_random((NUM_INPUTS, cols, features), torch.bfloat16, world_size, seed + 1), 1)
    orders = ("random", "consumer_first", "late:0", f"late:{world_size - 1}")
    results = []
    for order in orders:
        body = _repeated_calls(xs, ws, NUM_ROUNDS // len(orders), device)
        results += [plait.run_virtual(body, world_size, seed=seed, schedule=order, device=device)]
    for rank in range(world_size):
        for (name, which), out in results[0][rank].items():
            exact = expected(name, xs[which].double(), ws[which].double(), rank)
            plain = expected(name, xs[which], ws[which], rank).to(torch.bfloat16)
            assert_close_to_fp64(out, exact, plain, f"{name} of rank {rank}")
            for order, others in zip(orders, results, strict=True):
                what = f"{name} of rank {rank}, {order}"
                assert_bitwise(others[rank][name, which], out, what)


def _repeated_calls(xs: torch.Tensor, ws: torch.Tensor, num_rounds: int, device: torch.device):
    """A rank's calls of all operators in turn on inputs [set, rank, ...]; results by operator and
    set, after every later result was found to have the same bits."""

    def fn(group: plait.Group) -> dict[tuple[str, int], torch.Tensor]:
        own_xs, own_ws = xs[:, group.rank].to(device), ws[:, group.rank].to(device)
        firsts: dict[tuple[str, int], torch.Tensor] = {}
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for turn in range(num_rounds):
            # 8 operators and 3 sets: all pairs come within 24 rounds.
            name, which = list(CALLS)[turn % len(CALLS)], turn % NUM_INPUTS
            out = CALLS[name](own_xs[which], own_ws[which], group)
            first = firsts.setdefault((name, which), out)
            differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
        group.synchronize()
        assert int(differing) == 0, f"{int(differing)} elements changed from round to round"
        return {key: first.cpu() for key, first in firsts.items()}

    return fn


def test_peer_that_never_comes(device: torch.device) -> None:
    def fn(group: plait.Group) -> str:
        if group.rank == 1:
            return "left"
        plait.all_gather(torch.ones(4, 4, device=device), group=group)
        return "went on"

    with pytest.raises(plait.errors.DeadlockError, match="rank 0 host"):
        plait.run_virtual(fn, 2, device=device)


def test_deadline_fires_where_a_peer_stays_away(device: torch.device) -> None:
    """Rank 0 launches without meeting rank 1, as one process does when another has died."""
    seen: dict[str, object] = {}

    def fn(group: plait.Group) -> None:
        group.barrier()  # the workspace exists on both ranks
        if group.rank == 1:
            return
        alone = group.executor.inner
        region = group.workspace.regions[BARRIER_REGION]
        args = {"ctx_ptr": region.ctx, "OP": int(Operator.BARRIER)}
        program = Program("barrier", [Launch(_barrier_kernel, 1, args, num_warps=1)])
        alone.prepare(program)
        alone.run(program)
        alone.synchronize()
        with pytest.raises(plait.errors.PeerTimeoutError) as raised:
            group.check()
        seen["error"] = raised.value
        with pytest.raises(plait.errors.PeerTimeoutError):
            plait.all_gather(torch.ones(4, 4, device=device), group=group)  # the group stays broken
        group.close()

    with override(deadline_s=0.5):
        plait.run_virtual(fn, 2, device=device)
    error = seen["error"]
    assert (error.rank, error.peer, error.operator) == (0, 1, "barrier")
    assert (error.expected, error.seen) == (2, 1)
