"""Operators of plait against ATen under the samples of PyTorch's operator database.

    check(("sum", "nansum"), "reduction", dtypes=FLOATS, count=20, device=device)

runs every kind of sample (plain, reference, strided) in every way (KINDS), once by ATen and once
under `plait.use(keys)` in memory full of NaN, and fails unless results agree: form and errors
exactly, values bitwise, or floating ones within twice ATen's own error against fp64 plus one unit
in the last place. It also fails where ATen served more than it may, or for a reason not named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

import plait
from plait.ops.aten import dispatch, report
from plait.ops.engine.call import RESULT_REASONS
from tests.host.aten import opinfo
from tests.opinfo_runs import KINDS, runs

# Whatever the operator, ATen serves these.
ALWAYS = RESULT_REASONS | {dispatch.SUBCLASS, dispatch.LAYOUT, dispatch.OTHER_DEVICE}
ALWAYS |= {dispatch.LAZY_VIEW, dispatch.NUMBER}


@dataclass
class Tally:
    """What `check` saw. `served` counts calls by key, `declined` by key and reason."""

    served: Counter[str] = field(default_factory=Counter)
    declined: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the calls that plait could serve in principle, those that it served."""
        open_to_plait = sum(n for (_, why), n in self.declined.items() if why not in ALWAYS)
        total = self.served.total() + open_to_plait
        return self.served.total() / total if total else 0.0

    def add(self, problem: str, rows: Sequence[report.Row]) -> None:
        """One run."""
        self.runs += 1
        self.different += [problem] if problem else []
        for row in rows:
            if row.reason == report.PLAIT:
                self.served[row.key] += row.calls
            else:
                self.declined[row.key, row.reason] += row.calls

    def require(self, share: float, reasons: Collection[str] | None) -> None:
        """Fail unless nothing differed, plait served `share`, and ATen only for known reasons."""
        count = len(self.different)
        assert not count, f"{count} of {self.runs} runs:\n" + "\n".join(self.different[:12])
        seen = {why for _, why in self.declined} - ALWAYS
        unknown = seen - set(reasons) if reasons is not None else set()
        assert not unknown, f"declined for reasons that the test does not name: {sorted(unknown)}"
        assert self.share >= share, f"plait served {self.share:.0%} of the calls: {self}"


def check(
    names: Sequence[str],
    keys: Any,
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    count: int | None = None,
    kinds: Collection[str] = KINDS,
    exact: bool = False,
    share: float = 0.5,
    reasons: Collection[str] | None = None,
) -> Tally:
    """Compare, as above; returns what was served and declined.

    `names`: entries of the database (all variants of a name). `keys`: what `plait.use` gets.
    `count`: samples of each source and dtype, spread over four times as many; None for all.
    `exact`: floating values are compared bitwise, too (any NaN equals any other). `share`: of the
    calls, how many plait serves at least. `reasons`: why it may decline; None for any reason.
    """
    tally = Tally()
    device = torch.device(device)
    use = lambda: plait.use(keys, device=device)  # noqa: E731
    with quick(device):
        for info in entries(names):
            for dtype in dtypes:
                if dtype not in info.supported_dtypes(device.type):
                    continue
                for run in runs(info, dtype, count, device, kinds):
                    tally.add(*run.compare(use, exact=exact))
    tally.require(share, reasons)
    return tally


def check_gradients(
    names: Sequence[str], keys: Any, *, device: torch.device | str, count: int = 2
) -> None:
    """Fast gradcheck in fp64 of `count` samples of each entry, forward and backward under plait."""
    device = torch.device(device)
    with quick(device), plait.use(keys, device=device):
        for info in entries(names):
            if torch.float64 in info.supported_backward_dtypes(device.type):
                opinfo.seed_all(0)
                given = info.sample_inputs(device.type, torch.float64, requires_grad=True)
                for sample in opinfo.spread(given, count):
                    _gradcheck(info, sample)


def entries(names: Sequence[str]) -> list[Any]:
    """The database's entries with these names."""
    found = [each for each in op_db if each.name in names or opinfo.title(each) in names]
    known = {each.name for each in found} | {opinfo.title(each) for each in found}
    assert set(names) <= known, f"no such entries: {sorted(set(names) - known)}"
    return found


@contextmanager
def quick(device: torch.device) -> Iterator[None]:
    """Every warning is given again, and seeding and samples cost no more than they need to."""
    always, threads = torch.is_warn_always_enabled(), torch.get_num_threads()
    torch.set_warn_always(True)
    torch.set_num_threads(1)  # waking others takes longer than small tensors
    with ExitStack() as stack:
        for module in (common_utils, core):  # else every sample reads the source of all callers
            if hasattr(module, "extract_test_fn"):
                stack.enter_context(mock.patch.object(module, "extract_test_fn", return_value=None))
        if device.type == "cpu":  # the whole function formats a traceback for each kind of GPU
            seed = torch.default_generator.manual_seed
            stack.enter_context(mock.patch.object(torch, "manual_seed", seed))
        try:
            yield
        finally:
            torch.set_warn_always(always)
            torch.set_num_threads(threads)


def _gradcheck(info: Any, sample: Any) -> None:
    leaves, tree = pytree.tree_flatten((sample.input, *sample.args))
    places = [
        i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.requires_grad
    ]

    def function(*inputs: torch.Tensor) -> Any:
        given = leaves.copy()
        for place, value in zip(places, inputs, strict=True):
            given[place] = value
        args = pytree.tree_unflatten(given, tree)
        result = info.gradcheck_wrapper(info.op, *args, **sample.kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return tuple(opinfo.with_grad(result))

    inputs = [leaves[place] for place in places]
    if inputs:
        assert torch.autograd.gradcheck(
            function, inputs, fast_mode=True, nondet_tol=info.gradcheck_nondet_tol
        ), sample.summary()


__all__ = ["KINDS", "Tally", "check", "check_gradients", "entries", "quick"]
