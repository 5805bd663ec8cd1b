"""Probes of `plait doctor` that use torch, each by importing it when it runs.

They report facts and do not judge what follows; `doctor_runs.py` does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from typing import Any

from plait.cli.doctor_probes import Section, one_line, short_path

# Operators whose kernels are listed one by one; all others are only counted.
_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::add.Tensor",
    "aten::mul.Tensor",
    "aten::cat",
    "aten::_softmax",
    "aten::softmax.int",
    "aten::native_layer_norm",
)
_KEYS = ("CPU", "CUDA")
# Registrations that decide what a CPU or CUDA tensor runs; Meta kernels are Python's by design.
_REGISTRATION = re.compile(
    r"^(CPU|CUDA|AutogradCPU|AutogradCUDA|Autograd\[alias\]"
    r"|Composite(?:Ex|Im)plicitAutograd\w*\[alias\]): registered at (.*):\d+ ::",
    re.MULTILINE,
)
_CPP = (".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp", ".cxx", ".hip", ".mm")
_OWN_CPP = ("aten/src/", "torch/csrc/", "caffe2/")
_TOOL_SECONDS = 20


def _torch(section: Section) -> Any:
    try:
        import torch
    except KeyboardInterrupt:
        raise
    except BaseException:  # the section of packages says what it was
        section.add("info", "skipped", "torch cannot be imported")
        return None
    return torch


def _tool(*command: str) -> str:
    """Output of a program, or nothing if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def probe_gpus(section: Section) -> None:
    """Every GPU that PyTorch can use, and those of the driver if it can use none."""
    query = _tool("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    seen = [line.strip() for line in query.splitlines() if line.strip()]
    if seen:
        section.add("info", "driver", f"{seen[0].split(',')[-1].strip()}, {len(seen)} GPUs")
    torch = _torch(section)
    section.facts["gpus"] = []
    if torch is None:
        return
    hip = getattr(torch.version, "hip", None)
    built = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    section.facts["amd"] = bool(hip)
    section.add("info", "torch is built for", built or "the CPU only")
    if not torch.cuda.is_available():
        reason = _why_no_gpu(torch) if built else "this PyTorch is built for the CPU only"
        section.facts["no_gpu"] = reason
        todo = "install a CUDA build of PyTorch that fits the driver" if seen else ""
        section.add("warn" if seen else "info", "GPUs", f"none: {reason}", todo)
        return
    from plait.device import device_info

    for index in range(torch.cuda.device_count()):
        info = device_info(torch.device("cuda", index))
        gib = torch.cuda.get_device_properties(index).total_memory / 2**30
        value = f"{info.name}, {info.arch}, {info.num_sms} SMs, {gib:.0f} GiB"
        section.facts["gpus"].append({"arch": info.arch, "vendor": info.vendor})
        section.add("ok", f"GPU {index}", value)


def _why_no_gpu(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return one_line(error)
    return "CUDA starts, but shows no GPU; CUDA_VISIBLE_DEVICES may hide them"


def probe_links(section: Section) -> None:
    """Which GPU reaches which, as PyTorch and as nvidia-smi see it."""
    torch = _torch(section)
    section.facts["unreachable"] = []
    if torch is None:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        section.add("info", "links", f"none: {count or 'no'} GPU{'' if count == 1 else 's'}")
        return
    kinds = parse_topology(_tool("nvidia-smi", "topo", "-m"))
    for index in range(count):
        cells = []
        for peer in range(count):
            if peer == index:
                continue
            reached = torch.cuda.can_device_access_peer(index, peer)
            if not reached:
                section.facts["unreachable"].append([index, peer])
            # nvidia-smi counts all GPUs; with CUDA_VISIBLE_DEVICES its numbers are other ones.
            kind = kinds.get((index, peer), "") if len(kinds) == count * count else ""
            cells.append(f"{peer}:{kind or 'peer'}" if reached else f"{peer}:none")
        mark = "warn" if any(cell.endswith(":none") for cell in cells) else "ok"
        todo = "kernels cannot write to these peers" if mark == "warn" else ""
        section.add(mark, f"GPU {index} reaches", " ".join(cells), todo)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The GPU part of `nvidia-smi topo -m`: (row, column) -> NV18, PIX, SYS, ... ("X" for self)."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)  # its heading is underlined, terminal or not
    rows = [line.split() for line in plain.splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    columns = [cell for cell in header if re.fullmatch(r"GPU\d+", cell)]
    return {
        (int(row[0][3:]), column): cell
        for row in rows
        if row is not header and row and re.fullmatch(r"GPU\d+", row[0])
        for column, cell in enumerate(row[1 : len(columns) + 1])
    }


def probe_processes(section: Section) -> None:
    """What groups of processes need: gloo, and PyTorch's symmetric memory for GPUs."""
    torch = _torch(section)
    if torch is None:
        return
    import torch.distributed as dist

    if not dist.is_available():
        section.facts.update(gloo=False, symm_mem="torch.distributed is missing")
        section.add("warn", "torch.distributed", "missing from this PyTorch")
        return
    section.facts["gloo"] = dist.is_gloo_available()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for name, there in backends.items():
        missing = "warn" if name == "gloo" else "info"
        section.add("ok" if there else missing, name, "available" if there else "missing")
    try:
        import plait.symm.transports.torch_symm_mem  # noqa: F401
    except Exception as error:
        section.facts["symm_mem"] = one_line(error)
        section.add("warn", "symmetric memory", one_line(error), "processes on GPUs need it")
    else:
        section.facts["symm_mem"] = ""
        section.add("ok", "symmetric memory", "imports")


def owner_of(path: str) -> str:
    """Whose kernel it is, by where it was registered; "" for PyTorch's own C++."""
    if path.endswith(_CPP):
        return "" if any(part in path for part in _OWN_CPP) else path.rsplit("/", 1)[-1]
    short = short_path(path) if path.startswith("/") else path
    package = short.replace("\\", "/").split("/")
    if package[0] != "torch":
        return short if short.startswith((".", "~", "/", "<")) else package[0]
    if package[1] == "_native":
        return "torch._native"
    # `torch.library.impl` registers from its own file and forgets who called it.
    return "someone through torch.library" if package[1] == "library.py" else "torch"


def probe_kernels(section: Section) -> None:
    """Foreign kernels on ATen's keys: plait's unfused paths and references would run them."""
    torch = _torch(section)
    if torch is None:
        return
    owners: dict[str, set[str]] = defaultdict(set)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            for _, path in _REGISTRATION.findall(torch._C._dispatch_dump(name)):
                owners[owner_of(path)].add(name)
    owners.pop("", None)
    if not owners:
        section.add("ok", "foreign kernels", "none: all of ATen runs PyTorch's own")
    for owner, names in sorted(owners.items()):
        sample = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
        own = owner in ("torch", "torch._native", "plait")
        value = f"{len(names)} operators: {sample}"
        section.add("info" if own else "warn", owner, value, "" if own else "compare without it")
    section.facts["foreign"] = {owner: sorted(names) for owner, names in owners.items()}
    for name in _OPERATORS:
        table = torch._C._dispatch_dump_table(name)
        found = []
        for key in _KEYS:
            match = re.search(rf"^{key}: registered at (.*):\d+ \[", table, re.MULTILINE)
            found.append(f"{key}: {owner_of(match[1]) or 'ATen' if match else 'nothing'}")
        section.add("info", name, ", ".join(found))


def probe_virtual_ranks(section: Section) -> None:
    """A small ag_gemm on two virtual ranks of the CPU, with exact numbers."""
    torch = _torch(section)
    if torch is None:
        return
    try:
        import plait

        x = torch.arange(32.0).view(2, 2, 8)
        weight = torch.arange(32.0).view(4, 8) - 16
        parts = plait.run_virtual(
            lambda group: plait.ag_gemm(x[group.rank], weight, group=group, impl="fused"),
            2,
            device="cpu",
        )
        right = all(torch.equal(part, x.flatten(0, 1) @ weight.T) for part in parts)
        problem = "" if right else "a small ag_gemm gave a wrong result"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = one_line(error)
    section.facts["trial"] = problem
    section.add("warn" if problem else "ok", "ag_gemm, 2 ranks", problem or "right result")


__all__ = [
    "owner_of",
    "parse_topology",
    "probe_gpus",
    "probe_kernels",
    "probe_links",
    "probe_processes",
    "probe_virtual_ranks",
]
