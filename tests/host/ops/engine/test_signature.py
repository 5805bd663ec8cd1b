"""Signatures of calls: what tells two apart, and how arguments are bound."""

from __future__ import annotations

import pytest
import torch

from plait.ops.engine.signature import Schema, apart, signature_of_list


def schema(key: str) -> Schema:
    packet, _, name = key.partition(".")
    return Schema(getattr(getattr(torch.ops.aten, packet), name or "default"))


def signature(key: str, *args, runtime=(), lazy=False, **kwargs):
    """The value of the generated expression for a call of `key`."""
    found = schema(key)
    space = {
        "_apart": apart,
        "_signature_of_list": signature_of_list,
        "_default_dtype": torch.get_default_dtype,
        "_DEFAULTS": [each.default for each in found.arguments],
    }
    exec(f"def of({found.parameters}): return {found.signature(runtime, lazy)}", space)
    made = space["of"](*args, **kwargs)
    hash(made)
    return made


BASE = torch.arange(64.0)


@pytest.mark.parametrize(
    "other",
    [
        BASE[:12].view(4, 3),
        BASE[:12].view(4, 3).t(),
        BASE[1:13].view(3, 4),  # another address modulo 16
        BASE[:12].view(3, 4).double(),
        torch.nn.Parameter(BASE[:12].view(3, 4)),
        BASE[:24].view(3, 8)[:, ::2],
    ],
)
def test_tensors_differ_by_what_a_plan_depends_on(other):
    x = BASE[:12].view(3, 4)
    assert signature("sum.dim_IntList", x, [0]) != signature("sum.dim_IntList", other, [0])
    assert signature_of_list([x]) != signature_of_list([other])


def test_tensors_differ_by_nothing_else():
    x, y = BASE[:12].view(3, 4), BASE[16:28].view(3, 4) + 1
    y.requires_grad_()
    assert signature("sum.dim_IntList", x, [0]) == signature("sum.dim_IntList", y, (0,))
    with torch.inference_mode():
        assert signature("sum.dim_IntList", x, [0]) == signature("sum.dim_IntList", y, [0])


@pytest.mark.parametrize(
    ("key", "a", "b"),
    [
        ("sum.dim_IntList", ([0],), ([1],)),
        ("sum.dim_IntList", ([0],), (None,)),
        ("sum.dim_IntList", ([0], True), ([0], False)),
        ("_softmax", (1, False), (1, True)),
        ("_softmax", (1, False), (0, False)),
        ("clamp", (0, 1), (0.0, 1)),
        ("clamp", (0.0, 1), (-0.0, 1)),
        ("clamp", (0, 1), (None, 1)),
        ("clamp", (0, 1), (False, 1)),
    ],
)
def test_other_arguments_are_told_apart_by_value_and_class(key, a, b):
    x = torch.ones(2, 2)
    assert signature(key, x, *a) != signature(key, x, *b)
    assert signature(key, x, *a) == signature(key, x, *a)


def test_a_left_out_argument_is_its_default():
    x = torch.ones(2, 2)
    assert signature("sum.dim_IntList", x, [0]) == signature("sum.dim_IntList", x, [0], False)
    a = signature("sum.dim_IntList", x, [0], dtype=torch.float32)
    assert a != signature("sum.dim_IntList", x, [0])


def test_a_runtime_number_is_its_class():
    x = torch.ones(2)
    made = [signature("add.Tensor", x, x, alpha=each, runtime=("alpha",)) for each in (1, 2, 2.0)]
    assert made[0] == made[1] != made[2]


def test_the_default_dtype_is_part_of_it():
    x = torch.ones(2, dtype=torch.int64)
    before = signature("mean", x)
    torch.set_default_dtype(torch.float64)
    try:
        assert signature("mean", x) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_lazy_views_are_told_apart_where_a_slot_may_get_them():
    x = torch.ones(2, 2, dtype=torch.complex64)
    assert signature("mm", x, x, lazy=True) != signature("mm", x, x.conj(), lazy=True)


def test_what_is_written_lies_apart_or_not():
    x, y, out = BASE[:4], BASE[4:8].clone(), torch.empty(4)
    together, alone = BASE[8:12], torch.empty(4)
    assert signature("add.out", x, y, out=together) != signature("add.out", x, y, out=alone)
    assert signature("add_.Tensor", out, out) != signature("add_.Tensor", out, y)
    memory = torch.empty(8)
    pairs = ((memory[:4], memory[4:]), (out, alone))
    made = [signature("aminmax.out", y.view(1, 4), dim=0, min=a, max=b) for a, b in pairs]
    assert made[0] != made[1]
    assert apart([torch.empty(0)], [torch.empty(0)])


def test_numbers_and_sparse_tensors_have_none():
    with pytest.raises(AttributeError):
        signature("add.Tensor", torch.ones(2), 1.0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        signature("add.Tensor", torch.ones(2), torch.eye(2).to_sparse())


def test_lists_of_tensors_and_absent_ones():
    x = torch.ones(3)
    made = signature("cat", [x, x], 0)
    assert made == signature("cat", (x, x.clone()), 0)
    assert made != signature("cat", [x], 0)
    row = torch.ones(4)
    args = (torch.ones(2, 4), [4])
    assert signature("native_layer_norm", *args, row, None, 1e-5) != signature(
        "native_layer_norm", *args, row, row, 1e-5
    )


def test_binding_gives_every_argument_an_object_of_its_own():
    x = torch.randn(3, 4).t()
    dot = schema("add.Tensor").bind((x, x), {})
    assert dot["self"] is x
    assert dot["other"] is not x
    assert dot["other"].data_ptr() == x.data_ptr()
    assert dot["other"].stride() == x.stride()
    assert dot["alpha"] == 1
    many = schema("cat").bind(([x, x, x],), {})["tensors"]
    assert len({id(each) for each in many}) == 3
    inplace = schema("add_.Tensor")
    given = inplace.given(inplace.bind((x, x), {}))
    assert given.tensors[0] is x
    assert given.inplace
    assert not given.apart
    assert inplace.given(inplace.bind((x, torch.ones(4, 3)), {})).apart


def test_which_arguments_are_written():
    batch_norm = schema("_native_batch_norm_legit")
    assert batch_norm.inplace is None
    assert not batch_norm.outs
    assert schema("add_.Tensor").inplace.name == "self"
    assert [each.name for each in schema("aminmax.out").outs] == ["min", "max"]
    args, kwargs = schema("add.out").split([1, 2, 3, 4])
    assert args == (1, 2)
    assert kwargs == {"alpha": 3, "out": 4}
