"""Planned calls of `plait.matmul(impl="fused")`: a known signature costs a look-up and a launch.

A plan holds for x and weight of given shapes, strides, dtypes and 16-byte alignment, one weight, an
optional bias vector, an activation and no gradient; everything else takes the checked way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch._C._dynamo import guards

from plait.ops.matmul.configs import Config
from plait.ops.matmul.launch import plan_matmul
from plait.runtime.launcher import BoundLaunch

_MAX_PLANS = 1024

# A microsecond cheaper than Tensor.new_empty; it allocates on the current device.
_empty_strided: Any = getattr(guards, "_empty_strided_cuda", None)


class MatmulPlan:
    """The launches of one signature; `run` allocates the result and launches."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        config: Config,
        num_sms: int,
    ) -> None:
        self.config = config
        self.shape = (*x.shape[:-1], weight.shape[0])
        self.out_dtype = out_dtype
        out = x.new_empty(self.shape, dtype=out_dtype)
        self.strides = out.stride()
        flat_x, flat_out = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        program = plan_matmul(
            flat_x,
            [weight],
            [] if bias is None else [bias],
            flat_out,
            activation=activation,
            config=config,
            num_sms=num_sms,
        )
        launches = program.launches()
        self.parts = launches[0].args["parts_ptr"]
        self._gemm = BoundLaunch(launches[0])
        self._sum = BoundLaunch(launches[1]) if len(launches) > 1 else None

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """act(x @ weight^T + bias) on the current device and stream, which must be those of x."""
        out = _empty_strided(self.shape, self.strides, self.out_dtype)
        tensors = {"x": x, "w0": weight}
        if self._sum is None:
            tensors["out_ptr"] = out
            if bias is not None:
                tensors["bias0_ptr"] = bias
            self._gemm.run(tensors)
            return out
        assert self.parts is not None
        parts = torch.empty_like(self.parts)  # of this call alone: calls may overlap on streams
        tensors["parts_ptr"] = parts
        self._gemm.run(tensors)
        rest: dict[str, Any] = {"parts_ptr": parts, "out_ptr": out}
        if bias is not None:
            rest["bias_ptr"] = bias
        self._sum.run(rest)
        return out


_plans: OrderedDict[tuple[Any, ...], MatmulPlan] = OrderedDict()


def signature(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """What a plan depends on."""
    aligned = (x.data_ptr() | weight.data_ptr()) & 15 == 0
    bias_stride = None if bias is None else (bias.dtype, bias.stride(), bias.data_ptr() & 15 == 0)
    return (
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype, bias_stride,
        activation, out_dtype, x.device, aligned,
    )  # fmt: skip


def find_plan(key: tuple[Any, ...]) -> MatmulPlan | None:
    """The plan of a signature, if there is one."""
    return _plans.get(key)


def keep_plan(key: tuple[Any, ...], plan: MatmulPlan) -> None:
    """Remember a plan; the oldest go first."""
    _plans[key] = plan
    if len(_plans) > _MAX_PLANS:
        _plans.popitem(last=False)


__all__ = ["MatmulPlan", "find_plan", "keep_plan", "signature"]
