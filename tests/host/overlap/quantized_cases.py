"""Inputs, runs and expectations of fp8 and int8 tests of the overlapped GEMMs.

Expectations dequantize by arithmetic of their own. No two scales are alike: one taken from the
wrong row, rank or block shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import plait
from plait.collectives.sizes import scattered_sizes
from plait.ops.matmul.reference import activation_reference
from plait.testing.compare import assert_bitwise, assert_close_to_fp64
from plait.testing.ranks import run_virtual

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS = ("tensor", "rows", "blocks")
GATES = ("swiglu", "geglu")


def values(dtype, *shape):
    """Random numbers of this dtype."""
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=INT8)
    return torch.randn(shape).to(dtype)


def scale_of_x(kind, lead, k):
    """A scale of x [*lead, k]."""
    if kind == "tensor":
        return torch.rand(1) + 0.1
    return torch.rand(*lead, *([-(-k // 128)] if kind == "blocks" else [])) + 0.1


def scale_of_weight(kind, n, k):
    """A scale of a weight [n, k]."""
    if kind == "tensor":
        return torch.rand(()) + 0.1
    return torch.rand((n,) if kind == "rows" else (-(-n // 128), -(-k // 128))) + 0.1


def wide_x(x, scale, dtype):
    """x [..., K] times its scale, of whatever kind, in `dtype`."""
    scale = scale.to(dtype)
    if scale.numel() == 1 and scale.dim() < x.dim():
        return x.to(dtype) * scale.reshape(())
    if scale.dim() < x.dim():
        return x.to(dtype) * scale[..., None]
    return x.to(dtype) * scale.repeat_interleave(128, -1)[..., : x.shape[-1]]


def wide_weight(weight, scale, dtype):
    """The same of a weight [N, K], whose blocks are square."""
    scale = scale.to(dtype)
    if scale.dim() < 2:
        return weight.to(dtype) * (scale if scale.numel() == 1 else scale[:, None])
    n, k = weight.shape
    return weight.to(dtype) * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]


@dataclass
class Case:
    """Every rank's x, weights, biases and scales, and the options of the call."""

    operator: str
    kind: str
    xs: list[torch.Tensor]
    weights: list[list[torch.Tensor]]
    biases: list[list[torch.Tensor]]
    x_scales: list[torch.Tensor]
    weight_scales: list[list[torch.Tensor]]
    options: dict = field(default_factory=dict)

    @property
    def world_size(self):
        return len(self.xs)

    @property
    def out_dtype(self):
        return self.options.get("out_dtype") or BF16


def make_gather(rows, k, n, dtype=E4M3, kind="rows", *, num_weights=1, bias=False, **options):
    """AG+GEMM; `rows` has one entry a rank: its rows, or the shape of its x without K."""
    leads = [(each,) if isinstance(each, int) else each for each in rows]
    columns = [n] * len(leads) if isinstance(n, int) else n
    weight_dtype = options.pop("weight_dtype", dtype)
    if len(set(leads)) > 1:
        dim = options.get("gather_dim", 0)
        options.setdefault("rows_per_rank", [lead[dim] for lead in leads])
    counted = range(num_weights)
    return Case(
        "ag_gemm",
        kind,
        [values(dtype, *lead, k) for lead in leads],
        [[values(weight_dtype, each, k) for _ in counted] for each in columns],
        [[torch.randn(each) for _ in counted] * bias for each in columns],
        [scale_of_x(kind, lead, k) for lead in leads],
        [[scale_of_weight(kind, each, k) for _ in counted] for each in columns],
        options,
    )


def make_sum(operator, world_size, shape, k, n, dtype=E4M3, kind="rows", *, bias=False, **options):
    """GEMM+RS or GEMM+AR; `shape` is that of x without K, `k` may have one entry a rank."""
    shape = (shape,) if isinstance(shape, int) else shape
    ks = [k] * world_size if isinstance(k, int) else k
    biases = [[torch.randn(n)] * bias for _ in ks]
    return Case(
        operator,
        kind,
        [values(dtype, *shape, each) for each in ks],
        [[values(dtype, n, each)] for each in ks],
        biases[:1] * world_size if operator == "gemm_ar" else biases,
        [scale_of_x(kind, shape, each) for each in ks],
        [[scale_of_weight(kind, n, each)] for each in ks],
        options,
    )


def call(case, group, **more):
    """One rank's call of the operator, as a list of results."""
    rank = group.rank
    per_weight = (case.weights[rank], case.biases[rank], case.weight_scales[rank])
    if len(case.weights[rank]) == 1:
        per_weight = [each[0] if each else None for each in per_weight]
    weight, bias, weight_scale = per_weight
    result = getattr(plait, case.operator)(
        case.xs[rank],
        weight,
        None if bias is None or len(bias) == 0 else bias,
        group=group,
        x_scale=case.x_scales[rank],
        weight_scale=weight_scale,
        **case.options | more,
    )
    outs, gathered = result if case.options.get("return_gathered") else (result, None)
    outs = list(outs) if isinstance(outs, list) else [outs]
    return outs + ([] if gathered is None else [gathered])


def gathered_results(case, rank, dtype):
    """AG+GEMM in `dtype` throughout."""
    pairs = zip(case.xs, case.x_scales, strict=True)
    dim = case.options.get("gather_dim", 0)
    whole = torch.cat([wide_x(x, scale, dtype) for x, scale in pairs], dim=dim)
    pairs = zip(case.weights[rank], case.weight_scales[rank], strict=True)
    pre = [whole @ wide_weight(weight, scale, dtype).t() for weight, scale in pairs]
    if case.biases[rank]:
        pre = [each + bias.to(dtype) for each, bias in zip(pre, case.biases[rank], strict=True)]
    activation = case.options.get("activation") or "none"
    if activation in GATES:
        return [activation_reference(pre, activation)]
    return [activation_reference([each], activation) for each in pre]


def summed_results(case, rank, dtype):
    """GEMM+RS and GEMM+AR; partials in `dtype`, rounded for all but fp64 as they are sent."""
    sent = dtype if dtype is FP64 else case.options.get("reduce_dtype") or BF16
    total = None
    for x, weights, x_scale, scales in zip(
        case.xs, case.weights, case.x_scales, case.weight_scales, strict=True
    ):
        left, right = wide_x(x, x_scale, dtype), wide_weight(weights[0], scales[0], dtype)
        part = (left @ right.t()).to(sent).to(dtype)
        total = part if total is None else total + part
    if case.operator == "gemm_rs":
        dim = case.options.get("scatter_dim", 0)
        given = case.options.get("rows_per_rank") or []
        total = total.split(scattered_sizes(total.shape[dim], case.world_size, given), dim)[rank]
    return [total + case.biases[rank][0].to(dtype) if case.biases[rank] else total]


def check_results(case, rank, outs):
    """Compare one rank's results with fp64; the gathered x bit by bit."""
    if case.options.get("return_gathered"):
        whole = torch.cat(case.xs, dim=case.options.get("gather_dim", 0))
        assert_bitwise(outs[-1], whole, f"gathered x of rank {rank}")
        outs = outs[:-1]
    results = gathered_results if case.operator == "ag_gemm" else summed_results
    exact, plain = results(case, rank, FP64), results(case, rank, FP32)
    assert len(outs) == len(exact)
    for out, wide, narrow in zip(outs, exact, plain, strict=True):
        assert out.dtype is case.out_dtype
        what = f"{case.operator} {case.kind} of rank {rank}"
        assert_close_to_fp64(out, wide, narrow.to(case.out_dtype), what)


def run_case(case, impl="fused", **world):
    """Run on virtual ranks by `impl`, compare every result, and return them all."""

    def fn(group):
        outs = call(case, group, impl=impl)
        run = plait.last_run()
        assert (run.operator, run.impl) == (case.operator, impl)
        return outs

    results = run_virtual(fn, case.world_size, **world)
    for rank, outs in enumerate(results):
        check_results(case, rank, outs)
    return results
