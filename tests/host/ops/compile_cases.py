"""Calls whose launches test_compile.py compiles beside those of the operator database.

The database's tensors are small, so `large` takes shapes of models; `direct` names overloads that
only a GPU's functions call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

_ROWS = ((512, 4096), (8, 131072), (65536, 48))  # of the last dim; one block, several, many


def large(dtype: torch.dtype) -> list[Any]:
    """Functions of no arguments; each returns a tensor to run backward from."""
    found = []
    for shape in _ROWS:
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        w = torch.randn(shape[-1:], dtype=dtype, requires_grad=True)
        for dim in (0, 1):
            found += [
                lambda x=x, dim=dim, f=f: f(x, dim)
                for f in (
                    torch.softmax,
                    torch.log_softmax,
                    torch.sum,
                    torch.mean,
                    torch.prod,
                    torch.var,
                    torch.std,
                    torch.amax,
                    torch.logsumexp,
                    torch.linalg.vector_norm,
                    torch.cumsum,
                    torch.cumprod,
                    torch.logcumsumexp,
                    lambda x, dim: torch.max(x, dim)[0],
                    lambda x, dim: torch.cummax(x, dim)[0],
                    lambda x, dim: torch.var_mean(x, dim)[0],
                    lambda x, dim: torch.argmax(x, dim).float(),
                )
            ]
        found += [
            lambda x=x: x.sum(),
            lambda x=x: torch.linalg.vector_norm(x),
            lambda x=x: x.mT.sum(0),
            lambda x=x, w=w: F.layer_norm(x, w.shape, w, w),
            lambda x=x: F.layer_norm(x, x.shape[-1:]),
            lambda x=x: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1]),
            lambda x=x: F.mse_loss(x, x.detach()),
        ]
    for shape in ((16, 64, 56, 56), (2, 64, 3), (2, 512, 48, 48)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        w = torch.randn(shape[1], dtype=dtype, requires_grad=True)
        found += [
            lambda x=x, w=w: F.batch_norm(x, None, None, w, w, training=True),
            lambda x=x, w=w: F.instance_norm(x, weight=w, bias=w),
            lambda x=x, w=w: F.group_norm(x, 8, w, w),
            lambda x=x: x.sum(1),
            lambda x=x: torch.softmax(x, 1),
        ]
        if x.dim() == 4:
            y = x.detach().to(memory_format=torch.channels_last).requires_grad_()
            found += [
                lambda y=y, w=w: F.batch_norm(y, None, None, w, w, training=True),
                lambda y=y, w=w: F.group_norm(y, 8, w, w),
            ]
    return found


def direct(dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    """Keys with arguments."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for shape in ((6, 64), *_ROWS):
        x, row = torch.randn(shape, dtype=dtype), torch.ones(shape[1], dtype=dtype)
        rstd = torch.ones((shape[0], 1), dtype=torch.float32)
        g = torch.ones((shape[0], 1), dtype=dtype)
        norms = g.float() if dtype is torch.bfloat16 else g
        found += [
            ("_fused_rms_norm", (x, [shape[1]], row, 1e-5)),
            ("_fused_rms_norm_backward", (x, x, [shape[1]], rstd, row, [True, True])),
            ("_weight_norm_interface", (x, g, 0)),
            ("_weight_norm_interface_backward", (x, x, g, norms, 0)),
        ]
    for shape in ((2, 8, 5, 5), (16, 64, 56, 56)):
        x = torch.randn(shape, dtype=dtype)
        w = torch.ones(shape[1], dtype=torch.float32)
        reserve = torch.empty(0, dtype=torch.uint8)
        found += [
            ("cudnn_batch_norm", (x, w, w, w, w, False, 0.1, 1e-5)),
            ("cudnn_batch_norm_backward", (x, x, w, w, w, w, w, 1e-5, reserve)),
        ]
    return found


__all__ = ["direct", "large"]
