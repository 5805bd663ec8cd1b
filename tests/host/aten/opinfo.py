"""What PyTorch's own operator database does with one entry, as plain values that compare.

`records` runs the samples of an OpInfo (forward, in-place, out, backward, wrong inputs) and
describes every result: values to the bit, dtype, shape, strides, aliasing, and errors word for
word. Two lists, one made under overrides, are equal or an override shows.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
# Their samples take minutes, and they reach the same few keys as all others.
SLOW = frozenset(("nn.functional.ctc_loss", "svd_lowrank", "pca_lowrank", "linalg.lstsq"))
# What empty memory holds is no property of an operator.
RANDOM_MEMORY = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"))
RANDOM_MEMORY |= {"new_empty_strided"}


def entries():
    """The entries of the database that can be compared, in their order."""
    skipped = SLOW | RANDOM_MEMORY
    return [each for each in op_db if each.name not in skipped]


def title(info) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def records(info, count: int, device: str = "cpu") -> list[tuple]:
    """One record per run: what ran, and what came of it; `count` samples of each dtype."""
    found = []
    for dtype in DTYPES:
        if dtype not in info.supported_dtypes(device):
            continue
        differentiable = info.supports_autograd and dtype in (torch.float32, torch.complex64)
        for kind in ("forward", "inplace", "out", "backward"):
            if kind == "backward" and not (
                differentiable and dtype in info.supported_backward_dtypes(device)
            ):
                continue
            if kind == "inplace" and info.inplace_variant is None:
                continue
            if kind == "out" and not info.supports_out:
                continue
            found += _runs(info, dtype, kind, count, device)
        found += _wrong(info, dtype, count, device)
    return found


def _runs(info, dtype, kind, count, device):
    seed_all(0)
    grad = kind == "backward"
    samples = info.sample_inputs(device, dtype, requires_grad=grad)
    for index, sample in enumerate(_spread(samples, count)):
        seed_all(index)
        label = (title(info), str(dtype), kind, index)
        yield (*label, outcome(lambda sample=sample: _run(info, kind, sample)))


def _spread(samples, count):
    """`count` of the first samples, spread over four times as many: edge cases come late."""
    return list(itertools.islice(samples, 0, 4 * count, 4))


def _run(info, kind, sample):
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    if kind == "forward":
        return seen(info.op(*args, **kwargs), (args, kwargs))
    if kind == "inplace":
        if not isinstance(sample.input, torch.Tensor):
            return "no tensor"
        written = sample.input.detach().clone()
        result = info.inplace_variant(written, *sample.args, **kwargs)
        return result is written, seen(written, (sample.args, kwargs))
    if kind == "out":
        leaves, form = pytree.tree_flatten(info.op(*args, **kwargs))
        return [_out(info, args, kwargs, leaves, form, make) for make in OUTS]
    result = info.op(*args, **kwargs)
    outputs = [each for each in pytree.tree_leaves(result) if _has_grad(each)]
    inputs = [each for each in pytree.tree_leaves((args, kwargs)) if _has_grad(each)]
    if not outputs or not inputs:
        return "no gradient"
    loss = [each.abs().sum() if each.is_complex() else each.sum() for each in outputs]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return seen((outputs, grads), inputs), [type(each.grad_fn).__name__ for each in outputs]


def _has_grad(value) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


OUTS = (
    lambda t: t.clone().fill_(1),
    lambda t: t.new_empty(0),
    lambda t: t.new_ones(*t.shape, 2)[..., 0],
    lambda t: t.new_ones(t.shape, dtype=torch.int32),
    lambda t: t.new_ones(t.shape, dtype=torch.float64),
)


def _out(info, args, kwargs, leaves, form, make):
    out = pytree.tree_unflatten([make(each) for each in leaves], form)

    def call():
        seed_all(7)
        result = info.op(*args, **kwargs, out=out)
        same = [
            a is b for a, b in zip(pytree.tree_leaves(result), pytree.tree_leaves(out), strict=True)
        ]
        return same, seen(out, (args, kwargs))

    return outcome(call)


def _wrong(info, dtype, count, device):
    if info.error_inputs_func is None or dtype is not torch.float32:
        return
    seed_all(0)
    for index, each in enumerate(_spread(info.error_inputs(device), count)):
        sample = each.sample_input
        run = lambda sample=sample: _run(info, "forward", sample)  # noqa: E731
        yield (title(info), str(dtype), "wrong", index, outcome(run))


def outcome(function):
    """What `function` returns, or its error in words, with the warnings that it gives."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            value = function()
        except Exception as error:
            value = (type(error).__name__, str(error))
    return value, sorted({str(each.message).split("(Triggered")[0] for each in warned})


def seen(values, inputs) -> list:
    """A description of each leaf of `values`, and which of `inputs` its memory belongs to."""
    memory = {
        each.untyped_storage().data_ptr(): index
        for index, each in enumerate(pytree.tree_leaves(inputs))
        if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.numel()
    }
    return [_leaf(each, memory) for each in pytree.tree_leaves(values)]


def _leaf(value, memory):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.layout is not torch.strided:
        return str(value.layout), str(value.dtype), tuple(value.shape)
    shares = memory.get(value.untyped_storage().data_ptr(), -1) if value.numel() else -1
    plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = plain.view(torch.uint8).cpu().numpy().tobytes() if plain.numel() else b""
    marks = (value.requires_grad, value.is_conj(), value.is_neg(), value.storage_offset())
    digest = hashlib.md5(bits, usedforsecurity=False).hexdigest()
    return str(value.dtype), tuple(value.shape), value.stride(), shares, marks, digest


__all__ = ["entries", "outcome", "records", "seed_all", "seen", "title"]
