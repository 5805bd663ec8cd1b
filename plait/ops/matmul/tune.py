"""Find the fastest config of each product: compile all candidates, check them, time the right ones.

Successive halving: all candidates run a few rounds, the best few and the computed one more of them,
interleaved with torch's call on a GPU that rests in between. A config whose result is wrong is
never recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch

from plait.device import DeviceInfo
from plait.ops.matmul.candidates import tuning_candidates
from plait.ops.matmul.configs import Config
from plait.ops.matmul.fused import chosen_config
from plait.ops.matmul.operands import descriptors_allowed
from plait.ops.matmul.precompile import CompileJob, can_precompile, precompile
from plait.ops.matmul.problem import Operands, Problem, make_operands
from plait.ops.matmul.tuned import OPERATOR, config_dict, config_text
from plait.runtime.lab import Lab, versions
from plait.runtime.tuning_store import TuningEntry

_FIRST_ROUNDS = 3
_FINALISTS = 4
_WORTH_IT = 0.99  # a gain over the computed config that is less is noise
_COMPILE_SHARE = 0.5  # of the time limit; what is not compiled by then is not measured
BASELINE = "baseline"


@dataclass(frozen=True)
class Tuned:
    """What was found for one problem: `entry` is None if no candidate could be used."""

    problem: Problem
    entry: TuningEntry | None
    config: Config | None = None
    default_us: float | None = None
    num_timed: int = 0
    rejected: tuple[str, ...] = ()  # config and reason
    wall_s: float = 0.0


@dataclass
class Clock:
    """Seconds since the start, and until the limit (None: no limit)."""

    limit_s: float | None = None
    now: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.now()

    def remaining_s(self, share: float = 1.0) -> float:
        """Seconds until `share` of the limit has passed."""
        passed = self.now() - self.start
        return 1e9 if self.limit_s is None else share * self.limit_s - passed


@dataclass(frozen=True)
class Task:
    """One problem with the candidates to measure; first what runs without a table."""

    problem: Problem
    candidates: tuple[Config, ...]
    num_sms: int

    def jobs(self) -> dict[Config, CompileJob]:
        """What to compile for each candidate."""
        tf32 = self.problem.precision == "tf32"
        return {
            config: CompileJob(self.problem, config, tf32, self.num_sms)
            for config in self.candidates
        }


def make_task(problem: Problem, info: DeviceInfo) -> Task:
    """All candidates of a problem for operands as `make_operands` allocates them."""
    product = make_operands(problem, torch.device("meta")).product()
    weights, arch = product.weights, info.arch
    configs = tuning_candidates(
        problem.M,
        problem.N,
        problem.K,
        problem.dtype,
        arch,
        descriptors_allowed(product.x, weights, arch),
        precision=problem.precision,
        batch=problem.batch,
        fast_accum=problem.fast_accum,
    )
    computed, _ = chosen_config(product, info, use_tables=False)
    runnable = [
        config
        for config in configs
        if not config.desc or descriptors_allowed(product.x, weights, arch, config.block_k)
    ]
    return Task(problem, tuple(dict.fromkeys((computed, *runnable))), info.num_sms)


def compile_tasks(
    tasks: Sequence[Task], arch: str, clock: Clock, on_done: Callable[[], object] = lambda: None
) -> dict[Hashable, str] | None:
    """Compile the distinct kernels of all tasks in parallel, earlier tasks first.

    Returns what `precompile` returns, or None where kernels can only be compiled when they run.
    """
    if not can_precompile(arch):
        return None
    jobs = distinct_jobs(tasks)
    return precompile(
        jobs, arch, remaining_s=lambda: clock.remaining_s(_COMPILE_SHARE), on_done=on_done
    )


def distinct_jobs(tasks: Sequence[Task]) -> dict[Hashable, CompileJob]:
    """One job for each kernel that the tasks need."""
    jobs: dict[Hashable, CompileJob] = {}
    for task in tasks:
        for job in task.jobs().values():
            jobs.setdefault(job.key, job)
    return jobs


def tune_all(
    tasks: Sequence[Task],
    lab: Lab,
    compiled: Mapping[Hashable, str] | None,
    clock: Clock,
    *,
    rounds: int = 7,
) -> Iterator[Tuned]:
    """Tune one task after the other, until the limit would be passed by one like the longest."""
    longest = 0.0
    for task in tasks:
        if clock.remaining_s() < 1.3 * longest or clock.remaining_s() <= 0:
            return
        begin = clock.now()
        found = tune_one(task, lab, compiled, rounds=rounds)
        wall_s = clock.now() - begin
        longest = max(longest, wall_s)
        yield Tuned(**{**found.__dict__, "wall_s": wall_s})


def tune_one(
    task: Task, lab: Lab, compiled: Mapping[Hashable, str] | None, *, rounds: int = 7
) -> Tuned:
    """Check and time the candidates of one problem; those that are not compiled are left out."""
    problem = task.problem
    operands = make_operands(problem, lab.device)
    operands.baseline()
    runs: dict[str, Callable[[], object]] = {}
    configs: dict[str, Config] = {}
    rejected: list[str] = []
    for config, job in task.jobs().items():
        name = config_text(config)
        reason = "" if compiled is None else compiled.get(job.key, "not compiled in time")
        run = None
        if not reason:
            run, reason = _checked(operands, config, lab)
        if run is None:
            rejected.append(f"{name}: {reason}")
        else:
            runs[name], configs[name] = run, config
    if not runs:
        return Tuned(problem, None, rejected=tuple(rejected))
    first = _medians(lab, operands, runs, _FIRST_ROUNDS)
    order = sorted(runs, key=first.__getitem__)
    finalists = order[:_FINALISTS]
    default = config_text(task.candidates[0])
    if default in runs and default not in finalists:
        finalists.append(default)
    finals: dict[str, Callable[[], object]] = {BASELINE: operands.baseline}
    finals |= {name: runs[name] for name in finalists}
    last = {name: each.median_us for name, each in lab.rested_times(finals, rounds).items()}
    best = min(finalists, key=last.__getitem__)
    if default in finalists and last[default] * _WORTH_IT < last[best]:
        best = default
    entry = _entry(problem, configs[best], last[best], last[BASELINE])
    return Tuned(problem, entry, configs[best], last.get(default), len(runs), tuple(rejected))


def _checked(
    operands: Operands, config: Config, lab: Lab
) -> tuple[Callable[[], object] | None, str]:
    """The candidate's call if its result is right, else why not."""
    try:
        program = operands.program(config, lab.info.num_sms)
        error = operands.error_of(lambda: lab.run(program))
    except Exception as failure:
        # Whatever a candidate does wrong costs it the race; a broken device fails the baseline.
        lines = f"{type(failure).__name__}: {failure}".splitlines()
        return None, lines[0]
    limit = operands.problem.error_limit
    if not error <= limit:
        return None, f"wrong result, error {error:.1e} where {limit:.0e} is allowed"
    return lambda: lab.run(program), ""


def _medians(
    lab: Lab, operands: Operands, runs: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    times = lab.times({BASELINE: operands.baseline, **runs}, rounds)
    return {name: timing.median_us for name, timing in times.items()}


def _entry(problem: Problem, config: Config, time_us: float, baseline_us: float) -> TuningEntry:
    return TuningEntry(
        operator=OPERATOR,
        key=problem.key,
        shape={"M": problem.M, "N": problem.N, "K": problem.K},
        config=config_dict(config),
        time_us=round(time_us, 2),
        baseline_us=round(baseline_us, 2),
        versions=versions(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )


__all__ = [
    "Clock",
    "Task",
    "Tuned",
    "compile_tasks",
    "distinct_jobs",
    "make_task",
    "tune_all",
    "tune_one",
]
