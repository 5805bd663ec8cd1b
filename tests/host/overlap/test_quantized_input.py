"""Scales and 8-bit operands that do not fit: which error, and that it comes before any wait."""

import re

import pytest
import torch

import plait
from plait.errors import ArgumentError, DtypeError, GroupError, ShapeError, UnsupportedError
from plait.testing.ranks import run_virtual
from tests.host.overlap.quantized_cases import BF16, E4M3, FP32, INT8

M, K, N = 4, 160, 130
OPERATORS = ("ag_gemm", "gemm_rs", "gemm_ar")


def ones(*shape, dtype=FP32):
    return torch.ones(*shape).to(dtype)


def base(dtype=E4M3):
    return {
        "x": ones(M, K, dtype=dtype),
        "weight": ones(N, K, dtype=dtype),
        "x_scale": ones(M),
        "weight_scale": ones(N),
    }


CASES = {
    "no scales of fp8": (ArgumentError, {"x_scale": None, "weight_scale": None},
        r"^x_scale: expected an fp32 tensor for torch.float8_e4m3fn, got None"),
    "one scale is missing": (ArgumentError, {"weight_scale": None},
        r"^weight_scale: expected an fp32 tensor for torch.float8_e4m3fn, got None"),
    "a scale that is a number": (ArgumentError, {"x_scale": 1.0},
        r"^x_scale: expected a torch.Tensor, got float"),
    "scales in bf16": (DtypeError, {"x_scale": ones(M, dtype=BF16)},
        r"^x_scale: expected torch.float32, got torch.bfloat16. Pass x_scale.float"),
    "one scale too many": (ShapeError, {"x_scale": ones(M + 1)},
        r"^x_scale: expected shape \[1\] or \[4\] or \[4, 2\]"),
    "scales of a wrong N": (ShapeError, {"weight_scale": ones(N + 1)},
        r"^weight_scale: expected shape \[1\] or \[130\]"),
    "rows and blocks": (ShapeError, {"weight_scale": ones(2, 2)},
        r"^x_scale: expected shape \[4, 2\] \(to fit weight_scale \[2, 2\]\)"),
    "blocks and rows": (ShapeError, {"x_scale": ones(M, 2)},
        r"^weight_scale: expected shape \[2, 2\]"),
    "blocks of a wrong K": (ShapeError, {"x_scale": ones(M, 1), "weight_scale": ones(2, 1)},
        r"^weight_scale: expected shape"),
    "a bf16 weight": (DtypeError, {"weight": ones(N, K, dtype=BF16)},
        r"^weight: expected dtype torch.float8_e4m3fn, torch.float8_e5m2, got torch.bfloat16"),
    "a bias in fp8": (DtypeError, {"bias": ones(N, dtype=E4M3)},
        r"^bias: expected dtype torch.float32, torch.bfloat16, got torch.float8_e4m3fn"),
    "scales of bf16": (ArgumentError,
        {"x": ones(M, K, dtype=BF16), "weight": ones(N, K, dtype=BF16)},
        r"^x_scale: expected None for torch.bfloat16, got a tensor"),
    "out in fp8": (DtypeError, {"out_dtype": E4M3}, r"^out_dtype: expected dtype torch.float32"),
    "out in int32": (DtypeError, {"out_dtype": torch.int32}, r"^out_dtype: expected dtype"),
    "weight of another K": (ShapeError, {"weight": ones(N, K - 1, dtype=E4M3)}, r"^weight: .*K of"),
}  # fmt: skip


def error_of(kind, operator, given):
    """What the operator raises on both ranks, without a kernel having started."""
    caught, started = [], []

    def fn(group):
        arguments = dict(given)
        positional = [arguments.pop(name) for name in ("x", "weight")]
        with pytest.raises(kind) as info:
            getattr(plait, operator)(*positional, group=group, **arguments)
        caught.append(info.value)

    run_virtual(fn, 2, rewrite_program=lambda program: started.append(program) or program)
    assert started == []
    assert {type(error) for error in caught} == {kind}
    error = caught[0]
    assert all([error.argument, error.expected, error.got, error.remedy])
    return str(error)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_bad_input(operator, name):
    kind, changes, text = CASES[name]
    found = error_of(kind, operator, base() | changes)
    assert re.search(text, found), found


@pytest.mark.parametrize("impl", ["auto", "fused", "unfused", "reference"])
@pytest.mark.parametrize("name", ["x", "x_scale", "weight_scale", "bias"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_gradients(operator, name, impl):
    given = base() | {"bias": ones(N), "impl": impl}
    given[name] = given[name].requires_grad_()
    found = error_of(ArgumentError, operator, given)
    assert "no gradient for torch.float8_e4m3fn operands, got requires_grad=True" in found
    rank_of = {"x_scale": r"^x_scale:", "weight_scale": r"^weight_scale:", "x": r"^x:"}
    assert re.search(rank_of.get(name, r"^weight or bias:"), found), found


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_gradients_wanted_none_are_missed(operator):
    given = base()
    weight_scale = given["weight_scale"].requires_grad_()

    def fn(group):
        with torch.no_grad():
            out = getattr(plait, operator)(
                given["x"], given["weight"], group=group, x_scale=given["x_scale"],
                weight_scale=weight_scale,
            )  # fmt: skip
        return out.requires_grad

    assert run_virtual(fn, 2) == [False, False]


def test_int8_results():
    given = base(INT8)
    wrong = error_of(DtypeError, "ag_gemm", given | {"out_dtype": torch.int32})
    assert wrong.startswith("out_dtype: expected a floating dtype with scales, got torch.int32")
    given |= {"x_scale": None, "weight_scale": None}
    wrong = error_of(DtypeError, "ag_gemm", given | {"out_dtype": BF16})
    assert wrong.startswith("out_dtype: expected torch.int32 without scales, got torch.bfloat16")
    wrong = error_of(ArgumentError, "ag_gemm", given | {"bias": ones(N)})
    assert wrong.startswith("bias: expected None for an int32 result")
    wrong = error_of(ArgumentError, "ag_gemm", given | {"activation": "relu"})
    assert wrong.startswith("activation: expected None for an int32 result")
    wrong = error_of(UnsupportedError, "ag_gemm", given | {"impl": "fused"})
    assert "int8 without scales" in wrong
    for operator in ("gemm_rs", "gemm_ar"):
        wrong = error_of(ArgumentError, operator, given)
        assert wrong.startswith("x_scale: expected scales for torch.int8 that is summed, got None")


def test_k_is_not_gathered():
    given = base() | {"gather_dim": 1, "weight": ones(N, 2 * K, dtype=E4M3)}
    given |= {"x_scale": ones(1), "weight_scale": ones(1)}
    wrong = error_of(UnsupportedError, "ag_gemm", given)
    assert wrong.startswith("gather_dim: expected a dim of rows for torch.float8_e4m3fn")


def test_lists_of_scales():
    weight = base()["weight"]
    given = base() | {"weight": [weight, weight]}
    wrong = error_of(ArgumentError, "ag_gemm", given)
    assert wrong.startswith("weight_scale: expected one for each of 2 weights, got 1")
    wrong = error_of(ArgumentError, "ag_gemm", given | {"weight_scale": [ones(N), 2]})
    assert wrong.startswith("weight_scale: expected a torch.Tensor, got int")
    wrong = error_of(ShapeError, "ag_gemm", given | {"weight_scale": [ones(N), ones(3)]})
    assert wrong.startswith("weight_scale[1]: expected shape")
    short = {"x": ones(M, 64, dtype=E4M3), "weight": [ones(N, 64, dtype=E4M3)] * 2}
    mixed = given | short | {"x_scale": ones(M, 1), "weight_scale": [ones(N), ones(2, 1)]}
    wrong = error_of(ShapeError, "ag_gemm", mixed)
    assert wrong.startswith("weight_scale: expected scales of one kind for all weights")


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_scale_of_another_group(operator):
    def fn(group):
        other = group.new_group()
        scale = other.empty(M).fill_(1.0)
        given = base()
        with pytest.raises(GroupError, match=r"^x_scale: expected a tensor of group"):
            getattr(plait, operator)(
                given["x"], given["weight"], group=group, x_scale=scale,
                weight_scale=given["weight_scale"],
            )  # fmt: skip
        group.barrier()

    run_virtual(fn, 2)
