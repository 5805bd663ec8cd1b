"""The comparison with ATen notices what an operator may do wrong."""

from __future__ import annotations

import pytest
import torch

from plait.ops.aten import registration, spec
from tests.opinfo_harness import check

KINDS = ("forward", "out")


@pytest.fixture
def exp_by():
    """`exp_by(run, supports)` compares an operator for exp with ATen's."""

    def compare(run, supports=lambda x: "", **options):
        operator = spec.OpSpec("exp", ("exp",), run=run, supports=supports)
        device = torch.device("cpu")
        with spec.only(operator):
            return check(
                ("exp",), "exp", dtypes=(torch.float32,), count=3, device=device, **options
            )

    yield compare
    registration.uninstall()


def test_what_is_right_passes(exp_by):
    tally = exp_by(torch.exp)
    assert tally.share == 1.0
    assert tally.served["exp"] == tally.runs - 30  # out= has a key of its own
    exp_by(lambda x: x.double().exp().to(x.dtype).clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (lambda x: torch.exp(x) * (1 + 1e-6), "largest error"),
        (lambda x: torch.exp(x).double(), "torch.float64"),
        (lambda x: torch.exp(x).unsqueeze(0), "plait "),
        (lambda x: torch.exp(x).reshape(-1, 1).repeat(1, 2)[:, 0].view(x.shape), "plait "),
        (lambda x: x.exp_(), "an input is changed"),
        (lambda x: torch.exp(x).requires_grad_(), "True"),
        (lambda x: torch.empty_like(x), "values"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_does_not(exp_by, run, complaint):
    with torch.no_grad(), pytest.raises(AssertionError, match=complaint):
        exp_by(run, kinds=("forward",))


def test_declining_is_told_and_bounded(exp_by):
    few = lambda x: "not small" if x.numel() > 100 else ""  # noqa: E731
    tally = exp_by(torch.exp, few, share=0.1, reasons={"not small"})
    assert 0 < tally.share < 1
    with pytest.raises(AssertionError, match=r"does not name: \['not small'\]"):
        exp_by(torch.exp, few, share=0.1, reasons=())
    with pytest.raises(AssertionError, match="plait served"):
        exp_by(torch.exp, few, share=0.99)


def test_an_unknown_entry_is_an_error(exp_by):
    with pytest.raises(AssertionError, match="no such entries"):
        check(("expp",), "exp", dtypes=(torch.float32,), device=torch.device("cpu"))
