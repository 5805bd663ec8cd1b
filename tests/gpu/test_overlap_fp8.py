"""fp8 and int8 operands of the overlapped GEMMs on one GPU: virtual ranks, emulated peers, graphs.

Whole numbers times powers of two are exact whatever the order of sums, so a scale of another row,
block, rank or call shows in the bits.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator

import pytest
import torch

import plait
from plait.collectives.segments import padded_rows
from plait.settings import override
from plait.symm.workspace import NUM_REGIONS
from plait.testing.compare import assert_bitwise
from tests.gpu.emulated_peers import fill_slots

WORLD = 4
LINKS = ("paced:360", "pcie")
KINDS = ("tensor", "rows", "blocks")
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FP32, FP64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A hang prints every stack and ends the process; waits give up long before."""
    faulthandler.dump_traceback_later(200, exit=True)
    with override(deadline_s=10.0):
        yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=LINKS)
def group(request: pytest.FixtureRequest, device: torch.device) -> Iterator[plait.Group]:
    made = plait.Group.emulated(WORLD, link=request.param, device=device)
    yield made
    made.close()


# --- exact operands
def whole(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """-1, 0 and 1."""
    return torch.randint(-1, 2, shape).float().to(dtype)


def powers(*shape: int) -> torch.Tensor:
    """Scales from 1/8 to 8."""
    return 2.0 ** torch.randint(-3, 4, shape).float()


def x_scale_of(kind: str, rows: int, k: int) -> torch.Tensor:
    shape = {"tensor": (1,), "rows": (rows,), "blocks": (rows, -(-k // 128))}[kind]
    return powers(*shape)


def weight_scale_of(kind: str, n: int, k: int) -> torch.Tensor:
    shape = {"tensor": (1,), "rows": (n,), "blocks": (-(-n // 128), -(-k // 128))}[kind]
    return powers(*shape)


def wide_x(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [rows, K] times its scale in fp64."""
    if scale.dim() == 1:
        return x.to(FP64) * scale[:, None]
    return x.to(FP64) * scale.to(FP64).repeat_interleave(128, -1)[:, : x.shape[1]]


def wide_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 1:
        return weight.to(FP64) * scale[:, None]
    n, k = weight.shape
    blocks = scale.to(FP64).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.to(FP64) * blocks[:n, :k]


# --- virtual ranks
DTYPES = ((E4M3, E4M3), (E4M3, E5M2), (INT8, INT8))


def run_rounds(
    world_size: int,
    device: torch.device,
    seed: int,
    operands: list[list[tuple[torch.Tensor, ...]]],
    call: Callable[..., torch.Tensor],
) -> list[list[torch.Tensor]]:
    """`call(group, x, weight, x_scale, weight_scale)` for each round's operands of each rank."""

    def fn(group: plait.Group) -> list[torch.Tensor]:
        given = [tuple(each.to(device) for each in of_round) for of_round in operands[group.rank]]
        outs = [call(group, *of_round) for of_round in given]
        group.synchronize()
        return [out.cpu() for out in outs]

    with override(prologue_delay_us=200.0):
        return plait.run_virtual(fn, world_size, seed=seed, device=device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ag_gemm(
    world_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    kind: str,
    device: torch.device,
    seed: int,
) -> None:
    rows = [(200, 0, 1, 77)[rank % 4] for rank in range(world_size)]
    k, n, rounds = 256, 320, 6
    operands = [
        [
            (
                whole(dtypes[0], r, k), whole(dtypes[1], n, k),
                x_scale_of(kind, r, k), weight_scale_of(kind, n, k),
            )
            for _ in range(rounds)
        ]
        for r in rows
    ]  # fmt: skip

    def call(group: plait.Group, x, weight, x_scale, weight_scale) -> torch.Tensor:
        return plait.ag_gemm(
            x, weight, group=group, rows_per_rank=rows, x_scale=x_scale, weight_scale=weight_scale,
            out_dtype=FP32, impl="fused",
        )  # fmt: skip

    results = run_rounds(world_size, device, seed, operands, call)
    for index in range(rounds):
        gathered = torch.cat([wide_x(each[index][0], each[index][2]) for each in operands])
        for rank, outs in enumerate(results):
            _, weight, _, scale = operands[rank][index]
            assert_bitwise(outs[index], (gathered @ wide_weight(weight, scale).t()).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("operator", ["gemm_rs", "one_shot", "two_shot"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_sums(
    world_size: int,
    operator: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    kind: str,
    device: torch.device,
    seed: int,
) -> None:
    share, k, n, rounds = (24 if operator == "one_shot" else 130), 256, 264, 6
    rows = share if operator == "one_shot" else share * world_size
    operands = [
        [
            (
                whole(dtypes[0], rows, k), whole(dtypes[1], n, k),
                x_scale_of(kind, rows, k), weight_scale_of(kind, n, k),
            )
            for _ in range(rounds)
        ]
        for _ in range(world_size)
    ]  # fmt: skip

    def call(group: plait.Group, x, weight, x_scale, weight_scale) -> torch.Tensor:
        options = {"x_scale": x_scale, "weight_scale": weight_scale, "impl": "fused"}
        options |= {"group": group, "reduce_dtype": FP32, "out_dtype": FP32}
        if operator == "gemm_rs":
            return plait.gemm_rs(x, weight, **options)
        return plait.gemm_ar(x, weight, algorithm=operator, **options)

    results = run_rounds(world_size, device, seed, operands, call)
    for index in range(rounds):
        total = torch.zeros(rows, n, dtype=FP64)
        for each in operands:
            x, weight, x_scale, weight_scale = each[index]
            total += wide_x(x, x_scale) @ wide_weight(weight, weight_scale).t()
        expected = total.float().split(share) if operator == "gemm_rs" else [total.float()] * 8
        for rank, outs in enumerate(results):
            assert_bitwise(outs[index] + 0.0, expected[rank] + 0.0)  # -0.0 is 0.0 here


# --- emulated peers
def fill_gather(
    group: plait.Group, xs: list[torch.Tensor], scales: list[torch.Tensor], rows: int
) -> None:
    """What each peer "sends": rows [rows, K], and behind all slots scales [rows, columns], [1]."""
    features, slot = xs[0].shape[1], padded_rows(rows)
    for region in group.workspace.regions[:NUM_REGIONS]:
        for peer in range(1, group.world_size):
            columns = scales[peer].shape[1] if scales[peer].dim() == 2 else 1
            behind = group.world_size * slot * features + peer * slot * columns * 4
            for rank in (group.rank, peer):
                place = region.data(rank, peer * slot * features, (rows, features), xs[peer].dtype)
                place.copy_(xs[peer])
                region.data(rank, behind, tuple(scales[peer].shape), FP32).copy_(scales[peer])


def check_rounds(
    call: Callable[[], torch.Tensor],
    change: Callable[[], None],
    check: Callable[[torch.Tensor], None],
    group: plait.Group,
) -> None:
    """Three eager rounds, the last ones planned, then replays of a graph and an eager call."""
    for index in range(3):
        change()
        check(call())
        record = plait.last_run()
        assert record is not None
        assert record.impl == "fused"
        assert index < 2 or record.detail == "planned"
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(20):
        change()
        out.fill_(float("nan"))
        graph.replay()
        check(out)
    group.synchronize()
    check(call())
    group.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_ag_gemm_with_emulated_peers(group: plait.Group, kind: str, device: torch.device) -> None:
    rows, k, n = 300, 512, 640
    xs = [whole(E4M3, rows, k).to(device) for _ in range(WORLD)]
    scales = [x_scale_of(kind, rows, k).to(device) for _ in range(WORLD)]
    weight, weight_scale = whole(E4M3, n, k).to(device), weight_scale_of(kind, n, k).to(device)

    def call() -> torch.Tensor:
        return plait.ag_gemm(
            xs[0], weight, group=group, x_scale=scales[0], weight_scale=weight_scale,
            out_dtype=FP32, impl="fused",
        )  # fmt: skip

    def change() -> None:
        xs[0].copy_(whole(E4M3, rows, k))
        scales[0].copy_(x_scale_of(kind, rows, k))

    def check(out: torch.Tensor) -> None:
        gathered = torch.cat([wide_x(x, scale) for x, scale in zip(xs, scales, strict=True)])
        assert_bitwise(out, (gathered @ wide_weight(weight, weight_scale).t()).float())

    for _ in range(4):  # both regions have grown and have their plans
        call()
    fill_gather(group, xs, scales, rows)
    check_rounds(call, change, check, group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", ["gemm_rs", "gemm_ar"])
def test_sums_with_emulated_peers(
    group: plait.Group, operator: str, kind: str, device: torch.device
) -> None:
    share, k, n = 32, 512, 640
    rows = share if operator == "gemm_ar" else share * WORLD
    x, weight = whole(E4M3, rows, k).to(device), whole(E4M3, n, k).to(device)
    x_scale = x_scale_of(kind, rows, k).to(device)
    weight_scale = weight_scale_of(kind, n, k).to(device)
    parts = [whole(FP32, share, n).to(device) for _ in range(WORLD)]

    def call() -> torch.Tensor:
        options = {"algorithm": "one_shot"} if operator == "gemm_ar" else {}
        return getattr(plait, operator)(
            x, weight, group=group, x_scale=x_scale, weight_scale=weight_scale,
            reduce_dtype=FP32, out_dtype=FP32, impl="fused", **options,
        )  # fmt: skip

    def change() -> None:
        x.copy_(whole(E4M3, rows, k))
        x_scale.copy_(x_scale_of(kind, rows, k))

    def check(out: torch.Tensor) -> None:
        own = wide_x(x, x_scale)[:share] @ wide_weight(weight, weight_scale).t()
        expected = (own + sum(part.to(FP64) for part in parts[1:])).float()
        assert_bitwise(out + 0.0, expected + 0.0)

    for _ in range(4):
        call()
    fill_slots(group, parts, share)
    check_rounds(call, change, check, group)


@pytest.mark.parametrize(("dtype", "k"), [(E4M3, 2048), (E4M3, 8192), (E5M2, 2048), (INT8, 4096)])
@pytest.mark.parametrize("kind", KINDS)
def test_large_tiles(dtype: torch.dtype, k: int, kind: str, device: torch.device) -> None:
    """The tiles of large problems: wide where one accumulator is enough, last wave in pieces."""
    rows, n = 512, 7168
    group = plait.Group.emulated(WORLD, link="paced:360", device=device)
    draw = (
        (lambda *shape: torch.randint(-128, 128, shape, dtype=INT8, device=device))
        if dtype is INT8
        else (lambda *shape: torch.randn(shape, device=device).to(dtype))
    )
    xs, weight = [draw(rows, k) for _ in range(WORLD)], draw(n, k)
    scales = [x_scale_of(kind, rows, k).to(device) for _ in range(WORLD)]
    weight_scale = weight_scale_of(kind, n, k).to(device)

    def call() -> torch.Tensor:
        return plait.ag_gemm(
            xs[0], weight, group=group, x_scale=scales[0], weight_scale=weight_scale, impl="fused"
        )

    for _ in range(4):
        call()
    fill_gather(group, xs, scales, rows)
    out = call()
    group.synchronize()
    gathered = torch.cat([wide_x(x, scale) for x, scale in zip(xs, scales, strict=True)])
    exact = gathered @ wide_weight(weight, weight_scale).t()
    error = (out.to(FP64) - exact).norm() / exact.norm()
    assert error < 2**-8.5  # rounding to bf16 is 2^-9.2, the short accumulator adds to it
    group.close()
