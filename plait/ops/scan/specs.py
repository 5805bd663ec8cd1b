"""Operators of the scan engine."""

from __future__ import annotations

from plait.ops.aten.spec import OpSpec

SPECS: tuple[OpSpec, ...] = ()

__all__ = ["SPECS"]
