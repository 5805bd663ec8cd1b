"""Importing plait does no work and needs no optional package; each claim in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec

import pytest

import plait
from tests.tiny.tree import ROOT, imports, modules

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
"""
OPTIONAL = ("triton", "greenlet", "typer", "rich", "matplotlib", "safetensors", "tokenizers")
NO_GPU = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("an import touched CUDA")
torch.cuda._lazy_init = torch.cuda.init = refuse
torch.cuda.is_available = torch.cuda.device_count = refuse
torch.cuda.get_device_properties = refuse
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_optional_packages():
    run(
        BLOCK.format(blocked=OPTIONAL)
        + "import plait\n"
        + "from plait import checks, device, errors, settings\n"
        + "assert plait.errors is errors and plait.settings is settings\n"
        + "assert 'ag_gemm' in dir(plait)\n"
        + "assert device.device_info('cpu').num_sms >= 1\n"
    )


def test_import_loads_neither_torch_nor_triton():
    loaded = run("import sys, plait\nprint(*sys.modules)").split()
    assert "plait" in loaded
    assert not {"torch", "triton", "numpy", *OPTIONAL} & set(loaded)


def test_no_module_touches_a_gpu_when_imported():
    run(
        NO_GPU
        + "import importlib, pkgutil, plait\n"
        + "names = [m.name for m in pkgutil.walk_packages(plait.__path__, 'plait.')]\n"
        + "for name in names:\n"
        + "    if not name.endswith('__main__'):\n"
        + "        importlib.import_module(name)\n"
        + "assert len(names) > 5\n"
        + "assert not torch.cuda.is_initialized()\n"
    )


@pytest.mark.parametrize("name", sorted(plait._NAMES))
def test_public_name_resolves(name):
    path = ROOT / (plait._NAMES[name].replace(".", "/") + ".py")
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} is not written yet")
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    value = getattr(plait, name)
    assert callable(value)
    assert value.__doc__
    assert getattr(plait, name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_like_it"):
        plait.nothing_like_it  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = dict(modules("plait"))["plait/__init__.py"]
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    module = ast.Module(body=guarded, type_ignores=[])
    seen = {name for _, name in imports("plait/__init__.py", module)}
    table = {f"{where}.{name}" for name, where in plait._NAMES.items()}
    assert seen == table | {f"plait.{name}" for name in plait._MODULES}
    assert set(plait.__all__) == {*plait._NAMES, *plait._MODULES, "__version__"}


def test_version_is_the_projects():
    assert f'\nversion = "{plait.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_command_line_without_typer_says_what_to_install():
    code = BLOCK.format(blocked=("typer",)) + "from plait.cli.main import main\nsys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert 'pip install "plait[cli]"' in done.stderr


def test_command_line_prints_the_version():
    code = (
        "import sys\nfrom plait.cli.main import main\ncode = main(['--version'])\n"
        "assert 'torch' not in sys.modules and code == 0"
    )
    assert run(code).strip() == plait.__version__
