"""`Group.launch` and `plait.symm.lang`: kernels that users write."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from plait.errors import DeadlockError, PeerTimeoutError, RanksDisagreeError
from plait.symm import lang
from plait.symm.lang import READY, USER, get_epoch, get_rank, get_world_size, signal, wait
from plait.testing.compare import assert_bitwise
from plait.testing.compile_sm90 import compile_for
from plait.testing.ranks import run_virtual


@triton.jit
def _double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out [n] = 2 * x [n], a block of BLOCK each."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit
def _token_kernel(ctx_ptr, out_ptr):
    """One block: a token goes round; out [1] is 1 where it came from the left."""
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    if rank == 0:
        signal(ctx_ptr, 1, READY, epoch)
    arrived = wait(ctx_ptr, READY, epoch, (rank + world_size - 1) % world_size, USER)
    if rank != 0:
        signal(ctx_ptr, (rank + 1) % world_size, READY, epoch)
    tl.store(out_ptr, arrived.to(tl.float32))


def send_token(group):
    out = torch.zeros(1)
    group.launch(_token_kernel, 1, region=group.take_region(4), operator="token", out_ptr=out)
    return out.item()


def test_a_kernel_without_a_region_needs_no_peer():
    def fn(group):
        if group.rank:
            return None
        x, out = torch.randn(7), torch.empty(7)
        group.launch(_double_kernel, 2, x_ptr=x, out_ptr=out, n=7, BLOCK=4)
        return x, out

    x, out = run_virtual(fn, 1)[0]
    assert_bitwise(out, 2 * x)


@pytest.mark.parametrize("schedule", ["random", "late:0", "waiter_first"])
def test_rounds_in_both_regions(schedule):
    fn = lambda group: [send_token(group) for _ in range(6)]  # noqa: E731
    assert run_virtual(fn, 3, schedule=schedule) == [[1.0] * 6] * 3


def test_one_region_may_be_used_again_and_again():
    def fn(group):
        region, outs = group.take_region(4), torch.zeros(5)
        for index in range(5):
            out = outs[index : index + 1]
            group.launch(_token_kernel, 1, region=region, out_ptr=out)
        return outs.tolist()

    assert run_virtual(fn, 3, schedule="late:1") == [[1.0] * 5] * 3


def test_a_peer_that_never_comes_is_missed():
    """Rank 2 waits for the token of rank 1, and rank 0 for that of rank 2."""

    def fn(group):
        group.take_region(4)
        group.take_region(4)
        if group.rank == 1:
            return None
        with pytest.raises(PeerTimeoutError) as raised:
            send_token(group)
        return raised.value.operator

    deadline_ns = 31e9  # beyond PLAIT_DEADLINE_S
    assert run_virtual(fn, 3, deadline_ns_on_deadlock=deadline_ns) == ["user", None, "user"]
    with pytest.raises(DeadlockError, match="token"):
        run_virtual(lambda group: send_token(group) if group.rank else group.take_region(4), 3)


def test_ranks_that_launch_different_kernels_are_told():
    def fn(group):
        region = group.take_region(4)
        name = "token" if group.rank else "other"
        out = torch.zeros(1)
        group.launch(_token_kernel, 1, region=region, operator=name, out_ptr=out)

    with pytest.raises(RanksDisagreeError, match=r"other _token_kernel(.|\n)*token _token_kernel"):
        run_virtual(fn, 2)


def test_a_kernel_that_is_interpreted_here_compiles_for_a_gpu():
    args = {"ctx_ptr": torch.zeros(16, dtype=torch.int64), "out_ptr": torch.zeros(1)}
    compiled = compile_for(_token_kernel, args)
    assert compiled.spill_bytes == 0
    assert r"release\.sys|sys\.release" in compiled.ptx


def test_every_name_of_the_language_resolves():
    for name in lang.__all__:
        assert getattr(lang, name) is not None
        assert name in dir(lang)
    with pytest.raises(AttributeError, match="no attribute 'sginal'"):
        lang.sginal  # noqa: B018


def test_importing_the_language_loads_nothing():
    code = (
        "import sys, plait.symm.lang; assert not {'torch', 'triton'} & set(sys.modules);"
        "from plait.symm.lang import signal; assert 'triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
