"""What is predicted: an operator's sizes, its link and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import ArgumentError
from plait.schedules.partition import split_rows

Operator = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
OPERATORS: tuple[str, ...] = get_args(Operator)


@dataclass(frozen=True)
class Problem:
    """One call. M, N and K are those of the whole product x [M, K] @ weight [N, K]^T.

    ag_gemm: x is shared out by rows, the weight by N. gemm_rs and gemm_ar: both by K. Rows are
    shared out as equally as possible. Predictions are those of a rank that waits longest: the last
    one for ag_gemm, which receives most, the first one otherwise, which adds most.

    `travel_bytes`: of an element that travels, where it has another dtype; 0: `dtype_bytes`.
    """

    operator: Operator
    M: int
    N: int
    K: int
    world_size: int
    dtype_bytes: int = 2
    travel_bytes: int = 0

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise ArgumentError("operator", f"one of {', '.join(OPERATORS)}", repr(self.operator))
        sizes = (self.M, self.N, self.K, self.world_size, self.dtype_bytes, self.travel_bytes + 1)
        if min(sizes) < 1:
            got = f"{self.shape_text}, {self.world_size} ranks, {self.dtype_bytes} bytes"
            raise ArgumentError("shape", "M, N, K, ranks and bytes above 0", got)
        name, size = ("N", self.N) if self.operator == "ag_gemm" else ("K", self.K)
        if size % self.world_size:
            raise ArgumentError(
                name,
                f"a multiple of the {self.world_size} ranks",
                size,
                f"Sizes are those of all ranks together: {self.operator} divides {name} by them.",
            )

    @property
    def shape_text(self) -> str:
        """Such as `4096 49152 12288`."""
        return f"{self.M} {self.N} {self.K}"

    @property
    def local_shape(self) -> tuple[int, int, int]:
        """(M, N, K) of the product that one rank computes."""
        if self.operator == "ag_gemm":
            return self.M, self.N // self.world_size, self.K
        return self.M, self.N, self.K // self.world_size

    @property
    def rows_per_rank(self) -> tuple[int, ...]:
        """Rows of x (ag_gemm) or of the result that each rank has."""
        return split_rows(self.M, self.world_size)

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows in the order in which they arrive (ag_gemm) or are sent, the own ones first."""
        rows = self.rows_per_rank
        return rows[::-1] if self.operator == "ag_gemm" else rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that travels: of x for ag_gemm, of the result otherwise."""
        elements = self.K if self.operator == "ag_gemm" else self.N
        return elements * (self.travel_bytes or self.dtype_bytes)

    @property
    def flops(self) -> int:
        """Multiplications and additions on one rank."""
        M, N, K = self.local_shape
        return 2 * M * N * K

    @property
    def product_bytes(self) -> int:
        """Operands and result of one rank's product."""
        M, N, K = self.local_shape
        return (M * K + N * K + M * N) * self.dtype_bytes


@dataclass(frozen=True)
class Link:
    """What a rank sends through: `bandwidth_gb_s` (10^9 bytes a second, one way, to all peers
    together), `latency_us` from the last byte to its signal, `chunk_us` for each chunk's copy."""

    bandwidth_gb_s: float
    latency_us: float = 3.0
    chunk_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_s > 0 or min(self.latency_us, self.chunk_us) < 0:
            raise ArgumentError("link", "GB/s above 0 and times from 0 on", repr(self))

    def transfer_us(self, nbytes: float) -> float:
        """Time of one chunk of `nbytes` on the link, without the latency."""
        return self.chunk_us + nbytes / self.bandwidth_gb_s / 1e3 if nbytes else 0.0


@dataclass(frozen=True)
class Plan:
    """How a call is cut: GEMM tiles, and `chunks` signals for each rank's rows."""

    block_m: int
    block_n: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.chunks} chunks"


__all__ = ["OPERATORS", "Link", "Operator", "Plan", "Problem"]
