"""Inputs, runs and expectations of GEMM+RS and GEMM+AR tests: operators that sum over ranks.

Integer inputs make every product and every partial sum exact in fp32, so results must equal the
reference bit by bit: it rounds the partials and adds them in rank order. Others are held to fp64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import plait
from plait.collectives.sizes import scattered_sizes
from plait.overlap.gemm_ar.reference import gemm_ar_reference
from plait.overlap.gemm_rs.reference import gemm_rs_reference
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from plait.testing.ranks import run_virtual


@dataclass
class Case:
    """Every rank's x, weight and bias (None: without), and the options of the call."""

    operator: str
    xs: list[torch.Tensor]
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    options: dict = field(default_factory=dict)
    exact: bool = False

    @property
    def world_size(self):
        return len(self.xs)

    @property
    def dtype(self):
        return self.xs[0].dtype

    def to(self, dtype):
        """The same case in another dtype, results included."""
        move = lambda tensors: [None if t is None else t.to(dtype) for t in tensors]  # noqa: E731
        options = {k: v for k, v in self.options.items() if k not in ("reduce_dtype", "out_dtype")}
        parts = move(self.xs), move(self.weights), move(self.biases)
        return Case(self.operator, *parts, options, self.exact)


def integers(*shape):
    """Whole numbers from -4 to 4 without 0, whose products keep signs of zero out of the way."""
    return torch.randint(1, 5, shape).float() * (torch.randint(0, 2, shape) * 2 - 1)


def make_case(
    operator, world_size, shape, k, n, dtype=torch.float32, *, bias=False, exact=False, **options
):
    """`shape` is that of x without K; `k` may have one entry a rank."""
    ks = [k] * world_size if isinstance(k, int) else k
    shape = (shape,) if isinstance(shape, int) else shape
    draw = integers if exact else torch.randn
    xs = [draw(*shape, each).to(dtype) for each in ks]
    weights = [(draw(n, each) / (1 if exact else 4)).to(dtype) for each in ks]
    biases = [draw(n).to(dtype) for _ in ks]
    if operator == "gemm_ar":
        biases = biases[:1] * world_size
    return Case(operator, xs, weights, biases if bias else [None] * world_size, options, exact)


def call(case, group, **more):
    """One rank's call of the operator."""
    rank = group.rank
    function = getattr(plait, case.operator)
    options = case.options | more
    return function(case.xs[rank], case.weights[rank], case.biases[rank], group=group, **options)


def sizes_of(case):
    """Every rank's share of the scattered dim."""
    dim = case.options.get("scatter_dim", 0)
    whole = [*case.xs[0].shape[:-1], case.weights[0].shape[0]]
    return scattered_sizes(whole[dim], case.world_size, case.options.get("rows_per_rank") or [])


def reference(case, rank):
    """What the operator means for one rank; differentiable."""
    kinds = [case.options.get(name) for name in ("reduce_dtype", "out_dtype")]
    if case.operator == "gemm_ar":
        return gemm_ar_reference(case.xs, case.weights, case.biases[rank], *kinds)
    dim = case.options.get("scatter_dim", 0)
    operands = case.xs, case.weights, case.biases[rank], rank, sizes_of(case)
    return gemm_rs_reference(*operands, dim, *kinds)


def check_result(case, rank, out):
    """Compare one rank's result, bit by bit if the case is exact."""
    what = f"result of rank {rank}"
    expected = reference(case, rank)
    if case.exact:
        assert_bitwise(out, expected, what)
    else:
        assert_close_to_fp64(out, reference(case.to(torch.float64), rank), expected, what)
    assert out.is_contiguous(), what


def check_results(case, outs):
    assert len(outs) == case.world_size
    for rank, out in enumerate(outs):
        check_result(case, rank, out)
        if case.operator == "gemm_ar":
            assert_bitwise(out, outs[0], f"result of rank {rank} and of rank 0")


def run_case(case, impl="fused", **world):
    """Run on virtual ranks, compare, and return every rank's result."""

    def fn(group):
        out = call(case, group)
        run = plait.last_run()
        assert (run.operator, run.impl) == (case.operator, impl)
        return out

    outs = run_virtual(fn, case.world_size, **world)
    check_results(case, outs)
    return outs


def compare_all(cases, results):
    """`results` holds each rank's list of results, one for each case."""
    for index, case in enumerate(cases):
        check_results(case, [outs[index] for outs in results])


def repeat(make, rounds, world_size, **world):
    """New data every round, nothing in between; `make()` gives a case."""
    cases = [make() for _ in range(rounds)]
    fn = lambda group: [call(case, group) for case in cases]  # noqa: E731
    compare_all(cases, run_virtual(fn, world_size, **world))


def run_in_poisoned_memory(cases, **world):
    """Calls of changing shapes; before each, whatever an earlier one left behind becomes NaN."""

    def fn(group):
        outs = []
        for case in cases:
            if outs:
                poison_regions(group)
            outs.append(call(case, group))
        return outs

    compare_all(cases, run_virtual(fn, cases[0].world_size, **world))


def run_in_two_groups(whole, pair):
    """Calls of three ranks in two groups and of two in a third, which have their own memory."""

    def fn(group):
        twin, part = group.new_group(), group.new_group([2, 0])
        outs = []
        for _ in range(3):
            outs += [call(whole, group), call(whole, twin)]
            outs.append(None if part is None else call(pair, part))
        return outs

    first, second, third = run_virtual(fn, 3, schedule="late:1")
    for index, (one, two, three) in enumerate(zip(first, second, third, strict=True)):
        if index % 3 < 2:
            check_results(whole, [one, two, three])
        else:
            check_results(pair, [three, one])


# --- watching and poisoning


class Launches:
    """Remembers the GEMM launches of all ranks while programs pass through `rewrite_program`."""

    def __init__(self):
        self.found = []

    def __call__(self, program):
        self.found += [each for each in program.launches() if "gemm" in each.kernel.fn.__name__]
        return program

    def constants(self, name):
        return {launch.args[name] for launch in self.found}


def poison_regions(group):
    """Fill this rank's regions with NaN (of any dtype) before anybody goes on."""
    for region in group.workspace.regions:
        if region.buffer is not None:
            region.buffer.local.fill_(255)
    group.barrier()


# --- gradients


def leaves(tensors):
    """Copies that need gradients; None stays None."""
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def upstream(case, rank):
    """The gradient of one rank's result, the same for every run of a case."""
    seed = 0 if case.options.get("replicated_grad") else rank
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = reference(case, rank).shape
    return torch.randn(shape, generator=generator).to(case.options.get("out_dtype") or case.dtype)


def gradients_of_reference(case, upstreams):
    """Every rank's gradients [x, weight, bias] by autograd over all ranks at once."""
    own = Case(case.operator, *map(leaves, (case.xs, case.weights, case.biases)), case.options)
    outs = [reference(own, rank) for rank in range(case.world_size)]
    biases = own.biases
    if case.options.get("replicated_grad"):  # each rank has the whole gradient of the one result
        outs, upstreams, biases = outs[:1], upstreams[:1], biases[:1] * case.world_size
    pairs = zip(outs, upstreams, strict=True)
    torch.autograd.backward(outs, [grad.to(out.dtype) for out, grad in pairs])
    found = zip(own.xs, own.weights, biases, strict=True)
    return [[t.grad for t in each if t is not None] for each in found]


def differentiate(case, group, wrap=call):
    """One rank's gradients [x, weight, bias] through the operator."""
    own = Case(case.operator, *map(leaves, (case.xs, case.weights, case.biases)), case.options)
    wrap(own, group).backward(upstream(case, group.rank))
    found = (each[group.rank] for each in (own.xs, own.weights, own.biases))
    return [t.grad for t in found if t is not None]


def check_gradients(case, results):
    upstreams = [upstream(case, rank) for rank in range(case.world_size)]
    exact = gradients_of_reference(case.to(torch.float64), upstreams)
    plain = gradients_of_reference(case, upstreams)
    for rank, found in enumerate(results):
        assert len(found) == len(exact[rank])
        for index, grad in enumerate(found):
            what = f"gradient {index} of rank {rank}"
            assert_close_to_fp64(grad, exact[rank][index], plain[rank][index], what)


def run_gradients(case, wrap=call, **world):
    results = run_virtual(lambda group: differentiate(case, group, wrap), case.world_size, **world)
    check_gradients(case, results)
    return results
