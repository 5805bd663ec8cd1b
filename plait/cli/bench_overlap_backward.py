"""What `plait bench ag_gemm|gemm_rs --backward` runs: one rank's backward pass.

The backward of AG+GEMM is a GEMM+RS of the result's gradient beside which x is gathered again, then
a plain product for the weight's gradient; that of GEMM+RS is an AG+GEMM of the result's gradient,
whose gathered rows a plain product uses. So each is a case of the other operator, and more.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.cli.bench_overlap_cases import Case
from plait.errors import ArgumentError
from plait.model.problem import Operator, Problem
from plait.symm.group import Group

_MIRRORED: dict[str, Operator] = {"ag_gemm": "gemm_rs", "gemm_rs": "ag_gemm"}


def check_backward(operator: str) -> None:
    """ArgumentError unless the operator's backward overlaps anything."""
    if operator not in _MIRRORED:
        remedy = "The backward of gemm_ar is an AllReduce and two plain products."
        raise ArgumentError("--backward", " or ".join(_MIRRORED), operator, remedy)


def mirrored(problem: Problem) -> Problem:
    """The product that gives the gradient of x: the other operator, N and K exchanged."""
    check_backward(problem.operator)
    operator = _MIRRORED[problem.operator]
    return Problem(
        operator, problem.M, problem.K, problem.N, problem.world_size, problem.dtype_bytes
    )


class BackwardCase(Case):
    """The backward of `forward`, one rank's part; `problem` is the mirrored one.

    x is the gradient of the result and `weight` the transposed view of the forward's. `saved` is
    the forward's x: [rows, K] for ag_gemm, [M, K] of this rank for gemm_rs. The weight's gradient
    is left^T @ right with `left` [M, N] the gradient and `right` [M, K] the x of all rows.
    """

    def __init__(self, forward: Problem, dtype: torch.dtype, group: Group, emulated: bool) -> None:
        super().__init__(mirrored(forward), dtype, group, emulated)
        self.forward = forward
        self.weight = self.weight.t().contiguous().t()
        M, _, K = forward.local_shape
        scatters = self.problem.operator == "gemm_rs"
        rows = forward.rows_per_rank[group.rank]
        self.saved = self.normal(rows if scatters else M, K)
        self.right = self.normal(M, K) if scatters else self.saved
        self.product_for_weight = torch.empty_like(self.weight.t())
        self.weight_gradient: torch.Tensor | None = None  # of the last call

    # --- contestants
    def overlapped(self, impl: str, return_gathered: bool = False) -> Any:
        """The gradient of x, and on the way that of the weight; as the operator's backward does."""
        from plait.overlap.common.gradients import weight_gradient

        out, gathered = self._gradient_of_x(impl)
        if self.problem.operator == "gemm_rs":
            left, right = self.x, gathered
        else:
            left, right = gathered, self.saved
        self.weight_gradient = weight_gradient(left, right, None)
        return (out, gathered) if return_gathered else out

    def _gradient_of_x(self, impl: str) -> list[torch.Tensor]:
        """[the gradient, what was gathered beside it]."""
        from plait.overlap import register as _register  # noqa: F401 - the operators

        name, sizes, dtype = self.group.name, list(self.problem.rows_per_rank), self.dtype
        if self.problem.operator == "gemm_rs":
            return torch.ops.plait.gemm_rs(
                self.x, self.weight, None, name, 0, sizes, dtype, dtype, impl, self.saved
            )
        return torch.ops.plait.ag_gemm(
            self.x, [self.weight], [], name, 0, sizes, "none", dtype, impl, True, False
        )

    def transfer(self) -> None:
        """The gather and, for ag_gemm, the reduce-scatter."""
        self._gradient_of_x("fused")

    def communicate(self) -> None:
        """As for the forward; among real ranks a gather of x besides the reduce-scatter."""
        if not self.emulated and self.problem.operator == "gemm_rs":
            import torch.distributed as dist

            dist.all_gather_into_tensor(self.right, self.saved)
        super().communicate()

    def torch_gemm(self) -> None:
        """Both products by the library."""
        super().torch_gemm()
        self._weight_product()

    def plait_gemm(self) -> None:
        """The product for x by plait, that for the weight by the library, as the fused call."""
        super().plait_gemm()
        self._weight_product()

    def _weight_product(self) -> None:
        torch.matmul(self.gathered.t(), self.right, out=self.product_for_weight)

    # --- check
    def check(self) -> str:
        """As for the forward, and what was gathered beside a reduce-scatter.

        The weight's gradient is the library's product of what is checked.
        """
        wrong = super().check()
        if wrong or self.problem.operator == "ag_gemm":
            return wrong
        _, gathered = self.overlapped("fused", return_gathered=True)
        self.group.synchronize()
        return self._check_gathered(gathered, self.saved)


__all__ = ["BackwardCase", "check_backward", "mirrored"]
