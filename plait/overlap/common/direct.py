"""Calls past PyTorch's dispatcher, where it would do nothing but cost the host some 10 us.

An operator's implementation may be called directly when nobody listens in: no compiler or tracer,
no mode, functorch transform or tensor subclass, no profiler. Gradients are the caller's matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_C: Any = torch._C


def nobody_listens(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether an operator on these tensors would reach its implementation unchanged.

    Call it where gradients are off or not needed: in autograd's own forward, or without any
    `requires_grad`. Meta tensors are for the operator's shape inference.
    """
    if torch.compiler.is_compiling():
        return False
    if (
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._is_tracing()
        or _C._autograd._profiler_enabled()
    ):
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return False
    return True


def needs_grad(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether autograd would record an operator on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


__all__ = ["needs_grad", "nobody_listens"]
