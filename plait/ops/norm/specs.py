"""Operators of the norm engine."""

from __future__ import annotations

from plait.ops.aten.spec import OpSpec
from plait.ops.norm.batch_norm import SPECS as BATCH_NORM
from plait.ops.norm.batch_norm_backward import SPECS as BATCH_NORM_BACKWARD
from plait.ops.norm.group_norm import SPECS as GROUP_NORM
from plait.ops.norm.layer_norm import SPECS as LAYER_NORM
from plait.ops.norm.loss_nll import SPECS as NLL_LOSS
from plait.ops.norm.loss_specs import SPECS as LOSS
from plait.ops.norm.rms_norm import SPECS as RMS_NORM
from plait.ops.norm.softmax import SPECS as SOFTMAX
from plait.ops.norm.softmax_backward import SPECS as SOFTMAX_BACKWARD
from plait.ops.norm.weight_norm import SPECS as WEIGHT_NORM

SPECS: tuple[OpSpec, ...] = (
    *BATCH_NORM,
    *BATCH_NORM_BACKWARD,
    *GROUP_NORM,
    *LAYER_NORM,
    *LOSS,
    *NLL_LOSS,
    *RMS_NORM,
    *SOFTMAX,
    *SOFTMAX_BACKWARD,
    *WEIGHT_NORM,
)

__all__ = ["SPECS"]
