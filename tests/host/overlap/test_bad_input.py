"""Mistakes in the arguments of AG+GEMM: which class, which text, and that no kernel started."""

import pickle
import re

import pytest
import torch

import plait
from plait.errors import (
    ArgumentError,
    CapacityError,
    DeviceError,
    DtypeError,
    GroupError,
    RankCountError,
    RanksDisagreeError,
    ShapeError,
    UnsupportedError,
)
from plait.settings import override
from plait.symm.virtual.observe import Observer
from plait.testing.ranks import run_virtual

K, N = 16, 12
META = torch.empty(0, device="meta").device


class Started(Observer):
    """What began on the virtual device."""

    def __init__(self):
        self.names = []

    def item_started(self, item):
        self.names.append(item.name)


def error_of(kind, function, world_size=2, setup=None, **world):
    """What `function(group, x, w)` raises on rank 0 before anything starts on the device."""
    seen = Started()
    caught = []

    def fn(group):
        given = setup(group) if setup is not None else None
        group.barrier()
        seen.names.clear()
        group.transport.exchange(None)
        x, w = torch.randn(4, K), torch.randn(N, K)
        with pytest.raises(kind) as info:
            function(group, x, w) if given is None else function(group, x, w, given)
        caught.append(info.value)
        group.transport.exchange(None)

    run_virtual(fn, world_size, observers=[seen], **world)
    assert seen.names == []
    assert {type(error) for error in caught} == {kind}
    error = caught[0]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


def parts(error):
    """The four things that an error says; all must be there."""
    assert all([error.argument, error.expected, error.got, error.remedy])
    text = f"{error.argument}: expected {error.expected}, got {error.got}. {error.remedy}"
    assert str(error) == text
    return text


def call(**changes):
    """`plait.ag_gemm` with some arguments replaced by functions of (group, x, w)."""

    def function(group, x, w):
        given = {name: make(group, x, w) for name, make in changes.items()}
        given = {"x": x, "weight": w, "group": group} | given
        return plait.ag_gemm(given.pop("x"), given.pop("weight"), given.pop("bias", None), **given)

    return function


def const(value):
    return lambda group, x, w: value


CASES = {
    # --- kinds of value
    "x is no tensor": (
        ArgumentError, {"x": const([1.0])}, r"^x: expected a torch.Tensor, got list",
    ),
    "x is sparse": (
        ArgumentError, {"x": lambda g, x, w: x.to_sparse()},
        r"^x: expected a strided tensor, got torch.sparse_coo. Pass x.to_dense",
    ),
    "a weight is no tensor": (
        ArgumentError, {"weight": lambda g, x, w: [w, 3]},
        r"^weight: expected a torch.Tensor, got int",
    ),
    "no weight": (
        ArgumentError, {"weight": const([])}, r"^weight: expected a tensor or a non-empty list",
    ),
    "unknown impl": (
        ArgumentError, {"impl": const("fast")},
        r"^impl: expected one of 'auto', 'fused', 'unfused', 'reference', got 'fast'",
    ),
    "unknown activation": (
        ArgumentError, {"activation": const("tanh")},
        r"^activation: expected one of 'none', 'gelu', .*'swiglu', 'geglu', got 'tanh'",
    ),
    "a gate needs two weights": (
        ArgumentError, {"activation": const("swiglu")},
        r"^weight: expected two weights \(gate, up\) for activation='swiglu', got 1. Pass \[gate",
    ),
    "too few biases": (
        ArgumentError, {"weight": lambda g, x, w: [w, w], "bias": const(torch.randn(N))},
        r"^bias: expected one bias for each of 2 weights, or none, got 1",
    ),
    # --- ranks
    "too few row counts": (
        RankCountError, {"rows_per_rank": const([4])},
        r"^rows_per_rank: expected one entry per rank, 2 in all, got 1 entries \[4\]",
    ),
    "too many row counts": (
        RankCountError, {"rows_per_rank": const([4, 4, 4])}, r"got 3 entries .* in rank order",
    ),
    "a negative row count": (
        ArgumentError, {"rows_per_rank": const([4, -4])},
        r"^rows_per_rank\[1\]: expected an integer, 0 or more, got -4",
    ),
    "not this rank's rows": (
        ShapeError, {"rows_per_rank": const([5, 5])},
        r"^rows_per_rank: expected 4 for rank [01], the size of its x along .*, got 5",
    ),
    # --- device and dtype
    "x elsewhere": (
        DeviceError, {"x": lambda g, x, w: x.to(META)}, None,
    ),
    "weight elsewhere": (
        DeviceError, {"weight": lambda g, x, w: w.to(META)}, None,
    ),
    "x of whole numbers": (
        DtypeError, {"x": lambda g, x, w: x.long()},
        r"^x: expected dtype torch.float32, torch.bfloat16, torch.float16, .*, got torch.int64",
    ),
    "x in double": (
        DtypeError, {"x": lambda g, x, w: x.double(), "weight": lambda g, x, w: w.double()},
        r"^x: expected dtype .* got torch.float64. Convert it",
    ),
    "weight of another dtype": (
        DtypeError, {"weight": lambda g, x, w: w.half()},
        r"^weight: expected torch.float32 \(the dtype of x\), got torch.float16. Pass weight.to",
    ),
    "bias of another dtype": (
        DtypeError, {"bias": const(torch.randn(N).bfloat16())},
        r"^bias: expected torch.float32 \(the dtype of x\), got torch.bfloat16",
    ),
    "out_dtype of whole numbers": (
        DtypeError, {"out_dtype": const(torch.int32)},
        r"^out_dtype: expected dtype torch.float32, .* got torch.int32",
    ),
    # --- shapes
    "x with one dim": (
        ShapeError, {"x": const(torch.randn(K))},
        r"^x: expected at least 2 dimensions \[..., K\], got shape \[16\]",
    ),
    "gather_dim outside": (
        ShapeError, {"gather_dim": const(2)},
        r"^gather_dim: expected an integer from -2 to 1 \(the tensor has 2 dimensions\), got 2",
    ),
    "K differs": (
        ShapeError, {"weight": const(torch.randn(N, K + 1))},
        r"^weight: expected shape \[N, 16\] \(K of the gathered x\), got \[12, 17\]",
    ),
    "weight with three dims": (
        ShapeError, {"weight": const(torch.randn(1, N, K))},
        r"^weight: expected two dims \[N, K\], got \[1, 12, 16\]",
    ),
    "gate and up differ": (
        ShapeError,
        {"weight": lambda g, x, w: [w, w[:-1]], "activation": const("geglu")},
        r"^weight: expected the same shape as the gate's, \[12, 16\], got \[11, 16\]",
    ),
    "bias of the wrong length": (
        ShapeError, {"bias": const(torch.randn(N + 1))},
        r"^bias: expected shape \[12\] \(N of its weight\), got \[13\]",
    ),
    "K of the gathered x where that is gathered": (
        ShapeError, {"gather_dim": const(-1)},
        r"^weight: expected shape \[N, 32\] \(K of the gathered x\), got \[12, 16\]",
    ),
    # --- implementation
    "fused cannot gather K": (
        UnsupportedError,
        {"gather_dim": const(1), "weight": const(torch.randn(N, 2 * K)), "impl": const("fused")},
        r"^impl: expected a call that the fused kernel takes, got gather_dim is the last",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_before_anything_starts(name):
    kind, changes, pattern = CASES[name]
    if kind is DeviceError:
        argument = next(iter(changes))
        pattern = rf"^{argument}: expected cpu \(the device of group\), got meta"
    text = parts(error_of(kind, call(**changes)))
    assert re.search(pattern, text), text


@pytest.mark.parametrize(
    ("kind", "main_grad", "pattern"),
    [
        (ArgumentError, [torch.zeros(N, K)] * 2, "one for each of 1 weights, got 2"),
        (ShapeError, torch.zeros(N, K + 1), r"shape \[12, 16\] \(its weight's\), got \[12, 17\]"),
        (DtypeError, torch.zeros(N, K).half(), r"dtype torch\.float32, got torch\.float16"),
        (DeviceError, torch.zeros(N, K, device=META), "cpu .the device of weight., got meta"),
    ],
)
def test_main_grads_must_fit_the_weights(kind, main_grad, pattern):
    text = parts(error_of(kind, call(main_grad=const(main_grad))))
    assert re.search(f"^main_grad: expected ({pattern})", text), text


def test_a_closed_group():
    def closed(group):
        other = group.new_group(name="other")
        other.close()
        return other

    error = error_of(
        GroupError, lambda g, x, w, other: plait.ag_gemm(x, w, group=other), setup=closed
    )
    assert "group: expected the name of an open group of this rank, got 'other'" in parts(error)


@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
def test_a_tensor_of_another_group(argument):
    shapes = {"x": (4, K), "weight": (N, K), "bias": (N,)}

    def tensor(group):
        return group.new_group(name="other").empty(*shapes[argument]).fill_(1)

    def function(group, x, w, theirs):
        given = {"x": x, "weight": w, "bias": None} | {argument: theirs}
        return plait.ag_gemm(*given.values(), group=group)

    text = parts(error_of(GroupError, function, setup=tensor))
    assert text.startswith(
        f"{argument}: expected a tensor of group 'virtual' or an ordinary tensor"
    )
    assert "symmetric memory of group 'other'" in text
    assert "Copy it" in text


def test_not_even_a_row_fits():
    with override(workspace_bytes=1024):
        text = parts(error_of(CapacityError, call()))
    assert "PLAIT_WORKSPACE_BYTES: expected room for 2048 bytes in each of two regions" in text
    assert "got 512 bytes a region" in text


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (call(x=const(torch.randn(5, K))), ["M=(4, 4)", "M=(5, 5)"]),
        (call(x=const(torch.randn(4, 8)), weight=const(torch.randn(N, 8))), ["K=16", "K=8"]),
        (call(x=lambda g, x, w: x.half(), weight=lambda g, x, w: w.half()), ["float32", "float16"]),
        (lambda group, x, w: group.barrier(), ["ag_gemm", "barrier"]),
    ],
)
def test_ranks_that_disagree_all_hear_of_it(second, words):
    seen = Started()

    def fn(group):
        group.barrier()
        group.transport.exchange(None)
        seen.names.clear()
        (second if group.rank else call())(group, torch.randn(4, K), torch.randn(N, K))

    with pytest.raises(RanksDisagreeError) as caught:
        run_virtual(fn, 2, observers=[seen])
    lines = str(caught.value).splitlines()[1:3]
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    # At most the rank that came first, and had nobody to compare with, began its prologue.
    assert len(seen.names) <= 2


def test_strides_of_any_kind_are_taken():
    """There is no wrong stride: what TMA cannot read is read through pointers."""
    x, w = torch.randn(K, 8).t()[::2], torch.randn(2 * N, 2 * K)[::2, ::2]
    gathered = torch.cat([x, x])
    for out in run_virtual(lambda group: plait.ag_gemm(x, w, group=group), 2):
        torch.testing.assert_close(out, gathered @ w.t())
