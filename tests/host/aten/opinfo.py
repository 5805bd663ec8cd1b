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
    for index, sample in enumerate(spread(samples, count)):
        seed_all(index)
        label = (title(info), str(dtype), kind, index)
        yield (*label, outcome(lambda sample=sample: _run(info, kind, sample)))


def spread(samples, count):
    """`count` of the first samples, spread over four times as many: edge cases come late."""
    return list(samples) if count is None else list(itertools.islice(samples, 0, 4 * count, 4))


def _run(info, kind, sample):
    if kind == "out":
        result = info.op(sample.input, *sample.args, **sample.kwargs)
        outs = [pytree.tree_map(make, result) for make in OUTS]
        return [outcome(lambda out=out: _described(*run_out(info, sample, out))) for out in outs]
    if kind == "inplace" and not isinstance(sample.input, torch.Tensor):
        return "no tensor"
    ran = {"forward": run_forward, "inplace": run_inplace, "backward": run_backward}[kind](
        info, sample
    )
    return ran if ran == NO_GRADIENT else _described(*ran)


def _described(values, inputs, facts):
    return seen(values, inputs), facts


# What a sample gives: the values, the inputs whose memory they may be, and facts beside them.
def run_forward(info, sample):
    args = (sample.input, *sample.args)
    return info.op(*args, **sample.kwargs), (args, sample.kwargs), ()


def run_inplace(info, sample):
    written = sample.input.detach().clone()
    result = info.inplace_variant(written, *sample.args, **sample.kwargs)
    return written, (sample.args, sample.kwargs), result is written


def run_out(info, sample, out):
    seed_all(7)
    args = (sample.input, *sample.args)
    result = info.op(*args, **sample.kwargs, out=out)
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(out), strict=True)
    return out, (args, sample.kwargs), [a is b for a, b in pairs]


NO_GRADIENT = "no gradient"


def run_backward(info, sample):
    result, given, _ = run_forward(info, sample)
    outputs, inputs = with_grad(result), with_grad(given)
    if not outputs or not inputs:
        return NO_GRADIENT
    loss = [each.abs().sum() if each.is_complex() else each.sum() for each in outputs]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return (outputs, grads), inputs, [type(each.grad_fn).__name__ for each in outputs]


def with_grad(values) -> list:
    """The tensors among `values` that require a gradient."""
    leaves = pytree.tree_leaves(values)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]


# What `out=` may be given, made of a result: what fits, and what does not.
OUTS = (
    lambda t: t.clone().fill_(1),
    lambda t: t.new_empty(0),
    lambda t: t.new_ones(*t.shape, 2)[..., 0],
    lambda t: t.new_ones(t.shape, dtype=torch.int32),
    lambda t: t.new_ones(t.shape, dtype=torch.float64),
)


def _wrong(info, dtype, count, device):
    if info.error_inputs_func is None or dtype is not torch.float32:
        return
    seed_all(0)
    for index, each in enumerate(spread(info.error_inputs(device), count)):
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
    memory = memory_of(inputs)
    return [(*form(each, memory), digest(each)) for each in pytree.tree_leaves(values)]


def memory_of(inputs) -> dict:
    """The number of an input by the address of its memory."""
    return {
        each.untyped_storage().data_ptr(): index
        for index, each in enumerate(pytree.tree_leaves(inputs))
        if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.numel()
    }


def form(value, memory) -> tuple:
    """All of a leaf but its values."""
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    if value.layout is not torch.strided:
        return str(value.layout), str(value.dtype), tuple(value.shape)
    shares = memory.get(value.untyped_storage().data_ptr(), -1) if value.numel() else -1
    marks = (value.requires_grad, value.is_conj(), value.is_neg(), value.storage_offset())
    return str(value.dtype), tuple(value.shape), value.stride(), shares, marks


def digest(value) -> str:
    """The values of a leaf."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    plain = value.detach().resolve_conj().resolve_neg().reshape(-1)
    plain = plain.clone(memory_format=torch.contiguous_format)
    bits = plain.view(torch.uint8).cpu().numpy().tobytes() if plain.numel() else b""
    return hashlib.md5(bits, usedforsecurity=False).hexdigest()


__all__ = [
    "NO_GRADIENT",
    "OUTS",
    "digest",
    "entries",
    "form",
    "memory_of",
    "outcome",
    "records",
    "run_backward",
    "run_forward",
    "run_inplace",
    "run_out",
    "seed_all",
    "seen",
    "spread",
    "title",
    "with_grad",
]
