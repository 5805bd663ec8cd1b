"""`plan_matmul` on the interpreter: split tails, stores through descriptors, flattened loops."""

from dataclasses import replace

import pytest
import torch

import plait
from plait.backends.base import executor_for
from plait.ops.matmul.configs import Config, finish_columns, is_valid
from plait.ops.matmul.launch import plan_matmul
from plait.ops.matmul.reference import activation_reference
from plait.testing.compare import assert_bitwise, assert_close_to_fp64

pytestmark = pytest.mark.newest_triton

BF16, FP32 = torch.bfloat16, torch.float32
TILE = Config(16, 32, 32, 4, 1, 2, True)


def run(x, weight, out, config, *, num_sms=3, bias=None, activation="none"):
    """Fill `out` with `num_sms` blocks; returns the program."""
    biases = [] if bias is None else [bias]
    program = plan_matmul(
        x, [weight], biases, out, activation=activation, config=config, num_sms=num_sms
    )
    executor_for(x.device).run(program)
    return program


def on_one_rank(fn):
    return plait.run_virtual(lambda group: fn(), 1)[0]


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def check(out, x, weight, bias, activation):
    exact = x.double() @ weight.double().mT + bias.double()
    plain = activation_reference([x @ weight.mT + bias], activation)
    assert_close_to_fp64(out, activation_reference([exact], activation), plain)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("desc_store", [True, False])
def test_only_the_tail_is_split(splits, lead, desc_store):
    """The first wave is bitwise that of the unsplit product; the rest sums in another order."""

    def fn():
        torch.manual_seed(0)
        x, weight = torch.randn(*lead, 40, 248), torch.randn(*lead, 56, 248)
        bias = torch.randn(56)
        tail = replace(TILE, splits=splits, split_tail=True, desc_store=desc_store)
        out, whole = poisoned(*lead, 40, 56, dtype=FP32), poisoned(*lead, 40, 56, dtype=FP32)
        sms = 4 if not lead else 5
        program = run(x, weight, out, tail, num_sms=sms, bias=bias, activation="gelu")
        gemm, total = program.launches()
        tiles = 6 * (lead[0] if lead else 1)
        assert gemm.args["whole_tiles"] == tiles // sms * sms
        assert gemm.args["parts_ptr"].shape == (splits, tiles % sms, 16, 32)
        assert total.grid > 0
        check(out, x, weight, bias, "gelu")
        run(x, weight, whole, TILE, num_sms=sms, bias=bias, activation="gelu")
        assert_bitwise(out.view(-1, 40, 56)[0, :16, :32], whole.view(-1, 40, 56)[0, :16, :32])
        assert not torch.equal(out, whole)

    on_one_rank(fn)


def test_a_full_last_wave_is_not_split():
    def fn():
        x, weight = torch.randn(32, 64), torch.randn(64, 64)
        out = poisoned(32, 64, dtype=FP32)
        program = run(x, weight, out, replace(TILE, splits=2, split_tail=True), num_sms=2)
        assert len(program.launches()) == 1
        check(out, x, weight, torch.zeros(64), "none")

    on_one_rank(fn)


OUTS = {
    "contiguous": lambda *shape: poisoned(*shape, dtype=BF16),
    "padded rows": lambda *shape: poisoned(*shape[:-1], shape[-1] + 8, dtype=BF16)[
        ..., : shape[-1]
    ],
    "odd row stride": lambda *shape: poisoned(*shape[:-1], shape[-1] + 3, dtype=BF16)[
        ..., : shape[-1]
    ],
    "columns": lambda *shape: poisoned(*shape[:-2], shape[-1], shape[-2], dtype=BF16).mT,
    "odd address": lambda *shape: poisoned(*shape[:-1], shape[-1] + 16, dtype=BF16)[
        ..., 3 : shape[-1] + 3
    ],
}


@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("flatten", [True, False])
def test_stores_stay_within_out(layout, lead, flatten):
    """Rows and columns beyond the matrix, the next batch and the padding keep what they held."""

    def fn():
        x, weight = torch.randn(*lead, 21, 40).to(BF16), torch.randn(*lead, 48, 40).to(BF16)
        out = OUTS[layout](*lead, 21, 48)
        described, pointers = out.clone(), out.clone()
        whole = out._base if out._base is not None else out
        program = run(x, weight, out, replace(TILE, desc_store=True, flatten=flatten))
        assert program.launches()[0].args["OUT_DESC"] == (layout in ("contiguous", "padded rows"))
        run(x, weight, pointers, TILE)
        assert_bitwise(out, pointers)
        assert int(whole.isnan().sum()) == whole.numel() - described.numel()

    on_one_rank(fn)


def test_tiles_are_stored_in_pieces_that_leave_room():
    """Half of a 128 x 128 tile, a quarter of a larger one: two blocks of 96 KiB fit an SM."""
    tile = Config(128, 128, 64, 8, 3, 8, True, blocks_per_sm=2, desc_store=True)
    assert finish_columns(tile) == 64
    assert is_valid(tile, BF16, "sm90")
    assert not is_valid(replace(tile, num_stages=4), BF16, "sm90")
    assert finish_columns(replace(tile, block_n=256)) == 64
    assert finish_columns(replace(tile, block_m=64)) == 128
