"""Who may import whom. The table for people is in CONTRIBUTING.md, reasons are in
docs/design/arrows.md."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.tiny.tree import ROOT, imports, modules

FIRST_ROW = {"errors", "settings", "device", "checks"}
BELOW_LAYERS = {
    *FIRST_ROW,
    "backends",
    "codegen",
    "collectives",
    "ops",
    "overlap",
    "runtime",
    "schedules",
    "symm",
}
ARROWS = {
    **dict.fromkeys(FIRST_ROW, FIRST_ROW),
    "backends": FIRST_ROW,
    "codegen": FIRST_ROW,
    "runtime": FIRST_ROW | {"backends"},
    "ops": FIRST_ROW | {"backends", "codegen", "runtime", "schedules"},
    "schedules": set(),
    "symm": FIRST_ROW | {"backends"},
    "collectives": FIRST_ROW | {"symm", "runtime", "backends.commands"},
    "overlap": FIRST_ROW
    | {"symm", "collectives", "schedules", "runtime", "backends", "model", "ops.matmul"},
    "layers": {"ops", "overlap", "collectives", "symm"},
    "integrations": BELOW_LAYERS | {"layers"},
    "compat": BELOW_LAYERS | {"layers"},
    "check": FIRST_ROW | {"symm", "schedules", "runtime", "backends.commands"},
    "testing": FIRST_ROW
    | {"symm", "schedules", "runtime", "check", "backends.commands", "backends.nvidia.executor"},
    "model": FIRST_ROW | {"symm", "schedules", "runtime"},
    "cli": {"*"},
    "__init__": {"*"},  # names for type checkers; test_imports.py says that nothing is loaded
    "__main__": {"cli"},
}
STDLIB = sys.stdlib_module_names
OUTSIDE = {**{each: {"torch"} for each in FIRST_ROW}, "schedules": {"triton"}}
KERNELS_MAY = (
    "triton",
    "plait.schedules",
    "plait.symm.lang",
    "plait.overlap.common",
    "plait.ops.matmul.epilogue_kernels",
    "plait.ops.matmul.kernels",
)


def violations(path: str, tree: ast.Module) -> list[str]:
    """One line for each import in the file at `path` that the table does not allow."""
    return [
        f"{path}:{line}: imports {name}: {reason}"
        for line, name in imports(path, tree)
        if (reason := _refusal(path.removesuffix(".py").split("/"), name))
    ]


def _refusal(where: list[str], name: str) -> str:
    target = name.split(".")
    if target[0] in ("tests", "benchmarks", "examples"):
        return "nothing imports these"
    role = where[-1]
    if role == "kernels" and not _kernels_may(target, name):
        return f"kernels.py imports only {', '.join(KERNELS_MAY)} and intrinsics"
    package = where[1]
    if role == "reference" and target[0] not in {"torch", *STDLIB}:
        # An overlapped operator means a gather or a sum around what `plait.matmul` means.
        shared = package == "overlap" and target[1:4] == ["ops", "matmul", "reference"]
        if not shared:
            return "reference.py imports only torch; in overlap also plait.ops.matmul.reference"
    if target[0] != "plait":
        allowed = OUTSIDE.get(package)
        if allowed is not None and target[0] not in {*allowed, *STDLIB}:
            return f"{package} imports only the standard library and {', '.join(allowed)}"
        return ""
    if package not in ARROWS:
        return f"{package} has no row in the table"
    if package == "overlap" and target[1:2] == ["overlap"]:
        same = target[2:3] == where[2:3] or target[2:3] == ["common"]
        # Gradients of one operator call the others by name: register.py imports every ops.py, and
        # every api.py imports register.py.
        registers = where[2:] == ["register"] and target[3:4] == ["ops"]
        registered = role == "api" and target[2:] == ["register"]
        if same or registers or registered:
            return ""
        return "only overlap/common is shared between operators"
    if len(target) == 1 or target[1] == package or target[1] == "__version__":
        return ""
    granted = ARROWS[package]
    if granted & {"*", target[1], ".".join(target[1:3]), ".".join(target[1:4])}:
        return ""
    return f"{package} may import {', '.join(sorted(granted)) or 'nothing of plait'}"


def _kernels_may(target: list[str], name: str) -> bool:
    if target[:2] == ["plait", "backends"]:
        return target[3:4] == ["intrinsics"]
    return any(name == each or name.startswith(f"{each}.") for each in KERNELS_MAY)


def test_arrows():
    found = [line for path, tree in modules("plait") for line in violations(path, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("plait/errors.py", "import numpy"),
        ("plait/schedules/raster.py", "import torch"),
        ("plait/backends/base.py", "from plait.symm import group"),
        ("plait/backends/base.py", "def f():\n    import plait.symm.group"),
        ("plait/backends/base.py", "from ..symm import group"),
        ("plait/backends/base.py", "from plait import symm"),
        ("plait/overlap/ag_gemm/api.py", "from plait.overlap.gemm_rs.launch import plan"),
        ("plait/overlap/ag_gemm/api.py", "from ..gemm_rs import launch"),
        ("plait/overlap/common/chooser.py", "from plait.overlap.ag_gemm import api"),
        ("plait/overlap/ag_gemm/api.py", "import plait.ops.norm"),
        ("plait/overlap/ag_gemm/kernels.py", "import torch"),
        ("plait/overlap/ag_gemm/kernels.py", "from plait.symm.group import Group"),
        ("plait/overlap/ag_gemm/kernels.py", "from plait.backends.nvidia.base import x"),
        ("plait/overlap/ag_gemm/reference.py", "from plait.errors import ShapeError"),
        ("plait/symm/group.py", "from tests.tiny import tree"),
        ("plait/symm/group.py", "from plait.cli.main import main"),
        ("plait/model/choose.py", "from plait.overlap.common.chooser import choose"),
        ("plait/check/clocks.py", "from plait.testing import ranks"),
        ("plait/check/mutants.py", "from plait.backends.nvidia import executor"),
        ("plait/testing/ranks.py", "from plait.backends.nvidia import intrinsics"),
        ("plait/collectives/push.py", "from plait.backends.base import Executor"),
        ("plait/collectives/kernels.py", "from plait.ops.matmul.kernels import accumulate_tile"),
        ("plait/collectives/reference.py", "from plait.ops.matmul.reference import GATES"),
        ("plait/overlap/ag_gemm/reference.py", "from plait.ops.matmul.api import matmul"),
        ("plait/overlap/ag_gemm/kernels.py", "from plait.ops.matmul.configs import Config"),
        ("plait/overlap/ag_gemm/launch.py", "from plait.overlap import register"),
        ("plait/overlap/register.py", "from plait.overlap.ag_gemm import launch"),
        ("plait/newcomer/a.py", "from plait.errors import ShapeError"),
    ],
)
def test_a_wrong_arrow_is_found(path, code):
    assert len(violations(path, ast.parse(code))) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("plait/overlap/ag_gemm/api.py", "from plait.ops.matmul.api import matmul"),
        ("plait/overlap/ag_gemm/launch.py", "from .kernels import k\nfrom ..common import x"),
        ("plait/overlap/common/chooser.py", "from plait.model.choose import choose"),
        ("plait/overlap/ag_gemm/kernels.py", "import triton\nimport triton.language as tl"),
        ("plait/overlap/ag_gemm/kernels.py", "from plait.backends.nvidia.intrinsics import t"),
        ("plait/overlap/ag_gemm/reference.py", "import torch\nfrom typing import Any"),
        ("plait/testing/ranks.py", "from plait.check import clocks\nimport pytest"),
        ("plait/testing/ranks.py", "from plait.backends.nvidia.executor import CudaExecutor"),
        ("plait/check/mutants.py", "from plait.backends.commands import Program"),
        ("plait/collectives/push.py", "from plait.backends.commands import Copy"),
        (
            "plait/overlap/ag_gemm/kernels.py",
            "from plait.ops.matmul.kernels import accumulate_tile",
        ),
        ("plait/overlap/ag_gemm/reference.py", "from plait.ops.matmul.reference import GATES"),
        ("plait/overlap/ag_gemm/api.py", "from plait.overlap import register as _register"),
        ("plait/overlap/register.py", "from plait.overlap.ag_gemm import ops as _ag_gemm"),
        ("plait/cli/demo.py", "import plait, matplotlib\nfrom plait.overlap.ag_gemm import api"),
    ],
)
def test_a_right_arrow_is_let_through(path, code):
    assert violations(path, ast.parse(code)) == []


def test_the_table_for_people_has_the_same_rows():
    rows = (ROOT / "CONTRIBUTING.md").read_text()
    table = rows[rows.index("| package | may import |") : rows.index("`kernels.py` imports only")]
    named = {each.strip() for row in table.splitlines()[2:] for each in row.split("|")[1:2]}
    packages = {each.strip() for cell in named for each in cell.split(",") if each.strip()}
    assert packages - {"benchmarks", "tests", "examples"} == set(ARROWS) - {"__init__", "__main__"}
