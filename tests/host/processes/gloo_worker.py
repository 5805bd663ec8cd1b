"""What CPU processes over gloo must do; run by `tests/host/processes/test_gloo.py` in each process.

Every rank makes the data of all ranks from one seed, so each can compute what all should get.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import plait
from plait import Group, errors
from plait.settings import override, settings
from plait.symm.group import get_group
from plait.symm.transports.process import ProcessTransport
from tests.processes import process_group, worker_main

K, N = 24, 8
DTYPES = (torch.float32, torch.bfloat16)


def needs(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")


def group() -> Group:
    """The one group of most scenarios."""
    if not hasattr(group, "made"):
        group.made = Group.from_process_group()
    return group.made


def of_ranks(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random data, the same on every rank; one tensor per shape."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def sizes() -> list[int]:
    """Unequal rows: rank 0 has none."""
    return [2 * rank for rank in range(group().world_size)]


def ordered_sum(parts: list[torch.Tensor], reduce_dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.to(reduce_dtype).float()
    return total


def assert_close(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """At most twice the error of plain torch in the same dtype, from an fp64 run."""
    assert got.dtype == plain.dtype
    assert got.shape == plain.shape
    error = (plain.double() - exact).abs().max() if plain.numel() else 0
    allowed = 2 * error + 1e-7 * (exact.abs().max() if exact.numel() else 0)
    worst = (got.double() - exact).abs().max() if got.numel() else 0
    assert worst <= allowed, f"error {float(worst):.3g}, allowed {float(allowed):.3g}"


def assert_ran(operator: str, impl: str) -> None:
    record = plait.last_run()
    assert record is not None
    assert (record.operator, record.impl) == (operator, impl)


# --- the group
def same_name() -> None:
    g = group()
    assert (g.rank, g.world_size) == (dist.get_rank(), dist.get_world_size())
    assert g.device.type == "cpu"
    assert set(g.transport.exchange(g.name)) == {g.name}
    assert get_group(g.name) is g
    g.barrier()
    g.synchronize()
    other = Group.from_process_group(dist.group.WORLD)
    assert other.name != g.name
    assert set(other.transport.exchange(other.name)) == {other.name}
    other.close()


def subgroup_in_another_order() -> None:
    g = group()
    last = g.world_size - 1
    pair = g.new_group([last, 0])
    assert (pair is None) == (g.rank not in (0, last))
    if pair is None:
        return
    xs = of_ranks(*[(2, K)] * g.world_size)
    gathered = plait.all_gather(xs[g.rank], group=pair)
    assert torch.equal(gathered, torch.cat([xs[last], xs[0]]))
    pair.close()


def process_group_of_some_ranks() -> None:
    g = group()
    members = [rank for rank in range(g.world_size) if rank != 0]
    theirs = dist.new_group(members)
    if g.rank == 0:
        with pytest.raises(errors.GroupError, match="members only"):
            Group.from_process_group(theirs)
        return
    made = Group.from_process_group(theirs)
    assert (made.rank, made.world_size) == (members.index(g.rank), len(members))
    assert made.transport.exchange(g.rank) == members
    made.close()


def a_missing_rank_is_an_error() -> None:
    """A rank that does not come is an error after the deadline, not after torch's half hour."""
    g = group()
    g.barrier()
    with override(deadline_s=3.0):
        made = g.new_group()
    if g.rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            made.barrier()
        assert time.monotonic() - start < 12
    g.barrier()
    made.close()
    again = g.new_group()  # the failure is that group's alone
    again.barrier()
    again.close()


# --- collectives of the transport
def moves_any_dtype() -> None:
    g = group()
    rows = sizes()
    dtypes = (torch.bfloat16, torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64)
    for dtype in dtypes:
        whole = torch.arange(5 * sum(rows)).view(5, sum(rows)).to(torch.float32).to(dtype)
        if dtype == torch.complex64:
            whole = whole.conj()
        own = whole.split(rows, 1)[g.rank]
        got = g.transport.all_gather(own, 1, rows)
        assert got.dtype == dtype
        assert got.is_contiguous()
        # Compared as bytes: fp8 has no equal().
        assert torch.equal(raw(got), raw(whole)), dtype
    empty = g.transport.all_gather(torch.empty(0, 3), 0, [0] * g.world_size)
    assert empty.shape == (0, 3)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().contiguous().view(-1).view(torch.uint8)


def reduces_in_rank_order() -> None:
    g = group()
    rows = sizes()
    *xs, scale = of_ranks(*[(sum(rows), 33)] * (g.world_size + 1), dtype=torch.bfloat16)
    # Sums of bf16 numbers of one magnitude are exact in fp32, whatever their order.
    xs = [x * 10 ** (4 * scale.roll(rank)) for rank, x in enumerate(xs)]
    for reduce_dtype in DTYPES:
        total = ordered_sum(xs, reduce_dtype)
        for out_dtype in DTYPES:
            expected = total.to(out_dtype)
            got = g.transport.reduce_scatter(xs[g.rank], 0, rows, reduce_dtype, out_dtype)
            assert torch.equal(got, expected.split(rows)[g.rank])
            got = g.transport.all_reduce(xs[g.rank], reduce_dtype, out_dtype)
            assert torch.equal(got, expected)
    if g.world_size > 2:  # or the test would not notice another order
        assert not torch.equal(ordered_sum(xs[::-1], torch.bfloat16), total)
    columns = [x.t() for x in xs]
    got = g.transport.reduce_scatter(columns[g.rank], 1, rows, torch.float32, torch.float32)
    assert torch.equal(got, ordered_sum(columns, torch.float32).split(rows, 1)[g.rank])
    scalar = g.transport.all_reduce(torch.tensor(g.rank + 1.0), torch.float32)
    assert scalar == sum(range(1, g.world_size + 1))


def all_to_all_with_any_splits() -> None:
    g = group()
    # Rank s sends s + 2 p rows to rank p, none from 0 to 0.
    splits = [[s + 2 * p for p in range(g.world_size)] for s in range(g.world_size)]
    sent = [torch.full((sum(row), 3), float(s)) for s, row in enumerate(splits)]
    for s, x in enumerate(sent):
        x[:, 1] = torch.arange(len(x)) + 100 * s
    received = [row[g.rank] for row in splits]
    got = g.transport.all_to_all(sent[g.rank], splits[g.rank], received)
    expected = [x.split(row)[g.rank] for x, row in zip(sent, splits, strict=True)]
    assert torch.equal(got, torch.cat(expected))


# --- operators
def all_gather() -> None:
    g = group()
    xs = of_ranks(*[(rows, 3) for rows in sizes()])
    x = xs[g.rank].requires_grad_()
    got = plait.all_gather(x, group=g, rows_per_rank=sizes())
    assert_ran("all_gather", "unfused")
    assert torch.equal(got, torch.cat(xs))
    reference = plait.all_gather(x, group=g, rows_per_rank=sizes(), impl="reference")
    assert torch.equal(reference, got)
    needs("plait.collectives.reduce_scatter")
    grads = of_ranks(*[got.shape] * g.world_size)
    got.backward(grads[g.rank])
    assert torch.equal(x.grad, ordered_sum(grads, torch.float32).split(sizes())[g.rank])


def ag_gemm() -> None:
    g = group()
    for dtype in DTYPES:
        xs = of_ranks(*[(4, K)] * g.world_size, dtype=dtype)
        weights = of_ranks(*[(N, K)] * g.world_size, dtype=dtype)
        x, weight = xs[g.rank], weights[g.rank]
        got = plait.ag_gemm(x, weight, group=g)
        assert_ran("ag_gemm", "unfused")
        assert "no symmetric memory" in plait.last_run().reason
        whole = torch.cat(xs)
        assert_close(got, whole.double() @ weight.double().t(), whole @ weight.t())
        reference = plait.ag_gemm(x, weight, group=g, impl="reference")
        assert_ran("ag_gemm", "reference")
        assert_close(reference, whole.double() @ weight.double().t(), whole @ weight.t())


def ag_gemm_of_uneven_rows() -> None:
    g = group()
    xs = of_ranks(*[(2, rows, K) for rows in sizes()])
    weight, bias = of_ranks((N, K), (N,))
    got, gathered = plait.ag_gemm(
        xs[g.rank], weight, bias, group=g, gather_dim=1, rows_per_rank=sizes(),
        activation="silu", return_gathered=True,
    )  # fmt: skip
    whole = torch.cat(xs, dim=1)
    assert torch.equal(gathered, whole)
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    exact = silu(linear(whole.double(), weight.double(), bias.double()))
    assert_close(got, exact, silu(linear(whole, weight, bias)))


def ag_gemm_backward() -> None:
    needs("plait.collectives.reduce_scatter")
    g = group()
    rows = sizes()
    xs = of_ranks(*[(r, K) for r in rows])
    weights = of_ranks(*[(N, K)] * g.world_size)
    grads = of_ranks(*[(sum(rows), N)] * g.world_size)
    x, weight = xs[g.rank].clone().requires_grad_(), weights[g.rank].clone().requires_grad_()
    plait.ag_gemm(x, weight, group=g, rows_per_rank=rows).backward(grads[g.rank])

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        products = [d.to(dtype) @ w.to(dtype) for d, w in zip(grads, weights, strict=True)]
        whole = torch.cat(xs).to(dtype)
        return sum(products).split(rows)[g.rank], grads[g.rank].to(dtype).t() @ whole

    for got, exact, low in zip(
        (x.grad, weight.grad), plain(torch.float64), plain(torch.float32), strict=True
    ):
        assert_close(got, exact, low)


def gemm_rs() -> None:
    needs("plait.collectives.reduce_scatter")
    g = group()
    rows = sizes()
    for dtype in DTYPES:
        xs = of_ranks(*[(sum(rows), K)] * g.world_size, dtype=dtype)
        weights = of_ranks(*[(N, K)] * g.world_size, dtype=dtype)
        bias = of_ranks((N,), dtype=dtype)[0]
        x, weight = xs[g.rank].clone().requires_grad_(), weights[g.rank].clone().requires_grad_()
        got = plait.gemm_rs(x, weight, bias, group=g, rows_per_rank=rows)
        assert_ran("gemm_rs", "unfused")
        pairs = list(zip(xs, weights, strict=True))
        exact = sum(a.double() @ b.double().t() for a, b in pairs) + bias.double()
        low = ordered_sum([a @ b.t() for a, b in pairs], dtype) + bias.float()
        own = slice(sum(rows[: g.rank]), sum(rows[: g.rank + 1]))
        assert_close(got.detach(), exact[own], low.to(dtype)[own])
        grads = of_ranks(*[(r, N) for r in rows], dtype=dtype)
        got.backward(grads[g.rank])
        whole = torch.cat(grads)
        for have, left, right in (
            (x.grad, whole, weight.detach()),
            (weight.grad, whole.t(), x.detach()),
        ):
            assert_close(have, left.double() @ right.double(), left @ right)


def gemm_ar() -> None:
    needs("plait.overlap.gemm_ar.api")
    g = group()
    xs = of_ranks(*[(5, K)] * g.world_size)
    weights = of_ranks(*[(N, K)] * g.world_size)
    got = plait.gemm_ar(xs[g.rank], weights[g.rank], group=g)
    assert_ran("gemm_ar", "unfused")
    pairs = list(zip(xs, weights, strict=True))
    exact = sum(a.double() @ b.double().t() for a, b in pairs)
    assert_close(got, exact, ordered_sum([a @ b.t() for a, b in pairs], torch.float32))


def reduce_scatter_and_all_reduce() -> None:
    needs("plait.collectives.reduce_scatter")
    g = group()
    rows = sizes()
    xs = of_ranks(*[(sum(rows), 3)] * g.world_size, dtype=torch.bfloat16)
    expected = ordered_sum(xs, torch.bfloat16).bfloat16()
    got = plait.reduce_scatter(xs[g.rank], group=g, rows_per_rank=rows)
    assert torch.equal(got, expected.split(rows)[g.rank])
    needs("plait.collectives.all_reduce")
    assert torch.equal(plait.all_reduce(xs[g.rank], group=g), expected)


def all_to_all() -> None:
    needs("plait.collectives.all_to_all")
    g = group()
    xs = of_ranks(*[(2 * g.world_size, 3)] * g.world_size)
    got = plait.all_to_all(xs[g.rank], group=g)
    assert torch.equal(got, torch.cat([x.chunk(g.world_size)[g.rank] for x in xs]))


def same_bits_as_virtual_ranks() -> None:
    """The unfused sums of processes and the kernels of virtual ranks round alike."""
    g = group()
    rows = [rank + 1 for rank in range(g.world_size)]
    xs = of_ranks(*[(sum(rows), 5)] * g.world_size, dtype=torch.bfloat16)
    for x in xs:
        x[:, 0] = -0.0
    virtual = plait.run_virtual(
        lambda v: plait.reduce_scatter(xs[v.rank], group=v, rows_per_rank=rows), g.world_size
    )
    got = plait.reduce_scatter(xs[g.rank], group=g, rows_per_rank=rows)
    assert torch.equal(raw(got), raw(virtual[g.rank]))


def fused_is_refused_by_every_rank() -> None:
    g = group()
    x, weight = of_ranks((4, K), (N, K))
    with pytest.raises(errors.UnsupportedError, match="no symmetric memory"):
        plait.ag_gemm(x, weight, group=g, impl="fused")
    with pytest.raises(errors.UnsupportedError, match="share none"):
        plait.all_gather(x, group=g, impl="fused")
    if find_spec("plait.collectives.reduce_scatter"):
        with pytest.raises(errors.UnsupportedError, match="no symmetric memory"):
            plait.gemm_rs(x[:0], weight, group=g, impl="fused")
    g.barrier()


# --- disagreement
def debug_finds_ranks_that_disagree() -> None:
    if not settings().debug:
        pytest.skip("needs PLAIT_DEBUG=1")
    g = group()
    x, weight = of_ranks((g.world_size, K), (N, K))
    gemm = partial(plait.ag_gemm, x, weight, group=g)
    call = gemm if g.rank == 0 else partial(g.exchange_tensor, "another_call", x)
    with pytest.raises(errors.RanksDisagreeError) as caught:
        call()
    assert "all_gather" in caught.value.signatures[0]
    assert "another_call" in caught.value.signatures[g.world_size - 1]
    with pytest.raises(errors.RanksDisagreeError) as caught:
        plait.ag_gemm(x if g.rank else x[:1], weight, group=g)
    for rank, signature in caught.value.signatures.items():
        rows = (x.shape[0] if rank else 1,) * g.world_size
        assert f"sizes={rows}" in signature
    needs("plait.collectives.reduce_scatter")
    call = gemm if g.rank == 0 else partial(plait.gemm_rs, x, weight, group=g)
    with pytest.raises(errors.RanksDisagreeError) as caught:
        call()
    assert "all_gather" in caught.value.signatures[0]
    assert "reduce_scatter" in caught.value.signatures[g.world_size - 1]
    g.barrier()


def only_gpus_and_cpus() -> None:
    with pytest.raises(errors.DeviceError, match="'cpu'"):
        Group.from_process_group(device="meta")


def closing() -> None:
    g = group()
    g.close()
    g.close()
    with pytest.raises(errors.GroupError, match="closed"):
        plait.all_gather(torch.ones(2, 2), group=g)
    again = Group.from_process_group()
    again.barrier()
    assert isinstance(again.transport, ProcessTransport)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        same_name,
        subgroup_in_another_order,
        process_group_of_some_ranks,
        a_missing_rank_is_an_error,
        moves_any_dtype,
        reduces_in_rank_order,
        all_to_all_with_any_splits,
        all_gather,
        ag_gemm,
        ag_gemm_of_uneven_rows,
        ag_gemm_backward,
        gemm_rs,
        gemm_ar,
        reduce_scatter_and_all_reduce,
        all_to_all,
        same_bits_as_virtual_ranks,
        fused_is_refused_by_every_rank,
        debug_finds_ranks_that_disagree,
        only_gpus_and_cpus,
        closing,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(timeout=timedelta(minutes=30)):
        worker_main(SCENARIOS, 50)
