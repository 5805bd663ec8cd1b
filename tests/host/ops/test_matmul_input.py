"""`plait.matmul`: what wrong arguments are told, before anything runs."""

import pytest
import torch

import plait
from plait.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from plait.ops.matmul.configs import Config

X, W, B = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5)
X3, W3 = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
X8, W8 = X.to(torch.float8_e4m3fn), W.to(torch.float8_e5m2)
XI, WI = X.to(torch.int8), W.to(torch.int8)
ONE, CONFIG = torch.ones(()), Config(16, 16, 32, 4, 1, 8, False)
SCALES = {"x_scale": ONE, "weight_scale": ONE}
XL, WL = torch.zeros(3, 256).to(torch.float8_e4m3fn), torch.zeros(5, 256).to(torch.float8_e4m3fn)


def call(*args, **options):
    return lambda: plait.matmul(*args, **options)


BAD = [
    # batches
    (call(X, W3), ShapeError, r"x: expected shape \[B, M, K\] \(weight is .*got \[3, 4\]"),
    (call(X3, W3[:1]), ShapeError, r"weight: expected shape \[2, N, 4\] \(B and K of x\)"),
    (call(X3, W3[..., :3]), ShapeError, r"weight: expected shape \[2, N, 4\]"),
    (call(X3[None], W3), ShapeError, r"x: expected shape \[B, M, K\]"),
    (call(X3, W3, B[:4]), ShapeError, r"bias: expected shape \[5\] .*\[2, 3, 5\] \(the result\)"),
    (call(X3, [W3, W3], activation="swiglu"), ShapeError, r"weight\[0\]: expected shape \[N, 4\]"),
    (call(X3, W3, out=torch.zeros(6, 5)), ShapeError, r"out: expected shape \[2, 3, 5\]"),
    # bias
    (call(X, W, B.bfloat16()), DtypeError, r"bias: expected dtype torch\.float32, got"),
    (call(X, W, torch.zeros(5, 3)), ShapeError, r"bias: expected shape \[5\] .* or \[3, 5\]"),
    (
        call(X, [W, W], [B, torch.zeros(3, 5)], activation="geglu"),
        ShapeError,
        r"bias\[1\]: expected shape \[5\]",
    ),
    (call(X, [W, W], [B, B[:2]]), ShapeError, r"bias\[1\]: expected shape \[5\]"),
    (call(XI, WI, B), ArgumentError, "bias: expected None for an int32 result"),
    (
        call(X8, W8, B.half(), **SCALES),
        DtypeError,
        r"bias: expected dtype torch\.float32, torch\.bfloat16",
    ),
    # dtypes
    (call(X8, W), DtypeError, r"weight: expected dtype torch\.float8_e4m3fn, torch\.float8_e5m2"),
    (call(X, W8), DtypeError, r"weight: expected torch\.float32 \(the dtype of x\)"),
    (call(XI, W8), DtypeError, r"weight: expected torch\.int8"),
    (call(X, [W, WI]), DtypeError, r"weight\[1\]: expected torch\.float32"),
    (call(X8, W8, out_dtype=torch.float64, **SCALES), DtypeError, "out_dtype: expected dtype"),
    (call(X, W, out_dtype=torch.int32), DtypeError, "out_dtype: expected dtype"),
    (
        call(XI, WI, out_dtype=torch.bfloat16),
        DtypeError,
        r"out_dtype: expected torch\.int32 .*Pass x_scale",
    ),
    (call(XI, WI, out=torch.zeros(3, 5)), DtypeError, r"out: expected torch\.int32"),
    (call(XI, WI, out_dtype=torch.int32, **SCALES), DtypeError, "out_dtype: expected dtype"),
    # scales
    (
        call(X8, W8),
        ArgumentError,
        r"x_scale: expected an fp32 tensor for torch\.float8_e4m3fn, got None",
    ),
    (call(X8, W8, x_scale=ONE), ArgumentError, "weight_scale: expected an fp32 tensor"),
    (call(XI, WI, x_scale=ONE), ArgumentError, "weight_scale: .*or neither for an int32 result"),
    (call(X, W, x_scale=ONE), ArgumentError, r"x_scale: expected None for torch\.float32"),
    (
        call(X, W, weight_scale=ONE),
        ArgumentError,
        r"weight_scale: expected None for torch\.float32",
    ),
    (
        call(X8, W8, x_scale=1.0, weight_scale=ONE),
        ArgumentError,
        r"x_scale: expected a torch\.Tensor, got float",
    ),
    (
        call(X8, W8, x_scale=ONE.double(), weight_scale=ONE),
        DtypeError,
        r"x_scale: expected torch\.float32",
    ),
    (
        call(X8, W8, x_scale=B, weight_scale=ONE),
        ShapeError,
        r"x_scale: expected shape \[1\] or \[3\] or \[3, 1\]",
    ),
    (
        call(X8, W8, x_scale=ONE, weight_scale=B[:4]),
        ShapeError,
        r"weight_scale: expected shape \[1\] or \[5\]",
    ),
    (
        call(XL, WL, x_scale=torch.ones(3, 2), weight_scale=B),
        ShapeError,
        r"weight_scale: expected shape \[1, 2\] \(to fit x_scale \[3, 2\]\)",
    ),
    (
        call(XL, WL, x_scale=torch.ones(3), weight_scale=torch.ones(1, 2)),
        ShapeError,
        r"x_scale: expected shape \[3, 2\] \(to fit weight_scale",
    ),
    (
        call(XL, WL, x_scale=torch.ones(3, 3), weight_scale=ONE),
        ShapeError,
        r"x_scale: expected shape \[1\] or \[3\] or \[3, 2\]",
    ),
    (
        call(X8, [W8, W8], x_scale=ONE, weight_scale=ONE),
        ArgumentError,
        "weight_scale: expected a list of 2",
    ),
    (
        call(X8, [W8, W8], x_scale=ONE, weight_scale=[ONE, B[:2]]),
        ShapeError,
        r"weight_scale\[1\]: expected",
    ),
    # combinations
    (call(X, W, accumulate=True), ArgumentError, "accumulate: expected False without out"),
    (
        call(X, W, out=torch.zeros(3, 5), accumulate=True, activation="relu"),
        ArgumentError,
        "activation: expected None with accumulate=True",
    ),
    (
        call(XI, WI, activation="relu"),
        ArgumentError,
        "activation: expected None for an int32 result",
    ),
    (call(X, W, fast_accum=True), ArgumentError, r"fast_accum: expected False for torch\.float32"),
    (call(XI, WI, fast_accum=True), ArgumentError, r"fast_accum: expected False for torch\.int8"),
    (
        call(X, W, out=torch.zeros(3, 1).expand(3, 5)),
        StrideError,
        "out: expected one place in memory",
    ),
    (call(X, W, out=[torch.zeros(3, 5)]), ArgumentError, "out: expected a tensor"),
    (
        call(X, W, config=CONFIG, impl="unfused"),
        ArgumentError,
        "config: expected None for impl='unfused'",
    ),
    (
        call(X, W, config=(16, 16, 32)),
        ArgumentError,
        "config: expected a Config or None, got tuple",
    ),
    (
        call(X.double(), W.double(), config=CONFIG),
        UnsupportedError,
        "config: expected None for float64",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[case[2] for case in BAD])
def test_bad_input_is_told_before_anything_runs(call, kind, message, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something ran")

    for name in ("fused_matmul", "unfused_matmul", "matmul_reference", "executor_for"):
        monkeypatch.setattr(f"plait.ops.matmul.api.{name}", refuse)
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.value.remedy


def test_one_bad_weight_of_a_list_stops_all():
    out = [torch.full((3, 5), 7.0) for _ in range(2)]
    with torch.no_grad(), pytest.raises(ShapeError, match=r"bias\[1\]"):
        plait.matmul(X, [W, W], [B, B[:2]], out=out)
    assert out[0].unique().tolist() == [7]
