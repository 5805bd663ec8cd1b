"""Norms on given operands: plait's operator against ATen's, bounded by ATen's error against fp64.

Host and GPU tests call the same functions. `_fused_rms_norm` has no kernel of its own on the CPU:
there its operator is run without the dispatcher and compared with its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import plait
from plait.ops.aten import dispatch, spec
from plait.ops.aten.originals import why_not
from plait.ops.engine.signature import Schema
from plait.testing.compare import assert_close_to_fp64

ATEN = torch.ops.aten


def ours(key: str, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """Results of plait's operator for ATen's `key`; fails if it declines."""
    device = next(each.device for each in args if isinstance(each, torch.Tensor))
    if not why_not(key, device.type.upper()):
        with plait.use(f"{key}.default", device=device), plait.report() as report:
            found = _overload(key)(*args)
        assert report.served == 1, str(report)
        return found
    spec.load_catalog()
    schema = Schema(_overload(key))
    call, reason = dispatch.compute(spec.find(key), schema, schema.bind(args, {}))
    assert call is not None, reason
    call.run()
    return tuple(call.results)


def plain(key: str, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """Results of ATen, or of the reference where ATen has no kernel."""
    device = next(each.device for each in args if isinstance(each, torch.Tensor))
    if not why_not(key, device.type.upper()):
        return _overload(key)(*args)
    given = args[0]
    found = spec.find(key).reference(*args)
    return tuple(
        None if each is None else torch.empty_strided(
            each.shape, torch.empty(each.shape, device="meta").stride(), device=device,
            dtype=_stats_dtype(given) if _is_rstd(key, index) else given.dtype,
        ).copy_(each)
        for index, each in enumerate(found)
    )  # fmt: skip


def compare(key: str, *args: Any, skip: Sequence[int] = ()) -> tuple[torch.Tensor | None, ...]:
    """ATen's results; fails if plait's differ in form, or in values by more than is allowed.

    Values of results `skip` are not looked at. Operands that ATen writes are compared, too.
    """
    copies = [[_copy(each) for each in args] for _ in range(2)]
    spec.load_catalog()
    exact_args = [_wide(_copy(each)) for each in args]
    expected = plain(key, *copies[0])
    exact = spec.find(key).reference(*exact_args)
    got = ours(key, *copies[1])
    for index, (a, b, wide) in enumerate(zip(got, expected, exact, strict=True)):
        assert (a is None) == (b is None), f"{key} result {index}: {a} instead of {b}"
        if a is None:
            continue
        form = (a.dtype, a.shape, a.stride())
        assert form == (b.dtype, b.shape, b.stride()), f"{key} result {index}"
        if index not in skip and a.numel():
            share = _share(a, args[0], wide)
            assert_close_to_fp64(a, wide, b, f"{key} result {index}", plain_error_share=share)
    for index, (a, b, wide) in enumerate(zip(copies[1], copies[0], exact_args, strict=True)):
        if isinstance(a, torch.Tensor):
            share = _share(a, args[0], wide)
            assert_close_to_fp64(a, wide, b, f"{key} operand {index}", plain_error_share=share)
    return expected


def _share(result: torch.Tensor, given: torch.Tensor, wide: torch.Tensor) -> float:
    """Roundings of the operands in the accumulator's dtype, more where a result is a sum of many:
    ATen may be exact by chance, and results near 0 err as their parts do."""
    largest = float(wide.detach().abs().max()) if wide.numel() else 0.0
    if not largest or not given.numel():
        return 0.0
    terms = max(given.numel() / result.numel(), 1)
    scale = max(float(given.detach().abs().max()), largest)
    return torch.finfo(_stats_dtype(given)).eps * terms**0.5 * scale / largest


def _overload(key: str) -> Any:
    return getattr(ATEN, key).default


def _copy(value: Any) -> Any:
    """With memory of its own, laid out alike."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    storage = value.untyped_storage().clone()
    return made.set_(storage, value.storage_offset(), value.shape, value.stride())


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def _stats_dtype(given: torch.Tensor) -> torch.dtype:
    return torch.float64 if given.dtype == torch.float64 else torch.float32


def _is_rstd(key: str, index: int) -> bool:
    return key == "_fused_rms_norm" and index == 1


# --- forward and backward of each norm
def random(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_dims: int = 1,
    dy: torch.Tensor | None = None,
) -> None:
    """Layer norm over the last `num_dims` dims, and root-mean-square norm with the same weight."""
    shape = list(x.shape[x.dim() - num_dims :])
    dy = torch.randn_like(x) if dy is None else dy
    _, mean, rstd = compare("native_layer_norm", x, shape, weight, bias, 1e-5)
    mask = [True, weight is not None, bias is not None]
    compare("native_layer_norm_backward", dy, x, shape, mean, rstd, weight, bias, mask)
    if weight is None or weight.dtype == x.dtype:
        _, rstd = compare("_fused_rms_norm", x, shape, weight, 1e-6)
        compare("_fused_rms_norm_backward", dy, x, shape, rstd, weight, mask[:2])


def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """Group norm."""
    sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), groups)
    _, mean, rstd = compare("native_group_norm", x, weight, bias, *sizes, 1e-5)
    mask = [True, weight is not None, weight is not None]
    dy = torch.randn_like(x)
    compare("native_group_norm_backward", dy, x, mean, rstd, weight, *sizes, mask)


def batch_norm(x: torch.Tensor, dtype: torch.dtype, *, training: bool) -> None:
    """Batch norm with parameters of `dtype`."""
    weight, bias, mean = (
        random(x.shape[1], dtype=dtype, device=x.device) + number for number in range(3)
    )
    var = mean.abs() + 0.5
    given = (weight, bias, mean, var)
    skip = () if training or x.is_cuda else (1, 2)  # the CPU saves nothing in evaluation
    _, *saved = compare("native_batch_norm", x, *given, training, 0.1, 1e-5, skip=skip)
    dy = torch.randn_like(x)
    compare(
        "native_batch_norm_backward", dy, x, weight, mean, var, *saved, training, 1e-5, [True] * 3
    )


def weight_norm(v: torch.Tensor, dim: int) -> None:
    """Weight norm over all dims but `dim`."""
    shape = [n if d == dim else 1 for d, n in enumerate(v.shape)]
    g = random(*shape, dtype=v.dtype, device=v.device)
    _, norms = compare("_weight_norm_interface", v, g, dim)
    compare("_weight_norm_interface_backward", torch.randn_like(v), v, g, norms, dim)


__all__ = [
    "batch_norm",
    "compare",
    "group_norm",
    "layer_norm",
    "ours",
    "plain",
    "random",
    "weight_norm",
]
