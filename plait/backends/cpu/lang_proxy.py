"""Triton's language, bound to a builder of ours, without touching the installed Triton.

A kernel's source is rewritten as Triton's own interpreter rewrites it and executed in a copy of its
module's namespace in which `tl` is a proxy. Only `tl.tensor`'s methods are patched on the class;
the patch passes calls that carry a `_semantic` (Triton compiling) through unchanged, so kernels can
be compiled and interpreted in one process and `TRITON_INTERPRET` is not needed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter as triton_interpreter

from plait.backends.cpu import combine

Rewrite = Callable[[ast.FunctionDef], ast.FunctionDef]
_LANG_PREFIX = "triton.language"


def is_kernel(value: Any) -> bool:
    """A `@triton.jit` function, whether compiled or interpreted by Triton."""
    return (
        hasattr(value, "fn")
        and hasattr(value, "arg_names")
        and callable(getattr(value, "fn", None))
    )


class _LangProxy:
    """Stands for a module of `triton.language`; attributes are bound on first use."""

    def __init__(self, module: types.ModuleType, bind: Binder) -> None:
        self._module = module
        self._bind = bind

    def __getattr__(self, name: str) -> Any:
        special = self._bind.special.get(name)
        value = special if special is not None else self._bind.value(getattr(self._module, name))
        self.__dict__[name] = value
        return value


class VirtualFunction:
    """A device function of a kernel, rewritten on first call."""

    def __init__(self, kernel: Any, bind: Binder) -> None:
        self.kernel = kernel
        self.bind = bind
        self.fn = kernel.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bind.function(self.kernel)(*args, **kwargs)


class Binder:
    """Turns kernels into Python functions over one semantic (one builder, one rewrite)."""

    def __init__(self, semantic: Any, rewrite: Rewrite | None = None) -> None:
        self.semantic = semantic
        self.rewrite = rewrite
        self.files: set[str] = set()
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._proxies: dict[str, _LangProxy] = {}
        self.special: dict[str, Any] = {
            "range": _python_range,
            "static_range": _python_range,
            "static_assert": _static_assert,
            "static_print": lambda *args, **kwargs: None,
            "reduce": combine.reduce,
            "associative_scan": combine.scan,
            "multiple_of": _hint,
            "max_contiguous": _hint,
            "max_constancy": _hint,
        }

    def value(self, value: Any) -> Any:
        """What a global of a kernel's module becomes inside the virtual function."""
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith(_LANG_PREFIX):
                if value.__name__ not in self._proxies:
                    self._proxies[value.__name__] = _LangProxy(value, self)
                return self._proxies[value.__name__]
            return value
        if isinstance(value, tl.constexpr):
            return value.value
        if is_kernel(value):
            return VirtualFunction(value, self)
        if core.is_builtin(value) and not isinstance(value, type):
            return self._builtin(value)
        return value

    def _builtin(self, member: Callable[..., Any]) -> Callable[..., Any]:
        semantic = self.semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def function(self, kernel: Any) -> Callable[..., Any]:
        """The rewritten Python function of a kernel or device function."""
        found = self._functions.get(kernel.fn)
        if found is None:
            found = self._functions[kernel.fn] = self._build(kernel)
        return found

    def _build(self, kernel: Any) -> Callable[..., Any]:
        fn = kernel.fn
        # The source as it was imported, if Triton kept it: the file may have been edited since.
        lines = getattr(kernel, "raw_src", None)
        first_line = getattr(kernel, "starting_line_number", 1)
        if lines is None:
            lines, first_line = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        definition = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        definition.decorator_list = []
        if self.rewrite is not None:
            definition = self.rewrite(definition)
        definition = triton_interpreter.ASTTransformer().visit(definition)
        module = ast.Module(body=[definition], type_ignores=[])
        ast.fix_missing_locations(module)
        ast.increment_lineno(module, first_line - 1)
        filename = inspect.getsourcefile(fn) or "<kernel>"
        self.files.add(filename)
        namespace = dict(fn.__globals__)
        for name in {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}:
            if name in namespace:
                namespace[name] = self.value(namespace[name])
        namespace["interpreter_semantic"] = self.semantic
        local: dict[str, Any] = {}
        exec(compile(module, filename, "exec"), namespace, local)
        return local[definition.name]

    def argument(self, value: Any) -> Any:
        """A launch argument as the interpreter's value (pointers, ints, descriptors, tuples)."""
        if isinstance(value, bool):
            return _scalar(int(value), tl.int1, np.bool_)
        if isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            return _scalar(value, tl.int64 if wide else tl.int32, np.int64 if wide else np.int32)
        if isinstance(value, float):
            return _scalar(value, tl.float32, np.float32)
        if hasattr(value, "block_shape") and hasattr(value, "base"):
            return self._descriptor(value)
        if hasattr(value, "data_ptr"):
            type_ = tl.str_to_ty(triton_interpreter.triton.runtime.jit.mangle_type(value), None)
            return _scalar(value.data_ptr(), type_, np.uint64)
        if isinstance(value, tuple):
            return triton_interpreter._tuple_create(value, map(self.argument, value))
        return value

    def _descriptor(self, desc: Any) -> Any:
        strides = [self.argument(int(stride)) for stride in desc.strides]
        strides[-1] = tl.constexpr(1)
        return self.semantic.make_tensor_descriptor(
            base=self.argument(desc.base),
            shape=[self.argument(int(size)) for size in desc.shape],
            strides=strides,
            block_shape=[tl.constexpr(size) for size in desc.block_shape],
            padding_option=desc.padding,
        )


def _scalar(value: Any, type_: Any, dtype: Any) -> tl.tensor:
    return tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=dtype), type_), type_)


def constexpr_names(fn: Callable[..., Any]) -> set[str]:
    """Parameters annotated `tl.constexpr`, also where annotations are strings."""
    return {name for name, hint in fn.__annotations__.items() if "constexpr" in str(hint)}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _python_range(first: Any, second: Any = None, step: Any = None, **_: Any) -> range:
    start, end = (0, first) if second is None else (first, second)
    return range(_plain(start), _plain(end), 1 if step is None else _plain(step))


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _hint(value: Any, _values: Any) -> Any:
    return value


# --- the methods of tl.tensor, patched once and inert for Triton's compiler

_patch_lock = threading.Lock()
_default_semantic: list[Any] = []


def install_tensor_methods(semantic: Any) -> None:
    """Let methods of `tl.tensor` called without `_semantic` use this one. Idempotent."""
    with _patch_lock:
        if not _default_semantic:
            for owner in (core.tensor, core.tensor_descriptor_base):
                for name, member in inspect.getmembers(owner):
                    if core.is_builtin(member):
                        setattr(owner, name, _dispatching(member))
            _patch_conversions()
            _default_semantic.append(semantic)
        _default_semantic[0] = semantic


def exchange_tensor_methods(semantic: Any) -> Any:
    """Let those methods use this semantic (None: the first to be installed); returns the last."""
    before = _default_semantic[0] if _default_semantic else None
    if semantic is not None and _default_semantic:
        _default_semantic[0] = semantic
    return before


def _dispatching(member: Callable[..., Any]) -> Callable[..., Any]:
    # Triton's compiler passes its `_semantic` only if the signature shows that parameter.
    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_semantic") is None:
            kwargs["_semantic"] = _default_semantic[0]
        return member(*args, **kwargs)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


def _interpreted(value: Any) -> bool:
    return isinstance(value.handle, triton_interpreter.TensorHandle)


def _patch_conversions() -> None:
    original_to_ir = core.dtype.to_ir

    def to_ir(self: Any, builder: Any) -> Any:
        if isinstance(builder, triton_interpreter.InterpreterBuilder):
            return _signed_type(self, builder)
        return original_to_ir(self, builder)

    def as_bool(self: Any) -> bool:
        if not _interpreted(self) or self.handle.data.size != 1:
            return True
        return bool(self.handle.data.reshape(-1)[0])

    def as_index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def transposed(self: Any) -> Any:
        shape = list(self.type.shape)
        shape[-1], shape[-2] = shape[-2], shape[-1]
        handle = triton_interpreter.TensorHandle(np.transpose(self.handle.data), self.handle.dtype)
        return core.tensor(handle, core.block_type(self.dtype, shape))

    core.dtype.to_ir = to_ir
    for name, value in (
        ("__bool__", as_bool),
        ("__index__", as_index),
        ("T", property(transposed)),
    ):
        setattr(core.tensor, name, value)


def _signed_type(dtype: Any, builder: Any) -> Any:
    getters = {"fp16": "half", "bf16": "bf16", "fp32": "float", "fp64": "double"}
    return getattr(builder, f"get_{getters.get(dtype.name, dtype.name)}_ty")()


__all__ = [
    "Binder",
    "Rewrite",
    "constexpr_names",
    "exchange_tensor_methods",
    "install_tensor_methods",
    "is_kernel",
]
