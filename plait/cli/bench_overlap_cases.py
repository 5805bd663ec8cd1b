"""What `plait bench ag_gemm|gemm_rs|gemm_ar` runs: one rank's operands, contestants and check."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.backends.commands import Launch, Program
from plait.model.problem import Problem
from plait.symm.group import Group
from plait.symm.workspace import NUM_REGIONS

_SEED = 20
_CHECK_ROWS = 2048  # of the reference at a time: it is four or eight bytes wide
_ALLOWED_RATIO = 2.0  # of plain PyTorch's largest error, both against the reference


@dataclass
class Case:
    """One rank's part of a problem in `group`; `emulated`: its peers are memory.

    `gathered` is the AllGather's result as an unfused call has it, `slots` [world_size, rows, N]
    the partial sums as they lie before an unfused sum, `own` [rows, N] that sum. All random normal
    at first; the weight is scaled so that results are of order 1.
    """

    problem: Problem
    dtype: torch.dtype
    group: Group
    emulated: bool
    x: torch.Tensor = field(init=False)
    weight: torch.Tensor = field(init=False)
    product: torch.Tensor = field(init=False)
    gathered: torch.Tensor = field(init=False)
    slots: torch.Tensor = field(init=False)
    own: torch.Tensor = field(init=False)
    programs: list[Program] = field(default_factory=list)
    auto_impl: str = ""

    def __post_init__(self) -> None:
        M, N, K = self.problem.local_shape
        generator = torch.Generator(self.group.device).manual_seed(_SEED + self.group.rank)
        rows = self.problem.rows_per_rank[self.group.rank]

        def normal(*shape: int) -> torch.Tensor:
            device = self.group.device
            return torch.randn(*shape, dtype=self.dtype, device=device, generator=generator)

        self.product = torch.empty(M, N, dtype=self.dtype, device=self.group.device)
        self.weight = normal(N, K) * K**-0.5
        if self.problem.operator == "ag_gemm":
            self.x, self.gathered = normal(rows, K), normal(M, K)
            return
        self.x = self.gathered = normal(M, K)
        whole = self.problem.operator == "gemm_ar" and self.one_shot
        share = M if whole else max(self.problem.rows_per_rank)
        self.slots = normal(self.group.world_size, share, N)
        self.own = torch.empty_like(self.slots[0])

    def normal(self, *shape: int) -> torch.Tensor:
        """More random normal numbers."""
        seed = _SEED + self.group.world_size + self.group.rank
        generator = torch.Generator(self.group.device).manual_seed(seed)
        return torch.randn(*shape, dtype=self.dtype, device=self.group.device, generator=generator)

    @property
    def one_shot(self) -> bool:
        """Whether GEMM+AR takes one hop."""
        from plait.overlap.gemm_ar.launch import choose_algorithm

        return choose_algorithm(self.problem.M, self.group.world_size) == "one_shot"

    # --- contestants
    def overlapped(self, impl: str, return_gathered: bool = False) -> Any:
        """The operator's call."""
        import plait

        rows = self.problem.rows_per_rank
        sizes = None if len(set(rows)) == 1 else rows
        if self.problem.operator == "ag_gemm":
            return plait.ag_gemm(
                self.x, self.weight, group=self.group, rows_per_rank=sizes, impl=impl,
                return_gathered=return_gathered,
            )  # fmt: skip
        if self.problem.operator == "gemm_rs":
            return plait.gemm_rs(
                self.x, self.weight, group=self.group, rows_per_rank=sizes, impl=impl
            )
        return plait.gemm_ar(self.x, self.weight, group=self.group, impl=impl)

    def contestants(self) -> dict[str, Callable[[], object]]:
        """By name: plain products, communication alone, one after the other, and overlapped."""
        import plait

        unfused = self._unfused

        def auto() -> None:
            self.overlapped("auto")
            record = plait.last_run()
            self.auto_impl = record.impl if record else ""

        return {
            "torch_gemm": self.torch_gemm,
            "plait_gemm": self.plait_gemm,
            "communication": self.communicate,
            "unfused": lambda: unfused(self.torch_gemm),
            "plait_unfused": lambda: self.overlapped("unfused"),
            "fused": lambda: self.overlapped("fused"),
            "auto": auto,
        }

    def torch_gemm(self) -> None:
        """The rank's product by the library."""
        torch.matmul(self.gathered, self.weight.t(), out=self.product)

    def plait_gemm(self) -> None:
        """The rank's product by plait."""
        import plait

        plait.matmul(self.gathered, self.weight, out=self.product, impl="fused")

    def _unfused(self, gemm: Callable[[], None]) -> None:
        """Communication, then the library's product; or product, communication, sum."""
        if self.problem.operator == "ag_gemm":
            self.communicate()
            gemm()
            return
        gemm()
        self.communicate()
        if self.emulated:  # NCCL's own reductions have summed already
            torch.sum(self.slots, dim=0, out=self.own)

    def communicate(self) -> None:
        """The fused call's transfers without computation, or NCCL's collective among real ranks."""
        if self.emulated:
            executor: Any = self.group.executor
            with executor.communication_only():
                self.transfer()
            return
        import torch.distributed as dist

        if self.problem.operator == "gemm_ar":
            dist.all_reduce(self.product)
        elif self.problem.operator == "gemm_rs":
            dist.reduce_scatter_tensor(self.own, self.product)
        else:
            dist.all_gather_into_tensor(self.gathered, self.x)

    def transfer(self) -> None:
        """The fused call, of which only the transfers run."""
        self.overlapped("fused")

    # --- what ran
    @property
    def config(self) -> dict[str, int]:
        """Tiles, blocks and chunks of the fused kernel, as far as the first call showed them."""
        launch = self._launch()
        if launch is None:
            return {}
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_chunks")
        found = {name.lower(): launch.args[name] for name in names if name in launch.args}
        return {
            **found,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "blocks": launch.grid,
            "slices": len(self.programs),
        }

    def _launch(self) -> Launch | None:
        launches = [each for program in self.programs for each in program.launches()]
        kernels = [each for each in launches if "BLOCK_M" in each.args]
        return max(kernels, key=lambda each: each.grid, default=None)

    # --- check
    def check(self) -> str:
        """ "" if the fused result is right, else what is wrong.

        It may err at most twice as much as plain PyTorch in this dtype, both against a product of
        wider numbers and what the peers' slots hold. Calls the operator a few times.
        """
        with watched_programs(self.group, self.programs):
            self.overlapped("fused")
        if self.emulated:
            self.overlapped("fused")  # so that both regions have memory
            fill_regions(self.group, self.dtype)
        if self.problem.operator == "ag_gemm":
            out, gathered = self.overlapped("fused", return_gathered=True)
            wrong = self._check_gathered(gathered, self.x)
            pieces = [(out, gathered), (self.overlapped("fused"), gathered)]
            for result, source in pieces:
                wrong = wrong or self._compare(result, source, None, None)
            return wrong
        out = self.overlapped("fused")
        self.group.synchronize()
        return self._check_sums(out) if self.emulated else self._check_real_sums(out)

    def _check_gathered(self, gathered: torch.Tensor, x: torch.Tensor) -> str:
        if not self.emulated:
            parts = self.group.exchange_tensor("bench reference", x)
            same = torch.equal(gathered, torch.cat(parts))
            return "" if same else "the gathered x is not what the ranks sent"
        first = sum(self.problem.rows_per_rank[: self.group.rank])
        own = gathered[first : first + x.shape[0]]
        if not torch.equal(own, x):
            return "the own rows of the gathered x differ"
        return "" if bool(gathered.isfinite().all()) else "the gathered x is not finite"

    def _check_sums(self, out: torch.Tensor) -> str:
        """Against the own partial sums plus what lies in the peers' slots of the region."""
        region = self.group.workspace.regions[0]
        rank, world_size = self.group.rank, self.group.world_size
        N = out.shape[1]
        for first, source_row, rows, slot_rows in self._pieces(out.shape[0]):
            slots = region.data(rank, 0, (world_size, slot_rows, N), self.dtype)
            peers = [slots[peer, :rows] for peer in range(world_size) if peer != rank]
            source = self.x[source_row : source_row + rows]
            wrong = self._compare(out[first : first + rows], source, peers, first)
            if wrong:
                return wrong
        return "" if bool(out.isfinite().all()) else "the result is not finite"

    def _pieces(self, num_rows: int) -> Iterator[tuple[int, int, int, int]]:
        """(row of the result, of x, rows, rows of a slot) that the live rank sums; a slice each.

        GEMM+AR in two shots: only the own rows; the others hold what peers' memory does.
        """
        from plait.schedules.partition import split_rows

        scatter = self.problem.operator == "gemm_rs"
        rank, world_size = self.group.rank, self.group.world_size
        first_of_x = sum(self.problem.rows_per_rank[:rank]) if scatter else 0
        for first, rows in self._slices(num_rows):
            if scatter:
                sizes = self.problem.rows_per_rank
                slot_rows = rows if rows < sizes[rank] else max(sizes)
                yield first, first_of_x + first, rows, slot_rows
            elif self.one_shot:
                yield first, first, rows, rows
            else:
                shares = split_rows(rows, world_size)
                begin = first + sum(shares[:rank])
                yield begin, begin, shares[rank], max(shares)

    def _slices(self, num_rows: int) -> list[tuple[int, int]]:
        """(first row, rows) of the result in each program of the call."""
        found = []
        for program in self.programs:
            for launch in program.launches():
                out = launch.args.get("out_ptr")
                if "BLOCK_M" in launch.args and isinstance(out, torch.Tensor):
                    found.append((out.storage_offset() // out.shape[1], out.shape[0]))
        return found or [(0, num_rows)]

    def _check_real_sums(self, out: torch.Tensor) -> str:
        """Against every rank's operands."""
        xs = self.group.exchange_tensor("bench reference", self.x)
        weights = self.group.exchange_tensor("bench reference", self.weight)
        rows, rank = self.problem.rows_per_rank, self.group.rank
        first = sum(rows[:rank]) if self.problem.operator == "gemm_rs" else 0
        cut = slice(first, first + out.shape[0])
        peers = [
            torch.matmul(x[cut], weight.t())
            for peer, (x, weight) in enumerate(zip(xs, weights, strict=True))
            if peer != rank
        ]
        return self._compare(out, self.x[cut], peers, 0)

    def _compare(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        peers: list[torch.Tensor] | None,
        first: int | None,
    ) -> str:
        """out = source @ weight^T + sum of peers, in blocks of rows."""
        wide = torch.float64 if self.dtype is torch.float32 else torch.float32
        weight = self.weight.to(wide).t()
        for begin in range(0, source.shape[0], _CHECK_ROWS):
            cut = slice(begin, begin + _CHECK_ROWS)
            others: Any = sum(each[cut].to(wide) for each in peers or [])
            exact = source[cut].to(wide) @ weight + others
            plain = torch.matmul(source[cut], self.weight.t())
            plain = (plain.to(wide) + others).to(self.dtype)
            error, allowed = _errors(out[cut].to(wide), plain.to(wide), exact, self.dtype)
            if not error <= allowed:
                rows = f"rows {(first or 0) + begin} and on"
                return f"largest error {error:.2e}, allowed {allowed:.2e}, in {rows}"
        return ""


def _errors(
    out: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """(largest error of out, what is allowed); one rounding more, as plain may be exact."""
    rounding = torch.finfo(dtype).eps / 2 * float(exact.abs().max())
    error = float((out - exact).abs().max())
    allowed = _ALLOWED_RATIO * float((plain - exact).abs().max()) + rounding
    return (math.inf if math.isnan(error) else error), allowed


def fill_regions(group: Group, dtype: torch.dtype) -> None:
    """Put the same random normal numbers into every rank's data regions, as if peers had sent.

    Only for emulated peers, whose "sent" data are what their memory and this rank's slots hold.
    """
    group.synchronize()
    buffers = [region.buffer for region in group.workspace.regions[:NUM_REGIONS] if region.buffer]
    size = max((buffer.nbytes for buffer in buffers), default=0)
    generator = torch.Generator(group.device).manual_seed(_SEED)
    numbers = torch.empty(size // dtype.itemsize, dtype=dtype, device=group.device)
    numbers.normal_(generator=generator)
    flat = numbers.view(torch.uint8)
    for buffer in buffers:
        for peer in buffer.peers:
            count = min(peer.numel(), flat.numel())
            peer[:count].copy_(flat[:count])
    group.executor.synchronize()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


@contextlib.contextmanager
def watched_programs(group: Group, found: list[Program]) -> Iterator[None]:
    """Note each program that the group's executor gets meanwhile, once."""
    executor: Any = group.executor
    name = "transform" if hasattr(executor, "transform") else "run"
    original = getattr(executor, name)

    def noting(program: Program) -> Any:
        if not any(program is each for each in found) and _has_tiles(program):
            found.append(program)
        return original(program)

    setattr(executor, name, noting)
    try:
        yield
    finally:
        delattr(executor, name)


def _has_tiles(program: Program) -> bool:
    """Whether this is an operator's own program: transformed ones have the same launches."""
    return type(program) is Program and any("BLOCK_M" in each.args for each in program.launches())


__all__ = ["Case", "fill_regions", "watched_programs"]
