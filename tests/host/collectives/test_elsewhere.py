"""Collectives beyond virtual ranks: groups without symmetric memory, and kernels for sm90."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.collectives.kernels import _arrive_kernel, _sum_segments_kernel
from plait.errors import UnsupportedError
from plait.symm.group import Group
from plait.testing.compile_sm90 import compile_for


class Recorder:
    """A transport without symmetric memory: notes what it is asked for."""

    symmetric, rank, world_size, executor = False, 1, 2, None

    def __init__(self, device):
        self.device, self.calls = device, []

    def all_gather(self, x, dim, sizes):
        self.calls.append(("all_gather", tuple(x.shape), dim, sizes))
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x, dim, sizes, reduce_dtype, out_dtype):
        self.calls.append(("reduce_scatter", x.dtype, dim, sizes, reduce_dtype, out_dtype))
        return x.narrow(dim, 0, sizes[1]).to(out_dtype)

    def all_reduce(self, x, reduce_dtype, out_dtype=None):
        self.calls.append(("all_reduce", x.dtype, reduce_dtype))
        return x + x

    def all_to_all(self, x, input_splits, output_splits):
        self.calls.append(("all_to_all", input_splits, output_splits))
        return x.new_zeros(sum(output_splits), *x.shape[1:])

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def group(device):
    group = Group("without symmetric memory", Recorder(device))
    yield group
    group.close()


def test_the_transport_serves_where_ranks_share_no_memory(group, device):
    x = torch.ones(4, 3, device=device)
    half = torch.bfloat16
    plait.all_gather(x, group=group, dim=1)
    plait.reduce_scatter(x, group=group, rows_per_rank=[3, 1], reduce_dtype=half)
    assert plait.all_reduce(x, group=group, reduce_dtype=half).dtype == torch.float32
    plait.all_to_all(x, group=group)
    plait.all_to_all(x, group=group, input_splits=[1, 3], output_splits=[0, 3])
    assert group.transport.calls == [
        ("all_gather", (4, 3), 1, (3, 3)),
        ("reduce_scatter", half, 0, (3, 1), half, torch.float32),
        ("all_reduce", torch.float32, half),
        ("all_to_all", (2, 2), (2, 2)),
        ("all_to_all", (1, 3), (0, 3)),
    ]
    record = plait.last_run()
    assert (record.impl, record.reason) == ("unfused", "auto: the ranks share no symmetric memory")


@pytest.mark.parametrize(
    "operator", [plait.all_gather, plait.reduce_scatter, plait.all_reduce, plait.all_to_all]
)
def test_an_explicit_fused_raises_there(operator, group, device):
    with pytest.raises(UnsupportedError, match="expected symmetric memory between the ranks"):
        operator(torch.ones(4, device=device), group=group, impl="fused")
    assert group.transport.calls == []


@pytest.mark.newest_triton
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_kernel_compiles_to_wide_accesses_without_spills(dtype, world_size):
    data = torch.empty(1024, dtype=dtype)
    args = {
        "ctx_ptr": torch.empty(64, dtype=torch.int64),
        "own_ptr": data,
        "slots_ptr": data,
        "out_ptr": data,
        "num_elements": 1 << 20,
        "slot_elements": 1 << 20,
        "num_chunks": 4,
        "chunk_elements": 1 << 18,
        "WORLD_SIZE": world_size,
        "BLOCK": 4096,
        "OP": 3,
    }
    compiled = compile_for(_sum_segments_kernel, args, num_warps=8)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert r"ld\.global\.v4\.b32" in compiled.ptx
    assert r"acquire\.sys|sys\.acquire" in compiled.ptx


@pytest.mark.newest_triton
def test_arrive_kernel_compiles():
    words = torch.empty(64, dtype=torch.int32)
    args = {
        "ctx_ptr": words.view(torch.int64),
        "table_ptr": words,
        "slots_ptr": words,
        "slot_words": 64,
        "num_chunks": 4,
        "chunk_rows": 100,
        "BLOCK": 1024,
        "OP": 2,
    }
    assert compile_for(_arrive_kernel, args, num_warps=1).spill_bytes == 0
