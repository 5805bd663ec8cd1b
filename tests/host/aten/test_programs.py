"""Whole programs under overrides: threads that flip the gate, tracers, `plait run`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import plait
from plait.cli.main import main
from plait.ops.aten import registration, targets
from tests.aten_stress import run_stress
from tests.tiny.tree import ROOT

STRESS_SECONDS = float(os.environ.get("STRESS_SECONDS", "10"))


def python(code: str, *arguments: str, cwd=ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["bitwise", "shipped"])
def test_threads_compute_while_one_flips(kind):
    """60 seconds of it are asked for before a release: STRESS_SECONDS=60."""
    print(run_stress(STRESS_SECONDS, torch.device("cpu"), kind))


@pytest.fixture
def everything(marked):
    """All targets are registered and on; `exp` is one that marks its calls."""
    exp = marked("exp")
    registration.install(targets.targets(), "CPU")
    with plait.use("*", device="cpu"):
        yield exp


def function(x):
    return torch.softmax(x.exp() + 1, 0).sum() * 2


def test_tracers_do_not_see_overrides(everything):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(3)
    with plait.use((), "*"):
        plain = [str(make_fx(function, tracing_mode=m)(x).code) for m in ("real", "symbolic")]
    seen = len(everything.calls)
    found = [str(make_fx(function, tracing_mode=m)(x).code) for m in ("real", "symbolic")]
    assert found == plain
    assert len(everything.calls) == seen + 1  # a real trace computes, too
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert fake.exp().shape == (3,)
    assert torch.empty(3, device="meta").exp().device.type == "meta"
    assert len(everything.calls) == seen + 1


def test_export_does_not_see_overrides(everything):
    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    program = torch.export.export(Model(), (torch.ones(3),))
    assert not everything.calls
    assert "aten.exp.default" in str(program.graph)


def test_compile_does_not_see_overrides(everything):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    with plait.use((), "*"):
        plain = function(x)
        found = compiled(x)
    assert torch.equal(found, plain)
    torch._dynamo.reset()

    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    assert not everything.calls
    torch.compile(function, fullgraph=True, backend=backend)(x)
    assert len(graphs) == 1
    assert "exp" in graphs[0]
    torch._dynamo.reset()


SCRIPT = """
import pickle, sys, torch
class Mine: pass
print(__name__, sys.argv[1:], sys.path[0] == __file__.rsplit("/", 1)[0])
print(type(pickle.loads(pickle.dumps(Mine()))).__name__, torch.ones(2).exp().tolist())
if "fail" in sys.argv: raise KeyError("mine")
if "stop" in sys.argv: sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_run_serves_a_script_as_it_is(marked, script, capsys):
    marked("exp")
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    options = ["--include", "exp", "--device=cpu", "--report"]
    assert main(["run", *options, script, "--help", "--include", "x"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "__main__ ['--help', '--include', 'x'] True",
        "Mine [77.0, 77.0]",
    ]
    assert "exp" in err
    assert "plait served" in err
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_run_excludes(marked, script, capsys):
    marked("exp", "add.Tensor")
    assert main(["run", "--include=pointwise", "--exclude=exp", "--device=cpu", script]) == 0
    assert "Mine [2.71" in capsys.readouterr().out


def test_run_lets_errors_and_exits_through(marked, script):
    marked()
    with pytest.raises(KeyError, match="mine"):
        main(["run", script, "fail"])
    with pytest.raises(SystemExit) as stop:
        main(["run", script, "stop"])
    assert stop.value.code == 3


def test_run_says_what_is_wrong(marked, capsys):
    marked()
    assert main(["run", "no/such/file.py"]) == 2
    assert "no file 'no/such/file.py'" in capsys.readouterr().err
    assert main(["run", "--include", "ad.Tensor", __file__]) == 2
    assert "Did you mean add.Tensor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["run", "--report"])
    assert stop.value.code == 2


def test_run_a_module_in_a_process(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code = "import sys; from plait.cli.main import main; sys.exit(main(sys.argv[1:]))"
    assert python(code, "run", "-m", "package", "a", cwd=tmp_path) == "__main__ ['a']\n"
