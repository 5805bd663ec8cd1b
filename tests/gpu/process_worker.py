"""What processes on GPUs must do, through PyTorch's symmetric memory; run in each process.

With fewer GPUs than processes all use the first: right answers, not speed. The GPUs take turns
between processes then, so a wait for a peer is slow.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import plait
from plait import Group
from tests.host.symm.transport_checks import CHECKS
from tests.processes import process_group, worker_main

NUM_ROUNDS = 20
M, K, N = 256, 128, 192  # of one rank


def local_device() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    shared = torch.accelerator.device_count() < dist.get_world_size()
    return torch.device(kind.type, 0 if shared else dist.get_rank())


def of_ranks(group: Group, *shape: int, seed: int) -> list[torch.Tensor]:
    """Every rank's data, made on every rank."""
    generator = torch.Generator().manual_seed(seed)
    data = [torch.randn(shape, generator=generator) for _ in range(group.world_size)]
    return [each.to(group.device, torch.bfloat16) for each in data]


def assert_close(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """At most twice the error of plain torch in the same dtype, from an fp64 run."""
    assert not got.isnan().any()
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def barrier(group: Group) -> None:
    for _ in range(NUM_ROUNDS):
        group.barrier()
    group.synchronize()


def all_gather(group: Group) -> None:
    for turn in range(NUM_ROUNDS):
        xs = of_ranks(group, M, K, seed=turn)
        got = plait.all_gather(xs[group.rank], group=group)
        group.synchronize()
        assert torch.equal(got, torch.cat(xs))


def ag_gemm(group: Group) -> None:
    for turn in range(NUM_ROUNDS):
        whole = torch.cat(of_ranks(group, M, K, seed=turn))
        weight = of_ranks(group, N, K, seed=100 + turn)[group.rank]
        own = whole.chunk(group.world_size)[group.rank]
        got = plait.ag_gemm(own, weight, group=group, impl="fused")
        group.synchronize()
        assert_close(got, whole.double() @ weight.double().t(), whole @ weight.t())


def gemm_rs(group: Group) -> None:
    for turn in range(NUM_ROUNDS):
        xs = of_ranks(group, group.world_size * M, K, seed=turn)
        weights = of_ranks(group, N, K, seed=100 + turn)
        got = plait.gemm_rs(xs[group.rank], weights[group.rank], group=group, impl="fused")
        group.synchronize()
        pairs = list(zip(xs, weights, strict=True))
        exact = sum(x.double() @ w.double().t() for x, w in pairs)
        plain = sum((x @ w.t()).float() for x, w in pairs).bfloat16()
        own = slice(group.rank * M, (group.rank + 1) * M)
        assert_close(got, exact[own], plain[own])


def conformance(name: str, group: Group) -> None:
    CHECKS[name](group.transport)


SCENARIOS = {f"transport_{name}": partial(conformance, name) for name in CHECKS}
SCENARIOS |= {run.__name__: run for run in (barrier, all_gather, ag_gemm, gemm_rs)}


if __name__ == "__main__":
    with process_group():
        device = local_device()
        torch.accelerator.set_device_index(device.index)
        made = Group.from_process_group(device=device)
        worker_main({name: partial(run, made) for name, run in SCENARIOS.items()}, 270)
        made.close()
