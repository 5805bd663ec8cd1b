"""`plait doctor`: survives whatever is missing or broken, and judges facts as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plait import device
from plait.cli import doctor, doctor_torch
from plait.cli.doctor_probes import Line, Section, version_tuple
from plait.cli.doctor_runs import what_runs
from plait.cli.doctor_torch import owner_of, parse_topology
from plait.settings import environment_report
from tests.tiny.tree import ROOT

MODULE = ("-m", "plait.cli.doctor")
MISSING = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"
GOOD = {
    **dict.fromkeys(("torch", "triton", "numpy", "greenlet"), "9.9"),
    "linux": True,
    "numpy_clash": False,
    "trial": "",
    "gpus": [{"arch": "sm90", "vendor": "nvidia"}] * 2,
    "amd": False,
    "compiler": True,
    "unreachable": [],
    "symm_mem": "",
    "gloo": True,
    "environment": {},
}
CPU, ONE_GPU, GPUS, GLOO, DESCRIPTORS, POINTERS = range(6)


def run(*command: str, shadow: Path | None = None, **variables: str):
    paths = [str(each) for each in (shadow, ROOT) if each]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def shadows(folder: Path, **sources: str) -> Path:
    """A folder whose packages hide the installed ones, also from the doctor's child."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def lines(report: dict, title: str) -> dict[str, dict]:
    section = next(each for each in report["sections"] if each["title"] == title)
    return {line["name"]: line for line in section["lines"]}


@pytest.fixture(scope="module")
def whole() -> dict:
    done = run("-m", "plait", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_of_this_machine(whole):
    assert [each["title"] for each in whole["sections"]] == list(
        dict.fromkeys(heading for heading, _, _ in doctor.PROBES.values())
    )
    failed = [
        line for each in whole["sections"] for line in each["lines"] if "probe of" in line["name"]
    ]
    assert failed == []
    packages = lines(whole, "Packages")
    assert packages["torch"]["mark"] == "ok"
    assert "loaded from torch/__init__.py" in packages["torch"]["value"]
    assert whole["runs"][CPU]["runs"] is True
    assert whole["runs"][GLOO]["runs"] is True


def test_starts_without_any_package():
    code = (
        "import sys\nfrom plait.cli import doctor, main\n"
        "loaded = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(*sorted(loaded))"
    )
    done = run("-S", "-c", code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - {"__main__"} == {"plait"}


@pytest.mark.parametrize("command", [MODULE, ("-m", "plait", "doctor")])
def test_everything_missing(tmp_path, command):
    names = ("torch", "triton", "typer", "numpy", "greenlet", "rich")
    shadow = shadows(tmp_path, **dict.fromkeys(names, MISSING))
    done = run(*command, "--json", shadow=shadow)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    for name in ("torch", "triton", "numpy", "greenlet"):
        line = lines(report, "Packages")[name]
        assert (line["mark"], line["todo"]) == ("fail", f"pip install {name}")
    assert not any(each["runs"] for each in report["runs"])
    assert lines(report, "Settings")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "ended Python: signal 6"),
        ("import os; os._exit(5)", "ended Python: exit code 5"),
        ("print('half a line', end='')\nraise ValueError", "ValueError"),
    ],
)
def test_a_broken_torch_is_a_line(tmp_path, source, said):
    done = run(*MODULE, "--strict", shadow=shadows(tmp_path, torch=source))
    assert done.returncode == 1, done.stderr
    assert any(
        line.startswith("  fail") and "torch" in line and said in line
        for line in done.stdout.splitlines()
    ), done.stdout
    assert "What will run" in done.stdout
    assert "result: something that plait needs is broken" in done.stdout
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_hanging_torch_is_a_line(tmp_path):
    code = (
        "from plait.cli import doctor\ndoctor.CHILD_SECONDS = 3.0\nprint(doctor.main(['--strict']))"
    )
    shadow = shadows(tmp_path, torch="import time; time.sleep(100)")
    done = run("-c", code, shadow=shadow)
    assert done.returncode == 0, done.stderr
    assert "ended Python: no answer for 3 s" in done.stdout
    assert done.stdout.endswith("broken\n1\n")


def test_a_pipe_that_closes_is_no_error(tmp_path):
    shadow = shadows(tmp_path, torch=MISSING)
    command = f"{sys.executable} -m plait.cli.doctor | true; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": f"{shadow}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        ["bash", "-c", command], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_probe_that_raises_is_a_line(monkeypatch):
    def broken(section: Section) -> None:
        section.add("ok", "found", "before it failed")
        raise RuntimeError("first line\nsecond line")

    needless = {"odd": ("Odd", broken, False)}
    monkeypatch.setattr(doctor, "PROBES", needless)
    monkeypatch.setattr(doctor, "what_runs", lambda facts: [])
    report = doctor.collect(isolated=False)
    assert report.sections[0].lines == [
        Line("ok", "found", "before it failed"),
        Line("warn", "probe of odd", "failed with RuntimeError: first line"),
    ]
    assert report.ok
    monkeypatch.setattr(doctor, "PROBES", {"odd": ("Odd", broken, True)})
    assert not doctor.collect(isolated=False).ok


def test_strict_without_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect", lambda imports: doctor.Report("1", [], what_runs(GOOD)))
    assert doctor.main(["--strict"]) == 0
    assert "nothing that plait needs is broken" in capsys.readouterr().out
    bad = what_runs({**GOOD, "compiler": False})
    monkeypatch.setattr(doctor, "collect", lambda imports: doctor.Report("1", [], bad))
    assert doctor.main([]) == 0
    assert doctor.main(["--strict"]) == 1


def test_settings_and_variables(tmp_path):
    misspelt = "PLAIT_" + "DEBUGG"
    shadow = shadows(tmp_path, torch=MISSING, numpy=MISSING, odd="raise KeyError('x')")
    done = run(
        *MODULE,
        "--json",
        "--imports=odd",
        shadow=shadow,
        PLAIT_CPU_BLOCKS="5",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        TRITON_INTERPRET="1",
        **{misspelt: "1"},
    )
    report = json.loads(done.stdout)
    found = lines(report, "Settings")
    assert found["PLAIT_CPU_BLOCKS"]["value"] == "5 (default 2)"
    assert found["PLAIT_DEBUG"]["value"] == "False"
    assert found[misspelt]["mark"] == "warn"
    variables = lines(report, "Environment")
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"]["mark"] == "warn"
    assert "unset" in variables["TRITON_INTERPRET"]["todo"]
    assert "KeyError" in lines(report, "import")["probe of import odd"]["value"]
    done = run(*MODULE, "--json", shadow=shadow, PLAIT_CPU_BLOCKS="many")
    assert lines(json.loads(done.stdout), "Settings")["PLAIT_CPU_BLOCKS"]["mark"] == "fail"


def test_foreign_kernels_are_found(tmp_path):
    source = (
        "import torch\nkept = torch.library.Library('aten', 'IMPL')\n"
        "kept.impl('mm', lambda a, b: a, 'CPU')\n"
    )
    code = (
        "import json\nfrom plait.cli import doctor\n"
        "doctor.PROBES = {'kernels': doctor.PROBES['kernels']}\n"
        "print(doctor.as_json(doctor.collect(['impostor'], isolated=False)))"
    )
    done = run("-c", code, shadow=shadows(tmp_path, impostor=source))
    report = json.loads(done.stdout)
    section = next(each for each in report["sections"] if each["title"].startswith("Kernels"))
    foreign = {k: v for k, v in section["facts"]["foreign"].items() if k.endswith("impostor.py")}
    assert list(foreign.values()) == [["aten::mm"]]
    found = {line["name"]: line for line in section["lines"]}
    assert found[next(iter(foreign))]["mark"] == "warn"
    assert "impostor.py, CUDA: ATen" in found["aten::mm"]["value"]
    assert found["aten::bmm"]["value"] == "CPU: ATen, CUDA: ATen"


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/build/pytorch/aten/src/ATen/RegisterCPU_0.cpp", ""),
        ("../torch/csrc/autograd/generated/VariableType_8.cpp", ""),
        ("/build/other/csrc/overrides.cpp", "overrides.cpp"),
        ("torch/_native/registry.py", "torch._native"),
        ("torch/library.py", "someone through torch.library"),
        ("torch/_refs/linalg/__init__.py", "torch"),
        ("flag_gems/runtime/register.py", "flag_gems"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_owner_of_a_kernel(path, owner):
    assert owner_of(path) == owner


@pytest.mark.parametrize(
    ("change", "row", "word", "broken"),
    [
        ({"numpy_clash": True}, CPU, "numpy", True),
        ({"trial": "RaceError: x"}, CPU, "RaceError", True),
        ({"greenlet": None}, CPU, "greenlet", True),
        ({"gpus": [], "no_gpu": "a CPU build"}, ONE_GPU, "a CPU build", False),
        ({"amd": True}, ONE_GPU, "AMD", False),
        ({"compiler": False}, ONE_GPU, "C compiler", True),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, ONE_GPU, "CUDA_LAUNCH_BLOCKING", True),
        ({"environment": {"TRITON_INTERPRET": "1"}}, ONE_GPU, "TRITON_INTERPRET", True),
        ({"gpus": [{"arch": "sm90"}]}, GPUS, "one GPU only", False),
        ({"unreachable": [[0, 1]]}, GPUS, "0 -> 1", False),
        ({"symm_mem": "ImportError: y"}, GPUS, "ImportError", True),
        ({"gloo": False}, GLOO, "gloo", True),
        ({"gpus": [{"arch": "sm89"}]}, DESCRIPTORS, "pointer", False),
        ({"gpus": [{"arch": "sm75"}]}, POINTERS, "sm75", False),
    ],
)
def test_what_runs(change, row, word, broken):
    assert all(each.runs and not each.broken for each in what_runs(GOOD))
    found = what_runs({**GOOD, **change})[row]
    assert (found.runs, found.broken) == (False, broken)
    assert word in found.reason


def test_one_gpu_may_be_shared():
    variable = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    facts = {**GOOD, "gpus": [{"arch": "sm90"}], "environment": {variable: "1"}}
    assert what_runs(facts)[GPUS].runs


def test_nothing_is_claimed_without_facts():
    assert not any(each.runs for each in what_runs({}))


def test_topology():
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\t0-47\nNIC0\tPIX\tSYS\t X \n"
    )
    assert parse_topology(text) == {(0, 0): "X", (0, 1): "NV18", (1, 0): "NV18", (1, 1): "X"}
    assert parse_topology("") == {}


def test_gpus_and_links(monkeypatch):
    gpu = SimpleNamespace(arch="sm90", vendor="nvidia", name="X", num_sms=132)
    topology = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    memory = SimpleNamespace(total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, peer: index < peer)
    monkeypatch.setattr(device, "device_info", lambda device: gpu)
    monkeypatch.setattr(
        doctor_torch, "_tool", lambda *command: topology if "topo" in command else "X, 580.1\n" * 2
    )
    gpus, links = Section("GPUs"), Section("Links")
    doctor_torch.probe_gpus(gpus)
    doctor_torch.probe_links(links)
    assert Line("info", "driver", "580.1, 2 GPUs") in gpus.lines
    assert Line("ok", "GPU 1", "X, sm90, 132 SMs, 141 GiB") in gpus.lines
    assert links.lines[0] == Line("ok", "GPU 0 reaches", "1:NV18")
    assert (links.lines[1].mark, links.lines[1].value) == ("warn", "0:none")
    assert links.facts["unreachable"] == [[1, 0]]


def test_versions():
    assert version_tuple("2.13.0+cpu") == (2, 13, 0)
    assert version_tuple("2.4.0rc1") == (2, 4, 0)
    assert version_tuple("unknown") == ()


def test_environment_report(monkeypatch):
    monkeypatch.setenv("PLAIT_CPU_BLOCKS", "7")
    assert environment_report("PLAIT_")["PLAIT_CPU_BLOCKS"] == "7"
    assert all(name.startswith("PLAIT_") for name in environment_report("PLAIT_"))
