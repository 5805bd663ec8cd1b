"""The ways in which tests/opinfo_harness.py runs a sample: twice, by ATen and under plait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.ops.aten import report
from tests.host.aten import opinfo
from tests.opinfo_values import Values
from tests.poison import poison, poisoned_results

KINDS = ("forward", "inplace", "out", "backward", "wrong")
# Who serves forward and backward: any mix must do.
_MIXES = ((True, True), (True, False), (False, True))


@dataclass
class Run:
    """One way of running one sample: `call(sample, forward, backward)` with contexts for both.

    `plain_call(sample)` gives the same values by ATen, wherever they are written to.
    """

    label: str
    sample: Any
    call: Callable[[Any, Any, Any], Any]
    plain_call: Callable[[Any], Any]
    device: torch.device
    mix: tuple[bool, bool] = (True, True)

    def compare(self, use: Callable[[], Any], *, exact: bool) -> tuple[str, list[report.Row]]:
        """Run by ATen and under `use`: what differs, or "", and who served."""
        unused = _digests(self.sample)
        plain = opinfo.outcome(lambda: self.call(self.sample, nullcontext(), nullcontext()))
        before = _digests(self.sample)
        if before != unused:
            return self._compare_written(use, exact=exact)
        poison(self.device)
        forward, backward = (use() if each else nullcontext() for each in self.mix)
        with report.report() as counted, poisoned_results():
            ours = opinfo.outcome(lambda: self.call(self.sample, forward, backward))
        problem = self._problem(plain, ours, exact)
        if before != _digests(self.sample):
            problem = f"an input is changed; {problem}"
        return self._described(problem), counted.rows

    def _compare_written(
        self, use: Callable[[], Any], *, exact: bool
    ) -> tuple[str, list[report.Row]]:
        """The same for an operator that writes operands (running statistics): on copies, and what
        is written counts as a result."""
        first, second = _copy(self.sample), _copy(self.sample)
        plain = opinfo.outcome(lambda: self.call(first, nullcontext(), nullcontext()))
        poison(self.device)
        forward, backward = (use() if each else nullcontext() for each in self.mix)
        with report.report() as counted, poisoned_results():
            ours = opinfo.outcome(lambda: self.call(second, forward, backward))
        problem = self._problem(plain, ours, exact)
        written = partial(_written, self.plain_call)
        for index, (a, b) in enumerate(zip(_leaves(first), _leaves(second), strict=True)):
            if not problem and opinfo.digest(a) != opinfo.digest(b):
                problem = Values(written, self.sample, index).difference(a, b, exact=exact)
                problem = f"operand {index}: {problem}" if problem else ""
        return self._described(problem), counted.rows

    def _described(self, problem: str) -> str:
        return f"{self.label}: {problem}\n    {self.sample.summary()}" if problem else ""

    def _problem(self, plain: Any, ours: Any, exact: bool) -> str:
        if _failed(plain[0]) or _failed(ours[0]) or plain[1] != ours[1]:
            return "" if plain == ours else f"ATen gives {plain}, plait {ours}"
        (values, inputs, facts), (our_values, _, our_facts) = plain[0], ours[0]
        if facts != our_facts:
            return f"ATen has {facts}, plait {our_facts}"
        memory = opinfo.memory_of(inputs)
        leaves, our_leaves = pytree.tree_leaves(values), pytree.tree_leaves(our_values)
        for index, (a, b) in enumerate(zip(leaves, our_leaves, strict=True)):
            forms = opinfo.form(a, memory), opinfo.form(b, memory)
            if forms[0] != forms[1]:
                return f"result {index}: ATen has {forms[0]}, plait {forms[1]}"
            if opinfo.digest(a) != opinfo.digest(b):
                problem = Values(self.plain_call, self.sample, index).difference(a, b, exact=exact)
                if problem:
                    return f"result {index}: {problem}"
        return ""


def _failed(value: Any) -> bool:
    return len(value) == 2  # the error's class and text


def _digests(sample: Any) -> list[str]:
    return [opinfo.digest(each) for each in _leaves(sample)]


def _leaves(sample: Any) -> list[Any]:
    return pytree.tree_leaves((sample.input, sample.args, sample.kwargs))


def _copy(sample: Any) -> Any:
    """With memory of its own, laid out alike."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage().clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        made.set_(storage, value.storage_offset(), value.shape, value.stride())
        return made.requires_grad_(value.requires_grad)

    return sample.transform(copy)


def _written(call: Callable[[Any], Any], sample: Any) -> list[Any]:
    """The operands after a call."""
    used = _copy(sample)
    call(used)
    return _leaves(used)


# --- the ways to run a sample
def runs(
    info: Any, dtype: torch.dtype, count: int | None, device: torch.device, kinds: Collection[str]
) -> Iterator[Run]:
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes(device.type)
    for source, index, sample in _samples(info, dtype, count, device, grad=False):
        label = f"{opinfo.title(info)} {dtype} {source}[{index}]"
        forward = partial(_forward, info)
        if "forward" in kinds:
            call = partial(_quiet, partial(opinfo.run_forward, info))
            yield Run(f"{label} forward", sample, call, forward, device)
        if "inplace" in kinds and info.inplace_variant and isinstance(sample.input, torch.Tensor):
            call = partial(_quiet, partial(opinfo.run_inplace, info))
            yield Run(f"{label} in-place", sample, call, forward, device)
        if "out" in kinds and info.supports_out:
            with torch.no_grad():
                like = opinfo.outcome(lambda sample=sample, forward=forward: (forward(sample),))[0]
            for number, make in enumerate(() if _failed(like) else opinfo.OUTS):
                call = partial(_quiet, partial(_out, info, make, like[0]))
                yield Run(f"{label} out {number}", sample, call, forward, device)
    if "backward" in kinds and differentiable:
        for source, index, sample in _samples(info, dtype, count, device, grad=True):
            if not opinfo.with_grad((sample.input, sample.args, sample.kwargs)):
                continue
            call = partial(_backward, info, source, index)
            label = f"{opinfo.title(info)} {dtype} {source}[{index}] backward"
            mix = _MIXES[index % len(_MIXES)]
            plain = partial(_plain_backward, call)
            yield Run(label, sample, call, plain, device, mix)
    if "wrong" in kinds and info.error_inputs_func is not None:
        opinfo.seed_all(0)
        for index, each in enumerate(opinfo.spread(info.error_inputs(device.type), count)):
            call = partial(_quiet, partial(opinfo.run_forward, info))
            label = f"{opinfo.title(info)} wrong[{index}]"
            yield Run(label, each.sample_input, call, partial(_forward, info), device)


def _samples(
    info: Any, dtype: torch.dtype, count: int | None, device: torch.device, *, grad: bool
) -> Iterator[tuple[str, int, Any]]:
    opinfo.seed_all(0)
    given = info.sample_inputs(device.type, dtype, requires_grad=grad)
    for index, sample in enumerate(opinfo.spread(given, count)):
        yield "sample", index, sample
        yield "strided", index, sample.noncontiguous()
    if not grad:
        given = info.reference_inputs(device.type, dtype)
        for index, sample in enumerate(opinfo.spread(given, count)):
            yield "reference", index, sample


def _quiet(call: Callable[[Any], Any], sample: Any, forward: Any, _: Any) -> Any:
    with torch.no_grad(), forward:
        return call(sample)


def _forward(info: Any, sample: Any) -> Any:
    return info.op(sample.input, *sample.args, **sample.kwargs)


def _out(info: Any, make: Callable[[Any], Any], like: Any, sample: Any) -> Any:
    out = pytree.tree_map(make, like)
    return opinfo.run_out(info, sample, out)


def _backward(info: Any, source: str, index: int, sample: Any, forward: Any, backward: Any) -> Any:
    with forward:
        result, given, _ = opinfo.run_forward(info, sample)
    outputs, inputs = opinfo.with_grad(result), opinfo.with_grad(given)
    facts = [_saved(each.grad_fn) for each in outputs]
    if not outputs:
        return (), given, facts
    incoming = [_incoming(each, source, index + place) for place, each in enumerate(outputs)]
    with backward:
        grads = torch.autograd.grad(outputs, inputs, incoming, allow_unused=True)
    return (outputs, grads), inputs, facts


def _plain_backward(call: Callable[[Any, Any, Any], Any], sample: Any) -> Any:
    return call(sample, nullcontext(), nullcontext())[0]


def _incoming(output: torch.Tensor, source: str, seed: int) -> torch.Tensor:
    """A gradient: one value for all as `sum` gives, dense, or strided; values fit bfloat16."""
    shape = (*output.shape, 2) if source == "strided" else () if seed % 2 else output.shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    made = values.to(output.device, output.dtype)
    return made[..., 0] if source == "strided" else made.expand(output.shape)


def _saved(node: Any) -> tuple[Any, ...]:
    """What autograd keeps of the forward: names, dtypes and shapes."""
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            plain = isinstance(value, torch.Tensor)
            found.append((name, (value.dtype, value.shape) if plain else repr(value)))
    return (type(node).__name__, *found)


__all__ = ["KINDS", "Run", "runs"]
