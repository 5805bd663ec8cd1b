"""Every example runs, through its `main()`."""

import importlib.util
from pathlib import Path

import pytest
import torch

from plait.testing.compare import assert_bitwise

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(f"examples.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_main_runs_and_prints(path, capsys):
    load(path).main()
    assert capsys.readouterr().out.strip()


def test_user_kernel_shifts_by_two(capsys):
    (path,) = (path for path in EXAMPLES if path.stem == "user_kernel")
    for rank, values in enumerate(load(path).main()):
        assert_bitwise(values, torch.arange(3.0) + 10 * ((rank - 2) % 4))
    assert capsys.readouterr().out.splitlines()[0] == "rank 0 has [20.0, 21.0, 22.0]"
