"""Compile a `@triton.jit` kernel for an NVIDIA GPU without having one, and look at the result.

Registers, spills, shared memory and the order of instructions in the PTX are then facts a test can
hold on any machine. The signature is derived by Triton's own launcher code, so what is compiled is
what a launch with these values would compile.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

_WARP_SIZE = 32


@dataclass(frozen=True)
class Ptx:
    """PTX text with searches that read like the claims a test makes about it."""

    text: str

    def find(self, pattern: str, start: int = 0) -> int:
        """Line index of the first line at or after `start` that matches the regular expression
        `pattern`; -1 if there is none."""
        for index, line in enumerate(self.text.splitlines()):
            if index >= start and re.search(pattern, line):
                return index
        return -1

    def find_all(self, pattern: str) -> list[int]:
        """Line indices of all lines that match `pattern`."""
        return [i for i, line in enumerate(self.text.splitlines()) if re.search(pattern, line)]

    def count(self, pattern: str) -> int:
        """Number of lines that match `pattern`."""
        return len(self.find_all(pattern))

    def __contains__(self, pattern: str) -> bool:
        return self.find(pattern) >= 0


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel.

    Attributes:
        ptx: the PTX text.
        registers: registers of one thread.
        spill_bytes: bytes of one thread's registers kept in local memory (stores plus loads).
        shared_bytes: dynamic shared memory of one block.
        stack_bytes: stack of one thread; not 0 means spills or local arrays.
        num_warps: warps of one block.
    """

    ptx: Ptx
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int
    num_warps: int

    @property
    def registers_per_block(self) -> int:
        """Registers of one block; an SM of sm_70 to sm_100 has 65,536."""
        return self.registers * self.num_warps * _WARP_SIZE


def compile_for(
    kernel: Any,
    args: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int | None = None,
    launch_pdl: bool = False,
    arch: int = 90,
) -> Compiled:
    """Compile `kernel` for sm_<arch> as a launch with `args` would.

    Args:
        kernel: a `@triton.jit` function.
        args: parameter name -> example value, constexprs included. Tensors (CPU ones will do),
            TensorDescriptors, ints and floats are specialised as in a launch: divisibility of
            addresses and ints by 16, ints equal to 1. Parameters with defaults may be missing.

    Raises:
        TypeError: names that the kernel does not have, or parameters without a value.
    """
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": max_registers,
        "launch_pdl": launch_pdl or None,
    }
    function, backend, bound, specialization, options = _bind(kernel, args, options, arch)
    parsed, signature, constexprs, attrs = function._pack_args(
        backend, options, bound, specialization, options
    )
    source = ASTSource(function, signature, constexprs, attrs)
    target = GPUTarget("cuda", arch, _WARP_SIZE)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        ptx=Ptx(compiled.asm["ptx"]),
        registers=usage["REG"],
        spill_bytes=_local_memory_bytes(compiled.asm["cubin"]) if usage["STACK"] else 0,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=usage["STACK"],
        num_warps=num_warps,
    )


def kernel_class(
    kernel: Any,
    args: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    launch_pdl: bool = False,
) -> Hashable:
    """What a launch with `args` compiles; equal for launches that share a compiled kernel."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl or None}
    function, _, _, specialization, options = _bind(kernel, args, options, arch=90)
    return function.cache_key, str(specialization), str(options)


def _bind(
    kernel: Any, args: Mapping[str, Any], options: Mapping[str, Any], arch: int
) -> tuple[Any, ...]:
    """The function, the backend, and what Triton's launcher makes of arguments and options."""
    function, backend, bind = _binder(kernel, arch)
    _check_names(function, args)
    given = {name: value for name, value in options.items() if value is not None}
    return function, backend, *bind(**args, **given)


@lru_cache(maxsize=256)
def _binder(kernel: Any, arch: int) -> tuple[JITFunction, Any, Any]:
    """The function, the backend, and Triton's own binding of arguments, which it generates."""
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)
    backend = make_backend(GPUTarget("cuda", arch, _WARP_SIZE))
    bind = create_function_from_signature(function.signature, function.params, backend)
    return function, backend, bind


def _check_names(function: JITFunction, args: Mapping[str, Any]) -> None:
    parameters = function.signature.parameters
    unknown = sorted(set(args) - set(parameters))
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in args and parameter.default is inspect.Parameter.empty
    ]
    if unknown or missing:
        raise TypeError(
            f"{function.__name__}: unknown arguments {unknown}, missing arguments {missing}; "
            f"its parameters are {list(parameters)}"
        )


def _tool(name: str) -> str:
    return str(Path(triton.backends.nvidia.__file__).parent / "bin" / name)


def _inspect(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_tool(tool), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resource_usage(cubin: bytes) -> dict[str, int]:
    text = _inspect("cuobjdump", "--dump-resource-usage", cubin)
    return {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)\b", text)}


def _local_memory_bytes(cubin: bytes) -> int:
    """Bytes that the local-memory instructions of the machine code move, each counted once."""
    text = _inspect("nvdisasm", "--print-code", cubin)
    widths = re.findall(r"\b(?:STL|LDL)(?:\.LU|\.CI)*(?:\.(64|128))?\b", text)
    return sum(int(width or 32) // 8 for width in widths)


def assert_before(ptx: Ptx, *patterns: str) -> None:
    """Fail unless lines matching `patterns` (regular expressions) follow each other in this order.

    Each pattern is searched after the line the previous one matched. An in-order match of text is
    necessary, not sufficient, for an order in time across branches.
    """
    line = -1
    for position, pattern in enumerate(patterns):
        found = ptx.find(pattern, line + 1)
        if found < 0:
            after = f"line {line} ({patterns[position - 1]!r})" if position else "the start"
            anywhere = ptx.find_all(pattern)[:8] or "nowhere"
            raise AssertionError(f"no line matches {pattern!r} after {after}; matches: {anywhere}")
        line = found


__all__ = ["Compiled", "Ptx", "assert_before", "compile_for", "kernel_class"]
