"""One matrix product to measure: its operands, torch's call for it, and plait's program.

Shapes: x [M, K] or [B, M, K], weight [N, K] or [B, N, K], out [M, N] or [B, M, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from plait.backends.commands import Program
from plait.errors import ArgumentError
from plait.ops.matmul.configs import Config
from plait.ops.matmul.launch import Scaling, plan_matmul
from plait.ops.matmul.operands import FP8_DTYPES, dot_precision
from plait.ops.matmul.product import Product
from plait.ops.matmul.tuned import tuning_key

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3": torch.float8_e4m3fn,
}
_SHORT = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
}
_OUT_DTYPES = {torch.float8_e4m3fn: torch.bfloat16}  # what torch._scaled_mm rounds to here

# Both sides round once, or add in another order: in bf16 two right results differ by 2e-3 or less.
_LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
_LIMIT_TF32 = 3e-3  # torch rounds operands to tf32, the tensor cores cut them off
_LIMIT_FAST_FP8 = 2e-2  # the short accumulator of the tensor cores keeps 14 bits
_LARGEST = 16.0  # and no single element by more than this many limits, in units of the rms


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16" or "bf16"; ArgumentError lists the names."""
    full = _SHORT.get(name, name)
    if full not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join((*DTYPES, *_SHORT))}", repr(name))
    return DTYPES[full]


@dataclass(frozen=True)
class Problem:
    """A product's sizes and what its kernel depends on besides.

    `layout`: the weight lies in memory as [N, K] or [K, N]; `batch` 0 means no batch dim; `scales`
    are those of fp8: "tensor" (one number a tensor) or "rows" (one a row of x and of the weight).
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: Literal["nk", "kn"] = "nk"
    scales: Literal["none", "tensor", "rows"] = "none"
    batch: int = 0
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if min(self.M, self.N, self.K) < 1 or self.batch < 0:
            raise ArgumentError("shape", "M, N and K above 0", self.shape_text)
        if (self.dtype in FP8_DTYPES) == (self.scales == "none"):
            expected = "'tensor' or 'rows' for fp8, else 'none'"
            raise ArgumentError("scales", expected, f"{self.scales!r} with {self.dtype}")
        if self.fast_accum and self.dtype not in FP8_DTYPES:
            raise ArgumentError("fast_accum", "fp8 operands", self.dtype, "Leave it out.")
        if self.dtype in FP8_DTYPES and (self.batch or self.layout == "kn"):
            got = f"batch={self.batch}, layout={self.layout!r}"
            remedy = "torch._scaled_mm, the baseline, has neither."
            raise ArgumentError("shape", "no batch and layout 'nk' for fp8", got, remedy)

    @property
    def shape_text(self) -> str:
        """Such as `4096 12288 6144`, with `8 x` before it for a batch."""
        text = f"{self.M} {self.N} {self.K}"
        return f"{self.batch} x {text}" if self.batch else text

    @property
    def precision(self) -> str:
        """`input_precision` of the products, by PyTorch's flag."""
        return dot_precision(self.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result on both sides."""
        return _OUT_DTYPES.get(self.dtype, self.dtype)

    @property
    def key(self) -> dict[str, Any]:
        """What names the problem in a tuning table, besides its sizes."""
        return tuning_key(
            self.dtype, precision=self.precision, layout=self.layout, scales=self.scales,
            fast_accum=self.fast_accum, batch=self.batch,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * max(self.batch, 1) * self.M * self.N * self.K

    @property
    def bytes_moved(self) -> int:
        """Each operand read once, the result written once."""
        read = (self.M + self.N) * self.K * self.dtype.itemsize
        return max(self.batch, 1) * (read + self.M * self.N * self.out_dtype.itemsize)

    @property
    def baseline(self) -> str:
        """The call that `Operands.baseline` makes."""
        if self.dtype in FP8_DTYPES:
            return f"torch._scaled_mm(use_fast_accum={self.fast_accum})"
        return "torch.bmm" if self.batch else "torch.matmul"

    @property
    def error_limit(self) -> float:
        """Largest relative error against the baseline that rounding explains."""
        if self.precision == "tf32":
            return _LIMIT_TF32
        if self.fast_accum:
            return _LIMIT_FAST_FP8
        longer = math.sqrt(max(1.0, self.K / 4096)) if self.dtype is torch.float32 else 1.0
        return _LIMITS[self.out_dtype] * longer


@dataclass(frozen=True)
class Operands:
    """The tensors of a problem. `baseline()` leaves its result in `expected`."""

    problem: Problem
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    expected: torch.Tensor
    scaling: Scaling | None

    def baseline(self) -> None:
        """Enqueue torch's call for the same product."""
        if self.scaling is not None:
            wide = self.scaling.x.numel() > 1 or self.scaling.weight.numel() > 1
            scale_x, scale_weight = self.scaling.x, self.scaling.weight
            torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                self.x,
                self.weight.t(),
                scale_x[:, None] if wide else scale_x,
                scale_weight[None, :] if wide else scale_weight,
                out_dtype=self.expected.dtype,
                use_fast_accum=self.problem.fast_accum,
                out=self.expected,
            )
        else:
            torch.matmul(self.x, self.weight.mT, out=self.expected)

    def product(self) -> Product:
        """The flat product as `plait.matmul` would see it."""
        return Product(
            self.x,
            (self.weight,),
            (),
            "none",
            self.out.dtype,
            scalings=() if self.scaling is None else (self.scaling,),
            fast_accum=self.problem.fast_accum,
        )

    def program(self, config: Config, num_sms: int) -> Program:
        """plait's program, which writes `out`."""
        return plan_matmul(
            self.x,
            [self.weight],
            [],
            self.out,
            activation="none",
            config=config,
            num_sms=num_sms,
            precision=self.problem.precision,
            scaling=self.scaling,
            fast_accum=self.problem.fast_accum,
        )

    def error_of(self, run: Callable[[], object]) -> float:
        """Relative error of what `run()` writes to `out`, against `expected`; inf for NaN.

        It is the larger of the relative error in the 2-norm and of the largest difference of one
        element, in units of 16 rms. `out` is NaN before, so nothing of an earlier result counts.
        """
        self.out.fill_(math.nan)
        run()
        expected = self.expected.float()
        difference = (self.out.float() - expected).flatten()
        norm = torch.linalg.vector_norm(expected.flatten())
        rms = norm / math.sqrt(expected.numel())
        largest = difference.abs().max() / (_LARGEST * rms)
        error = float(torch.maximum(torch.linalg.vector_norm(difference) / norm, largest))
        return math.inf if math.isnan(error) else error


def make_operands(problem: Problem, device: torch.device) -> Operands:
    """Random normal operands (on the meta device: shapes only); results of fp8 are near 1."""
    batch = (problem.batch,) if problem.batch else ()
    x = _random((*batch, problem.M, problem.K), problem.dtype, device)
    if problem.layout == "kn":
        weight = _random((*batch, problem.K, problem.N), problem.dtype, device).mT
    else:
        weight = _random((*batch, problem.N, problem.K), problem.dtype, device)
    shape = (*batch, problem.M, problem.N)
    out, expected = (torch.empty(shape, dtype=problem.out_dtype, device=device) for _ in range(2))
    scaling = None
    if problem.scales != "none":
        by_row = problem.scales == "rows"
        sizes = (problem.M, problem.N) if by_row else (1, 1)
        # A factor of 4 between rows: a kernel that ignored a scale would be caught.
        scales = [torch.rand(size, device=device) * 0.75 + 0.25 for size in sizes]
        scales[1] = scales[1] / math.sqrt(problem.K)
        scaling = Scaling("rows", *scales)
    return Operands(problem, x, weight, out, expected, scaling)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype in FP8_DTYPES:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


__all__ = ["DTYPES", "Operands", "Problem", "make_operands", "parse_dtype"]
