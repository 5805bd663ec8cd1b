"""Registers every overlapped operator with PyTorch: gradients of one call the others by name."""

from plait.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401
from plait.overlap.ag_gemm import ops as _ag_gemm  # noqa: F401
from plait.overlap.gemm_ar import ops as _gemm_ar  # noqa: F401
from plait.overlap.gemm_rs import ops as _gemm_rs  # noqa: F401
