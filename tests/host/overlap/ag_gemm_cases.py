"""Inputs, runs and expectations of AG+GEMM tests, for any number of ranks and any options."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import plait
from plait.overlap.ag_gemm.reference import ag_gemm_reference
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from plait.testing.ranks import run_virtual

GATES = ("swiglu", "geglu")


@dataclass
class Case:
    """Every rank's x, weights and biases, and the options of the call."""

    xs: list[torch.Tensor]
    weights: list[list[torch.Tensor]]
    biases: list[list[torch.Tensor]]
    options: dict = field(default_factory=dict)

    @property
    def world_size(self):
        return len(self.xs)


def make_case(rows, k, n, dtype=torch.float32, *, num_weights=1, bias=False, **options):
    """`rows` has one entry a rank: its number of rows, or the shape of its x without K."""
    xs, weights, biases = [], [], []
    for rank, each in enumerate(rows):
        shape = (each,) if isinstance(each, int) else each
        columns = n if isinstance(n, int) else n[rank]
        xs.append(torch.randn(*shape, k).to(dtype))
        weights.append([(torch.randn(columns, k) / 4).to(dtype) for _ in range(num_weights)])
        biases.append([torch.randn(columns).to(dtype) for _ in range(num_weights * bias)])
    if len({x.shape for x in xs}) > 1:
        dim = options.get("gather_dim", 0)
        options.setdefault("rows_per_rank", [x.shape[dim] for x in xs])
    return Case(xs, weights, biases, options)


def call(case, group):
    """One rank's `plait.ag_gemm`, as a list of its results with the gathered x last if asked."""
    rank = group.rank
    weights, biases = case.weights[rank], case.biases[rank]
    single = len(weights) == 1
    result = plait.ag_gemm(
        case.xs[rank],
        weights[0] if single else weights,
        (biases[0] if single else biases) if biases else None,
        group=group,
        **case.options,
    )
    outs, gathered = result if case.options.get("return_gathered") else (result, None)
    outs = list(outs) if isinstance(outs, list) else [outs]
    return outs + ([] if gathered is None else [gathered])


def run_case(case, impl="fused", **world):
    """Run on virtual ranks and compare every result; returns each rank's list of results."""

    def fn(group):
        outs = call(case, group)
        assert plait.last_run().impl == impl
        return outs

    results = run_virtual(fn, case.world_size, **world)
    for rank, outs in enumerate(results):
        check_results(case, rank, outs)
    return results


def check_results(case, rank, outs):
    gather_dim, activation = case.options.get("gather_dim", 0), case.options.get("activation")
    if case.options.get("return_gathered"):
        assert_bitwise(outs[-1], torch.cat(case.xs, dim=gather_dim), f"gathered x of rank {rank}")
        outs = outs[:-1]
    exact = ag_gemm_reference(
        [x.double() for x in case.xs],
        [weight.double() for weight in case.weights[rank]],
        [bias.double() for bias in case.biases[rank]],
        gather_dim,
        activation or "none",
    )
    plain = plain_results(case, rank)
    assert len(outs) == len(exact)
    for index, out in enumerate(outs):
        what = f"result {index} of rank {rank}"
        assert_close_to_fp64(out, exact[index], plain[index], what)
        assert out.is_contiguous(), what


def plain_results(case, rank):
    """What plain PyTorch gives in the dtype of x, one operation after the other."""
    gathered = torch.cat(case.xs, dim=case.options.get("gather_dim", 0))
    activation = case.options.get("activation")
    biases = case.biases[rank] or [None] * len(case.weights[rank])
    pairs = zip(case.weights[rank], biases, strict=True)
    pre = [F.linear(gathered, weight, bias) for weight, bias in pairs]
    function = {
        None: lambda value: value,
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda value: F.gelu(value, approximate="tanh"),
        "swiglu": F.silu,
        "geglu": F.gelu,
    }[activation]
    outs = [function(pre[0]) * pre[1]] if activation in GATES else [function(each) for each in pre]
    return [out.to(case.options.get("out_dtype") or out.dtype) for out in outs]
