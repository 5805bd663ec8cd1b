"""Tuning products: candidates, both sides' operands, what wins, and compiling without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from plait.ops.matmul import precompile, tune, tuned
from plait.ops.matmul.candidates import tuning_candidates
from plait.ops.matmul.configs import Config, default_config, is_valid
from plait.ops.matmul.precompile import CompileJob
from plait.ops.matmul.problem import Problem, make_operands
from plait.ops.matmul.tuned import config_of, config_text
from tests.host.cli.bench_fakes import GPU, FakeGpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


# Candidates


@pytest.mark.parametrize("M", [1, 16, 33, 64, 128, 512, 1024, 16384])
@pytest.mark.parametrize(
    ("dtype", "precision", "allowed"),
    [
        (BF16, "ieee", True),
        (BF16, "ieee", False),
        (FP8, "ieee", True),
        (torch.float32, "tf32", True),
        (torch.float32, "ieee", True),
    ],
)
def test_candidates_are_valid_few_and_distinct(M, dtype, precision, allowed):
    for N, K in ((6144, 12288), (512, 4096), (4096, 512), (100, 1000)):
        found = tuning_candidates(M, N, K, dtype, "sm90", allowed, precision=precision)
        assert found[0] == default_config(M, N, K, dtype, "sm90", allowed, precision=precision)
        assert all(is_valid(each, dtype, "sm90", precision=precision) for each in found)
        assert len(set(found)) == len(found) <= 100
        assert len(found) > 1 or min(M, N) < 128
        assert allowed or not any(each.desc for each in found)
        assert all(each.splits == 1 or K // each.splits >= 512 for each in found[1:])


def test_candidates_have_the_tiles_of_their_regime():
    large = tuning_candidates(8192, 6144, 12288, BF16)
    assert {each.group_m for each in large} == {4, 8, 16}
    assert not any(each.splits > 1 and not each.split_tail for each in large)
    for tile in (
        Config(128, 256, 64, 8, 3, 8, True),
        Config(256, 128, 64, 8, 4, 16, True),
        Config(128, 128, 64, 4, 6, 4, True),
    ):
        assert tile in large
    decode = tuning_candidates(16, 6144, 12288, BF16)
    assert {each.block_m for each in decode} == {16, 32, 64}
    assert {each.splits for each in decode} >= {1, 2, 3, 4, 8}
    assert {each.group_m for each in decode} == {8}
    middle = tuning_candidates(512, 3584, 8192, BF16)
    assert {each.block_m for each in middle} == {64, 128, 256}
    assert any(each.blocks_per_sm == 2 for each in middle)


def test_group_sizes_that_the_rows_cannot_show_are_left_out():
    found = tuning_candidates(1024, 12288, 6144, BF16)
    assert {each.group_m for each in found if each.block_m == 256} == {8}
    assert {each.group_m for each in found if each.block_m == 128} == {4, 8}


def test_batches_have_candidates_with_several_blocks_an_sm():
    found = tuning_candidates(1024, 1024, 1024, BF16, batch=16)
    alone = tuning_candidates(1024, 1024, 1024, BF16)
    shared = {each for each in found if each.blocks_per_sm > 1}
    assert {(each.block_m, each.block_n) for each in shared - set(alone)} >= {
        (64, 64), (128, 64), (64, 128),
    }  # fmt: skip
    # Alone 64 tiles leave half of the GPU idle; sixteen times as many need splits of the tail only.
    assert any(each.splits > 1 and not each.split_tail for each in alone)
    assert not any(each.splits > 1 and not each.split_tail for each in found)
    assert max(each.splits for each in tuning_candidates(64, 64, 4096, BF16, batch=4)) == 8
    assert tuning_candidates(64, 256, 4096, BF16, batch=1) == tuning_candidates(64, 256, 4096, BF16)


def test_precise_fp8_has_small_tiles():
    small = Config(64, 128, 128, 4, 3, 8, True, blocks_per_sm=3)
    precise = tuning_candidates(8192, 8192, 8192, FP8)
    fast = tuning_candidates(8192, 8192, 8192, FP8, fast_accum=True)
    assert small in precise
    assert small not in fast
    tiles = {(128, 256, 128), (256, 128, 128), (128, 128, 128)}
    for found in (precise, fast):
        assert tiles <= {(each.block_m, each.block_n, each.block_k) for each in found}


def test_a_task_starts_with_what_runs_without_a_table():
    """Also where it differs from `default_config`; by descriptors only where they may read."""
    precise = tune.make_task(Problem(4096, 4096, 4096, FP8, scales="rows"), GPU).candidates
    fast = Problem(4096, 4096, 4096, FP8, scales="rows", fast_accum=True)
    assert precise[0].block_m * precise[0].block_n == 128 * 128  # two accumulators
    assert tune.make_task(fast, GPU).candidates[0] in tuning_candidates(
        4096, 4096, 4096, FP8, fast_accum=True
    )
    # Beyond K = 72 lies the next batch: no tile of 64 divides it.
    stored = Problem(256, 256, 72, BF16, layout="kn", batch=4)
    assert not any(each.desc for each in tune.make_task(stored, GPU).candidates)
    divided = replace(stored, K=64)
    found = tune.make_task(divided, GPU).candidates
    assert all(each.block_k <= 64 for each in found if each.desc)
    assert any(each.desc for each in found)


# Operands and errors


@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 48, 64, BF16),
        Problem(32, 48, 64, torch.float16, layout="kn"),
        Problem(32, 48, 64, torch.float32, batch=3),
        Problem(32, 48, 64, BF16, batch=2, layout="kn"),
        Problem(32, 48, 64, FP8, scales="tensor"),
        Problem(32, 48, 64, FP8, scales="rows"),
    ],
    ids=str,
)
def test_both_sides_compute_the_same(problem, device):
    gpu, operands = FakeGpu(), make_operands(problem, device)
    operands.baseline()
    exact = operands.x.double() @ operands.weight.double().mT
    if operands.scaling is not None:
        exact = exact * operands.scaling.x[:, None] * operands.scaling.weight
    worst = (operands.expected.double() - exact).abs().max() / exact.abs().max()
    # One rounding of the result, or as many of fp32 as there are terms.
    assert worst < max(torch.finfo(problem.out_dtype).eps, problem.K * 2**-24)
    config = Config(32, 32, 32, 4, 1, 8, problem.layout == "nk")
    program = operands.program(config, 1)
    assert operands.error_of(lambda: gpu.run(program)) < problem.error_limit / 2


def test_an_error_cannot_hide(device):
    problem = Problem(64, 64, 64, BF16)
    operands = make_operands(problem, device)
    operands.baseline()

    def right_but(change):
        def write():
            operands.out.copy_(operands.expected)
            change(operands.out)

        return operands.error_of(write)

    limit = problem.error_limit
    assert right_but(lambda out: None) == 0
    assert right_but(lambda out: out[0, 0].add_(1.0 + out.std())) > limit
    assert right_but(lambda out: out[:, 7].mul_(1.05)) > limit
    assert right_but(lambda out: out[3, 3].fill_(math.nan)) == math.inf
    assert right_but(lambda out: out[3, 3].fill_(math.inf)) == math.inf
    assert operands.error_of(lambda: None) == math.inf  # the right result is not there any more


# Tuning


def tune_all(gpu, problems, device, compiled=None, clock=None, rounds=7):
    tasks = [tune.make_task(problem, GPU) for problem in problems]
    clock = clock or tune.Clock()
    return list(tune.tune_all(tasks, gpu.lab(device), compiled, clock, rounds=rounds))


def test_the_fastest_right_config_wins(device):
    gpu, problem = FakeGpu(), Problem(256, 512, 1024, BF16)
    configs = tune.make_task(problem, GPU).candidates
    fastest, second = configs[3], configs[-1]
    gpu.slow = {config_text(fastest): 0.5, config_text(second): 0.75}
    (found,) = tune_all(gpu, [problem], device)
    assert found.config == fastest
    assert config_of(found.entry) == fastest
    assert (found.entry.time_us, found.entry.baseline_us) == (50.5, 101.0)
    assert found.entry.shape == {"M": 256, "N": 512, "K": 1024}
    assert found.entry.key == tuned.tuning_key(BF16)
    assert found.default_us == 101.0
    (first, rounds), (final, final_rounds) = gpu.timed
    assert rounds == 3
    assert final_rounds == 7
    assert len(first) == len(configs) + 1 == found.num_timed + 1
    assert final[:3] == ["baseline", config_text(fastest), config_text(second)]
    assert len(final) <= 6
    assert config_text(configs[0]) in final


def test_a_wrong_or_failing_config_is_never_recorded(device):
    gpu, problem = FakeGpu(), Problem(256, 512, 1024, BF16)
    configs = tune.make_task(problem, GPU).candidates
    tiles = {f"{each.block_m}x{each.block_n}x{each.block_k}" for each in configs}
    gpu.wrong, gpu.failing = {"128x128x64"}, {"64x128x128"}
    assert gpu.wrong | gpu.failing < tiles
    bad = [each for each in map(config_text, configs) if each.split()[0] in gpu.wrong | gpu.failing]
    gpu.slow = dict.fromkeys(bad, 0.1)
    (found,) = tune_all(gpu, [problem], device)
    assert config_text(found.config) not in bad
    assert not set(gpu.timed[0][0]) & set(bad)
    assert len(found.rejected) == len(bad)
    reasons = {text.partition(": ")[2].split(",")[0] for text in found.rejected}
    assert reasons == {"wrong result", "RuntimeError: out of registers"}

    gpu.wrong = tiles
    (nothing,) = tune_all(gpu, [problem], device)
    assert nothing.entry is None
    assert len(nothing.rejected) == len(configs)


def test_what_is_not_compiled_is_not_run(device):
    gpu, problem = FakeGpu(), Problem(256, 512, 1024, BF16)
    task = tune.make_task(problem, GPU)
    jobs = tune.distinct_jobs([task])
    compiled = dict.fromkeys(jobs, "CompilationError: no")
    good = task.jobs()[task.candidates[2]].key
    compiled[good] = ""
    del compiled[task.jobs()[task.candidates[0]].key]
    (found,) = tune_all(gpu, [problem], device, compiled)
    assert task.jobs()[found.config].key == good
    assert found.default_us is None
    assert any("not compiled in time" in text for text in found.rejected)
    assert any("CompilationError: no" in text for text in found.rejected)


def test_the_limit_stops_in_time(device):
    now = iter(range(0, 1000, 10))
    gpu, problems = FakeGpu(), [Problem(16, 64, 64, BF16)] * 5
    clock = tune.Clock(limit_s=95.0, now=lambda: float(next(now)))
    found = tune_all(gpu, problems, device, clock=clock)
    assert 1 <= len(found) < 5
    assert tune_all(gpu, problems, device, clock=tune.Clock(limit_s=0.0)) == []
    half = tune.Clock(limit_s=8.0, now=iter([0.0, 3.0, 5.0]).__next__)
    assert half.remaining_s(0.5) == 1.0
    assert half.remaining_s() == 3.0


def test_jobs_with_the_same_kernels_are_one():
    tile = Config(64, 64, 64, 4, 3, 8, True, splits=2)
    job = CompileJob(Problem(64, 128, 1024, BF16), tile)
    tail = replace(tile, split_tail=True)
    same = CompileJob(Problem(96, 256, 2048, BF16), replace(tile, splits=4, blocks_per_sm=2))
    assert job.key == same.key
    others = [
        replace(job, problem=Problem(1, 128, 1024, BF16)),
        replace(job, problem=Problem(65, 128, 1024, BF16)),
        replace(job, problem=Problem(64, 128, 1024, torch.float16)),
        replace(job, problem=Problem(64, 128, 1024, BF16, layout="kn")),
        replace(job, config=replace(tile, splits=1)),
        replace(job, config=replace(tile, group_m=4)),
        replace(job, problem=Problem(64, 128, 1024, BF16, batch=4)),
        replace(job, num_sms=132, problem=Problem(64, 64 * 140, 1024, BF16), config=tail),
    ]
    # 2 tiles on 132 SMs are all split; of 140 on 132 the last 8; 132 fill the wave.
    assert replace(job, num_sms=132, config=tail).key == job.key
    filled = replace(job, num_sms=132, problem=Problem(64, 64 * 132, 1024, BF16), config=tail)
    assert filled.key == replace(job, config=replace(tile, splits=1)).key
    assert len({each.key for each in (job, *others)}) == len(others) + 1


def test_kernels_are_compiled_without_a_gpu(tmp_path, monkeypatch):
    """In a process of its own: one kernel that compiles, one that cannot."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = Config(16, 64, 64, 4, 2, 8, True, splits=2)
    good = CompileJob(Problem(16, 128, 1024, BF16), tile)
    bad = CompileJob(good.problem, replace(tile, block_k=48))
    steps = []
    results = precompile.precompile(
        {each.key: each for each in (good, bad)},
        "sm90",
        remaining_s=lambda: 100.0,
        on_done=lambda: steps.append(1),
        num_workers=1,
    )
    assert results[good.key] == ""
    assert "Error" in results[bad.key]
    assert len(steps) == 2
    cubins = {path.name for path in tmp_path.rglob("*.cubin")}
    assert cubins == {"_matmul_kernel.cubin", "_sum_splits_kernel.cubin"}
    assert precompile.can_precompile("sm90")
    assert not precompile.can_precompile("gfx942")
