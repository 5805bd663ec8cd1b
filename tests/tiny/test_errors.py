"""Messages, attributes and pickling of plait's exceptions, and the checks that raise them."""

from __future__ import annotations

import pickle

import pytest
import torch

from plait import checks, errors

FOUR_PARTS = ("weight", "shape [N, 64] (K of x)", "[128, 32]", "Pass weight as [N, K].")

EXAMPLES = [
    errors.ArgumentError(*FOUR_PARTS),
    errors.ShapeError(*FOUR_PARTS),
    errors.DtypeError(*FOUR_PARTS),
    errors.DeviceError(*FOUR_PARTS),
    errors.StrideError(*FOUR_PARTS),
    errors.RankCountError(*FOUR_PARTS),
    errors.GroupError(*FOUR_PARTS),
    errors.CapacityError(*FOUR_PARTS),
    errors.UnsupportedError(*FOUR_PARTS),
    errors.SettingError(*FOUR_PARTS),
    errors.RanksDisagreeError({1: "#3 gemm_rs", 0: "#3 ag_gemm"}),
    errors.PeerTimeoutError(0, "ag_gemm", "ready[2]", 1, 7, 6),
    errors.DeadlockError(["rank 0 waits for rank 1"], ["rank 0", "rank 1"]),
    errors.RaceError(["rank 0 and rank 1 at kernels.py:3"]),
    errors.WorldStoppedError(2, ValueError("boom")),
    errors.MissingDependencyError("typer", "the command line", "pip install typer"),
]


def test_every_class_has_an_example():
    public = {getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    assert {type(each) for each in EXAMPLES} == public - {errors.PlaitError}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_pickling(error: errors.PlaitError):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.SettingError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.MissingDependencyError, ImportError),
    ],
)
def test_builtin_bases(kind: type, builtin: type):
    assert issubclass(kind, errors.PlaitError)
    assert issubclass(kind, builtin)


def test_message_of_four_parts():
    error = errors.ShapeError(*FOUR_PARTS)
    assert str(error) == (
        "weight: expected shape [N, 64] (K of x), got [128, 32]. Pass weight as [N, K]."
    )
    assert (error.argument, error.expected, error.got, error.remedy) == FOUR_PARTS


def test_disagreement_shows_all_ranks_in_order():
    text = str(errors.RanksDisagreeError({1: "#3 gemm_rs", 0: "#3 ag_gemm"}))
    assert text.index("rank 0: #3 ag_gemm") < text.index("rank 1: #3 gemm_rs")


def test_timeout_names_everything():
    text = str(errors.PeerTimeoutError(0, "ag_gemm", "ready[2]", 1, 7, 6))
    for part in ("rank 0", "ag_gemm", "'ready[2]'", "rank 1", "epoch 7", "seen 6"):
        assert part in text


def test_deadlock_closes_its_cycle():
    error = errors.DeadlockError(["a waits"], ["a", "b"])
    assert str(error).endswith("cycle: a -> b -> a")
    assert "cycle" not in str(errors.DeadlockError(["a waits"]))


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


MISTAKES = [
    (errors.ArgumentError, "x", "int", lambda: checks.check_tensor("x", 3)),
    (
        errors.ArgumentError,
        "x",
        "sparse",
        lambda: checks.check_tensor("x", torch.eye(2).to_sparse()),
    ),
    (
        errors.ArgumentError,
        "impl",
        "'quick'",
        lambda: checks.check_one_of("impl", "quick", ("auto", "fused")),
    ),
    (
        errors.DtypeError,
        "x",
        "torch.int8",
        lambda: checks.check_dtype_in("x", torch.int8, (torch.float32,)),
    ),
    (
        errors.DtypeError,
        "w",
        "torch.float16",
        lambda: checks.check_same_dtype("w", _tensor(1, dtype=torch.half), "x", _tensor(1)),
    ),
    (
        errors.DeviceError,
        "w",
        "meta",
        lambda: checks.check_same_device("w", _tensor(1).to("meta"), "x", _tensor(1)),
    ),
    (
        errors.ShapeError,
        "x",
        "shape [4]",
        lambda: checks.check_min_ndim("x", _tensor(4), 2, "[..., K]"),
    ),
    (
        errors.ShapeError,
        "w",
        "[8, 32]",
        lambda: checks.check_shape("w", _tensor(8, 32), ("N", 64), "K of x", "Transpose."),
    ),
    (
        errors.ShapeError,
        "w",
        "[8]",
        lambda: checks.check_shape("w", _tensor(8), ("N", 64), "K of x", "Transpose."),
    ),
    (
        errors.ShapeError,
        "x",
        "7",
        lambda: checks.check_divisible("x", 7, 4, "size of dim 0", "Pad."),
    ),
    (
        errors.StrideError,
        "x",
        "strides [1, 2]",
        lambda: checks.check_last_dim_contiguous("x", _tensor(2, 3).T.contiguous().T),
    ),
    (errors.StrideError, "x", "strides", lambda: checks.check_contiguous("x", _tensor(2, 3).T)),
    (errors.ShapeError, "dim", "2", lambda: checks.normalize_dim("dim", 2, 2)),
    (errors.ShapeError, "dim", "True", lambda: checks.normalize_dim("dim", True, 2)),
    (
        errors.RankCountError,
        "rows_per_rank",
        "3 entries",
        lambda: checks.check_rank_list("rows_per_rank", [1, 2, 3], 4),
    ),
    (
        errors.ArgumentError,
        "rows_per_rank[1]",
        "-2",
        lambda: checks.check_rank_list("rows_per_rank", [1, -2], 2),
    ),
    (
        errors.ArgumentError,
        "rows_per_rank",
        "Tensor",
        lambda: checks.check_rank_list("rows_per_rank", torch.tensor([1, 2]), 2),
    ),
]


@pytest.mark.parametrize(("kind", "argument", "got", "call"), MISTAKES)
def test_checks_name_argument_and_value(kind, argument, got, call):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.argument == argument
    assert got in caught.value.got
    assert caught.value.remedy


def test_checks_that_pass():
    x = _tensor(2, 3)
    checks.check_tensor("x", x)
    checks.check_shape("x", x, ("M", 3), "K", "")
    checks.check_shape("x", x, (None, 3), "K", "")
    checks.check_last_dim_contiguous("x", _tensor(4, 8)[:, ::8])  # one column: any stride will do
    checks.check_last_dim_contiguous("x", _tensor(4, 8)[::2])
    checks.check_divisible("x", 0, 4, "size", "")
    assert checks.normalize_dim("dim", -2, 2) == 0
    assert checks.check_rank_list("rows_per_rank", [0, 5], 2) == (0, 5)
