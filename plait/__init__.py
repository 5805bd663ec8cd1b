"""plait: tensor-parallel GEMMs with hidden communication, in PyTorch and Triton.

Public names are resolved when they are first used: importing plait imports neither torch nor
Triton, probes no hardware and reads no setting.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait import errors, settings
    from plait.collectives.all_gather import all_gather
    from plait.collectives.all_reduce import all_reduce
    from plait.collectives.all_to_all import all_to_all
    from plait.collectives.reduce_scatter import reduce_scatter
    from plait.ops.aten.explain import explain
    from plait.ops.aten.registration import disable, enable, uninstall, use
    from plait.ops.aten.report import report
    from plait.ops.aten.warmup import warmup
    from plait.ops.matmul.api import matmul
    from plait.ops.norm.residual import layer_norm, rms_norm
    from plait.overlap.ag_gemm.api import ag_gemm
    from plait.overlap.common.trace import trace
    from plait.overlap.gemm_ar.api import gemm_ar
    from plait.overlap.gemm_rs.api import gemm_rs
    from plait.runtime.record import last_run
    from plait.symm.group import Group
    from plait.testing.ranks import run_virtual

__version__ = "0.1.0"

# The name and the module it lives in; type checkers read the imports above, and a test compares.
_NAMES = {
    "Group": "plait.symm.group",
    "ag_gemm": "plait.overlap.ag_gemm.api",
    "all_gather": "plait.collectives.all_gather",
    "all_reduce": "plait.collectives.all_reduce",
    "all_to_all": "plait.collectives.all_to_all",
    "disable": "plait.ops.aten.registration",
    "enable": "plait.ops.aten.registration",
    "explain": "plait.ops.aten.explain",
    "gemm_ar": "plait.overlap.gemm_ar.api",
    "gemm_rs": "plait.overlap.gemm_rs.api",
    "last_run": "plait.runtime.record",
    "layer_norm": "plait.ops.norm.residual",
    "matmul": "plait.ops.matmul.api",
    "reduce_scatter": "plait.collectives.reduce_scatter",
    "report": "plait.ops.aten.report",
    "rms_norm": "plait.ops.norm.residual",
    "run_virtual": "plait.testing.ranks",
    "trace": "plait.overlap.common.trace",
    "uninstall": "plait.ops.aten.registration",
    "use": "plait.ops.aten.registration",
    "warmup": "plait.ops.aten.warmup",
}
_MODULES = ("errors", "settings")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"plait.{name}")
    else:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Group",
    "__version__",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "disable",
    "enable",
    "errors",
    "explain",
    "gemm_ar",
    "gemm_rs",
    "last_run",
    "layer_norm",
    "matmul",
    "reduce_scatter",
    "report",
    "rms_norm",
    "run_virtual",
    "settings",
    "trace",
    "uninstall",
    "use",
    "warmup",
]
