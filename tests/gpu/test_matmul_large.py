"""`plait.matmul(impl="fused")` where offsets in elements do not fit 32 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

import plait
from plait.ops.matmul.configs import Config
from plait.testing.compare import assert_close_to_fp64

BF16 = torch.bfloat16
ROWS, COLUMNS = 70_000, 32_768  # together more than 2^31 elements
BATCH, BATCH_ROWS = 3, 24_000
GIB = 1 << 30

POINTERS = Config(128, 128, 64, 8, 3, 8, False)
DESCRIPTORS = Config(128, 128, 64, 8, 3, 8, True)


@pytest.fixture(autouse=True)
def _room(device: torch.device) -> Iterator[None]:
    free, _ = torch.cuda.mem_get_info(device)
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of GPU memory, {free / GIB:.0f} are free")
    yield
    torch.cuda.empty_cache()


def _randn(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=BF16, device=device).normal_()


def _some_rows(count: int, columns: int) -> list[int]:
    """First and last rows, those around element 2^31, and a few others."""
    edge = 2**31 // columns
    others = torch.randint(0, count, (8,)).tolist()
    rows = {0, 1, 127, 128, edge - 1, edge, edge + 1, *others, count - 2, count - 1}
    return sorted(row for row in rows if row < count)


def _check_rows(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Some rows [N] and the last column of out [M, N] against fp64; nothing of `out` is NaN."""
    rows = _some_rows(out.shape[0], max(out.shape[1], x.shape[1]))
    some = x[rows]
    exact, plain = some.double() @ weight.double().mT, some @ weight.mT
    if bias is not None:
        exact, plain = exact + bias.double(), plain + bias
    assert_close_to_fp64(out[rows], exact, plain)
    last = x @ weight[-1:].mT
    for first in range(0, out.shape[0], 8192):
        part = slice(first, first + 8192)
        assert not bool(out[part].isnan().any()), f"NaN in rows from {first}"
        exact_last = x[part].double() @ weight[-1:].double().mT
        if bias is not None:
            exact_last = exact_last + bias[-1].double()
        assert_close_to_fp64(
            out[part, -1:], exact_last, last[part] + (0 if bias is None else bias[-1])
        )


def _nan(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=BF16, device=device)


@pytest.mark.parametrize("config", [None, POINTERS, DESCRIPTORS], ids=["chosen", "ptr", "desc"])
def test_more_than_2_31_elements_of_x(config: Config | None, device: torch.device) -> None:
    x, weight = _randn((ROWS, COLUMNS), device), _randn((72, COLUMNS), device)
    assert x.numel() > 2**31
    for _ in range(2 if config is None else 1):  # the second call is a planned one
        _check_rows(plait.matmul(x, weight, impl="fused", config=config), x, weight)


@pytest.mark.parametrize("config", [None, POINTERS, DESCRIPTORS], ids=["chosen", "ptr", "desc"])
def test_more_than_2_31_elements_of_out(config: Config | None, device: torch.device) -> None:
    x, weight = _randn((ROWS, 16), device), _randn((COLUMNS, 16), device)
    bias, out = _randn((COLUMNS,), device), _nan((ROWS, COLUMNS), device)
    plait.matmul(x, weight, bias, impl="fused", config=config, out=out)
    _check_rows(out, x, weight, bias)


def test_more_than_2_31_elements_of_a_planned_result(device: torch.device) -> None:
    x, weight = _randn((ROWS, 16), device), _randn((COLUMNS, 16), device)
    plait.matmul(x, weight, impl="fused")
    torch.cuda.empty_cache()
    poison = _nan((ROWS, COLUMNS), device)
    del poison  # the result takes its place
    out = plait.matmul(x, weight, impl="fused")
    record = plait.last_run()
    assert record is not None
    assert record.detail == "planned"
    _check_rows(out, x, weight)


def test_more_than_2_31_elements_of_parts(device: torch.device) -> None:
    x, weight = _randn((ROWS, 256), device), _randn((COLUMNS // 2, 256), device)
    config = Config(128, 128, 64, 8, 3, 8, True, splits=2)
    out = _nan((ROWS, COLUMNS // 2), device)
    plait.matmul(x, weight, impl="fused", config=config, out=out)
    _check_rows(out, x, weight)


@pytest.mark.parametrize("config", [None, POINTERS, DESCRIPTORS], ids=["chosen", "ptr", "desc"])
@pytest.mark.parametrize("large", ["x", "out", "weight"])
def test_batches_of_more_than_2_31_elements(
    large: str, config: Config | None, device: torch.device
) -> None:
    m, n, k = {
        "x": (BATCH_ROWS, 72, COLUMNS),
        "out": (BATCH_ROWS, COLUMNS, 16),
        "weight": (72, BATCH_ROWS, COLUMNS),
    }[large]
    x, weight = _randn((BATCH, m, k), device), _randn((BATCH, n, k), device)
    out = _nan((BATCH, m, n), device)
    assert max(x.numel(), weight.numel(), out.numel()) > 2**31
    plait.matmul(x, weight, impl="fused", config=config, out=out)
    for batch in range(BATCH):
        _check_rows(out[batch], x[batch], weight[batch])


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
def test_views_beyond_2_31(aligned: bool, device: torch.device) -> None:
    """x, weight and out lie behind element 2^31 of their memory."""
    m, n, k = 300, 520, 264
    first = 2**31 + (8 if aligned else 7)
    views = []
    for rows, columns in ((m, k), (n, k), (m, n)):
        memory = torch.empty(first + rows * columns, dtype=BF16, device=device)
        views.append(memory[first:].view(rows, columns))
    x, weight, out = views
    x.normal_()
    weight.normal_()
    out.fill_(math.nan)
    plait.matmul(x, weight, impl="fused", out=out)
    _check_rows(out, x, weight)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("which", ["x", "weight", "out"])
def test_rows_far_apart(which: str, aligned: bool, device: torch.device) -> None:
    """130 rows, 2^25 elements from one to the next: the last begins behind element 2^32."""
    m, n, k = 130, 130, 264
    step = 2**25 + (0 if aligned else 1)

    def far(columns: int) -> torch.Tensor:
        memory = torch.empty(129 * step + columns, dtype=BF16, device=device)
        return memory.as_strided((130, columns), (step, 1))

    x = far(k) if which == "x" else torch.empty(m, k, dtype=BF16, device=device)
    weight = far(k) if which == "weight" else torch.empty(n, k, dtype=BF16, device=device)
    out = far(n) if which == "out" else torch.empty(m, n, dtype=BF16, device=device)
    x.normal_()
    weight.normal_()
    out.fill_(math.nan)
    plait.matmul(x, weight, impl="fused", out=out)
    _check_rows(out, x, weight)
