"""What tests look for in the PTX of the protocol's kernels, and the launches they compile."""

import inspect
import re
from pathlib import Path

import torch

from plait.collectives.push import gather_bytes
from plait.collectives.segments import Segments
from plait.overlap.ag_gemm import launch as ag_gemm_launch
from plait.overlap.common.operands import Weights
from plait.overlap.gemm_ar import launch as gemm_ar_launch
from plait.overlap.gemm_rs import launch as gemm_rs_launch
from plait.symm.lang.patterns import wait, wait_all
from plait.testing.compile_sm90 import compile_for
from plait.testing.ranks import run_virtual

REGISTERS_PER_SM = 65_536
ROWS, K, N, WORLD = 256, 1024, 2048, 2

# The release of `signal`, the polls of `wait` (acquiring loads from Triton 3.9 on), its abort word.
RELEASE = r"atom\.global\.(sys\.release|release\.sys)\.exch"
POLL = r"(atom|ld)\.global\.(sys\.acquire|acquire\.sys)\."
ARRIVAL = r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add"
ABORT = r"ld\.volatile\.global"
FENCE = r"fence\.proxy\.async;"
CTA_BARRIER = r"\b(bar|barrier)\.(cta\.)?sync"
LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
TMA_LOAD = r"cp\.async\.bulk\.tensor.*shared::(cluster|cta)\.global"  # cta from Triton 3.9 on
LEADS, ENDED = r"griddepcontrol\.launch_dependents", r"griddepcontrol\.wait"
BF16 = torch.bfloat16


def launches_of_ag_gemm(monkeypatch, config, activation="none", full_epilogue=False):
    """The launches of rank 1's program, as they would be made on a GPU with this config."""
    monkeypatch.setattr(ag_gemm_launch, "choose_config", lambda *args: config)
    num_weights = 2 if activation in ("swiglu", "geglu") else 1

    def plan(group):
        x = torch.empty(ROWS, K, dtype=BF16)
        weight = torch.empty(N, K, dtype=BF16)
        out = torch.empty(ROWS * WORLD, N, dtype=BF16)
        weights = Weights((weight,) * num_weights, (out[0],) * num_weights * full_epilogue)
        segments = Segments.of(x.shape, 0, (ROWS,) * WORLD)
        region = group.take_region(gather_bytes(segments, K * x.element_size()))
        pres = [out] * num_weights * full_epilogue
        return ag_gemm_launch.plan_ag_gemm(
            group, region, x, weights, segments, [out], pres, activation, None
        ).launches()

    return run_virtual(plan, WORLD)[1]


def launch_of_gemm_rs(monkeypatch, config, num_cols=N, world_size=8, partial=BF16):
    """The kernel of rank 1's GEMM+RS with this config, with a bias."""
    monkeypatch.setattr(gemm_rs_launch, "_config", lambda *args: config)

    def plan(group):
        x = torch.empty(ROWS * world_size, K, dtype=BF16)
        out = torch.empty(ROWS, num_cols, dtype=BF16)
        weights = Weights((torch.empty(num_cols, K, dtype=BF16),), (out[0],))
        segments = Segments.of(out.shape, 0, (ROWS,) * world_size)
        region = group.take_region(world_size * out.nbytes * partial.itemsize // 2)
        steps = gemm_rs_launch.plan_gemm_rs(group, region, x, weights, segments, out, partial)
        return steps[-1]

    return run_virtual(plan, world_size)[1]


def launch_of_gemm_ar(monkeypatch, config, algorithm, num_rows, world_size=8):
    """The kernel of rank 1's GEMM+AR with this config, with a bias."""
    monkeypatch.setattr(gemm_ar_launch, "_config", lambda *args: config)

    def plan(group):
        x, out = torch.empty(num_rows, K, dtype=BF16), torch.empty(num_rows, N, dtype=BF16)
        weights = Weights((torch.empty(N, K, dtype=BF16),), (out[0],))
        region = group.take_region(2 * world_size * out.nbytes)
        program = gemm_ar_launch.plan_gemm_ar(group, region, x, weights, out, BF16, algorithm)
        return program.launches()[-1]

    return run_virtual(plan, world_size)[1]


def compiled(launch):
    return compile_for(
        launch.kernel,
        launch.args,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=launch.max_registers,
    )


def region_launch(make):
    """A launch of the protocol itself on rank 1's first region."""
    return run_virtual(lambda group: make(group.workspace.regions[0]), WORLD)[1]


def line_in(ptx, at, function):
    """The line of a device function's source that PTX line `at` comes from; None for others."""
    lines = ptx.text.splitlines()
    source, first = inspect.getsourcelines(function.fn)
    where = next(found for line in reversed(lines[:at]) if (found := LOCATION.search(line)))
    file = next(line for line in lines if re.match(rf"\s*\.file\s+{where[1]}\s", line))
    in_file = file.rstrip().endswith(f'{Path(inspect.getsourcefile(function.fn)).name}"')
    offset = int(where[2]) - first
    return source[offset].strip() if in_file and 0 <= offset < len(source) else None


def assert_signals_release_after_a_barrier(ptx, function):
    """A CTA barrier is the last thing that orders memory before each signal: no store between."""
    lines = ptx.text.splitlines()
    found = [at for at in ptx.find_all(RELEASE) if line_in(ptx, at, function)]
    assert found, "no signal releases at system scope"
    for at in found:
        for before in range(at - 1, -1, -1):
            line = lines[before]
            if re.search(CTA_BARRIER, line):
                break
            if before in found:  # the other word of a thread that has two peers
                continue
            assert not re.search(r"\bst\.|\batom\.|\bred\.|\bbra\b|^\$L__BB", line), line
        else:
            raise AssertionError("no CTA barrier before a signal")


def assert_waits_acquire(ptx, num_waits):
    """Every look at a word acquires, and then the CTA learns of it before it reads on."""
    lines = ptx.text.splitlines()
    polls = ptx.find_all(POLL)
    looks = [text for at in polls if (text := line_in(ptx, at, wait))]
    at_once = [text for at in polls if (text := line_in(ptx, at, wait_all))]
    source = [line.strip() for line in inspect.getsource(wait.fn).splitlines()]
    expected = sum(line.startswith("seen =") for line in source)
    assert all(text.startswith("seen =") for text in looks + at_once)
    assert len(looks) >= expected * num_waits  # the compiler may copy a loop
    volatile = [line_in(ptx, at, wait) or "" for at in ptx.find_all(ABORT)]
    assert not any(text.startswith("seen =") for text in volatile)
    for at in polls:
        after = next(
            line
            for line in lines[at + 1 :]
            if re.search(rf"{CTA_BARRIER}|ld\.global|cp\.async", line)
        )
        assert re.search(CTA_BARRIER, after), after
    # An add of 0 that is no acquire would be a poll, too: the only other add is the arrival.
    others = set(ptx.find_all(r"atom\.global.*\.add")) - set(polls)
    assert others == set(ptx.find_all(ARRIVAL))


def assert_waits_end(ptx, num_waits):
    """Each wait looks at the clock before and inside its loop, and at the abort word."""
    assert ptx.count("%globaltimer") >= 2 * num_waits
    assert ptx.count(ABORT) >= 2 * num_waits


def assert_no_spill(found):
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)


def lines_of_the_main_loop(ptx):
    """Line indices of the outermost loop that multiplies: it has all its blocks' lines."""
    lines = ptx.text.splitlines()
    blocks = []  # first line, label
    for at, line in enumerate(lines):
        if match := re.match(r"\$L__(BB\w+):|// (%bb\.\d+):", line):
            blocks.append((at, match[1] or match[2]))
    ends = [at for at, _ in blocks[1:]] + [len(lines)]
    loops = {}  # label of an outermost loop's header -> its lines
    for (start, label), end in zip(blocks, ends, strict=True):
        about = " ".join(re.findall(r"//.*", "\n".join(lines[start:end])))
        if header := re.search(r"(?:in Loop: Header=|Parent Loop )(BB\w+) Depth=1\b", about):
            label = header[1]
        elif not re.search(r"=>\s*This (Inner )?Loop Header: Depth=1\b", about):
            continue
        loops.setdefault(label, set()).update(range(start, end))
    found = [loop for loop in loops.values() if any("wgmma.mma" in lines[at] for at in loop)]
    assert len(found) == 1, f"{len(found)} loops multiply"
    return found[0]
