"""What one GPU does by itself: rates of GEMM tiles and of memory. Measured, with their source.

Units: TFLOP/s, TB/s (10^12 bytes a second), microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_LINE_BYTES = 2  # operand size that the tile rates are for


@dataclass(frozen=True)
class TileRate:
    """TFLOP/s that one SM reaches on tiles of `block_m` x `block_n`, 2-byte operands, long K."""

    block_m: int
    block_n: int
    sm_tflops: float

    @property
    def intensity(self) -> float:
        """Multiply-adds for each operand element that is loaded."""
        return self.block_m * self.block_n / (self.block_m + self.block_n)


@dataclass(frozen=True)
class FixedCosts:
    """Microseconds of one call of `operator` whatever its size, over what the model predicts.

    Prologue, signals, forks and joins of streams: `fused_us` of the fused call, `unfused_us` of
    communication and product in turn.
    """

    operator: str
    fused_us: float
    unfused_us: float


@dataclass(frozen=True)
class Rates:
    """One GPU.

    Attributes:
        name: the GPU.
        num_sms: its SMs.
        tiles: rates of the tile sizes that were measured.
        copy_tb_s: a device copy, read plus write.
        read_tb_s: streaming a weight with few rows of x, cold L2.
        start_us: what such a product takes before it streams.
        launch_us: one more kernel in a graph.
        library_share: time of the best plain GEMM (cuBLAS) over that of the same tiles in Triton.
        source: where the figures are from.
        fixed: costs of a call of each operator, see `fixed_costs`; `predict` leaves them out.
    """

    name: str
    num_sms: int
    tiles: tuple[TileRate, ...]
    copy_tb_s: float
    read_tb_s: float
    start_us: float
    launch_us: float
    library_share: float
    source: str
    fixed: tuple[FixedCosts, ...] = ()

    def fixed_costs(self, operator: str) -> FixedCosts:
        """What a call of `operator` costs whatever its size; nothing where it was not measured."""
        for costs in self.fixed:
            if costs.operator == operator:
                return costs
        return FixedCosts(operator, 0.0, 0.0)

    def sm_tflops(self, block_m: int, block_n: int) -> float:
        """TFLOP/s of one SM on such tiles.

        A size that was not measured has the rate of the smallest measured one, less in proportion
        to the intensity: small tiles load more operands for each product.
        """
        for tile in self.tiles:
            if (tile.block_m, tile.block_n) == (block_m, block_n):
                return tile.sm_tflops
        smallest = min(self.tiles, key=lambda tile: tile.block_m * tile.block_n)
        share = TileRate(block_m, block_n, 0.0).intensity / smallest.intensity
        return smallest.sm_tflops * min(1.0, share)

    def tile_us(self, block_m: int, block_n: int, K: int, dtype_bytes: int) -> float:
        """Time of one tile over all of K on one SM. Half the operand bytes, twice the rate."""
        tflops = self.sm_tflops(block_m, block_n) * _LINE_BYTES / dtype_bytes
        return 2 * block_m * block_n * K / tflops / 1e6

    def copy_us(self, nbytes: float) -> float:
        """Time to move `nbytes`, reads and writes counted, with the whole GPU."""
        return nbytes / self.copy_tb_s / 1e6

    def stream_us(self, nbytes: float) -> float:
        """Least time of a product whose operands and result are `nbytes`."""
        return self.start_us + nbytes / self.read_tb_s / 1e6

    def scaled(self, factor: float) -> Rates:
        """The same GPU where every tile takes `factor` times as long."""
        tiles = tuple(replace(tile, sm_tflops=tile.sm_tflops / factor) for tile in self.tiles)
        return replace(self, tiles=tiles)


def _tile(block_m: int, block_n: int, tflops: float, num_sms: int) -> TileRate:
    return TileRate(block_m, block_n, tflops / num_sms)


H200 = Rates(
    name="NVIDIA H200",
    num_sms=132,
    # Medians over products of several waves, whole waves counted; power-limited ones included.
    tiles=(
        _tile(128, 256, 780.0, 132),
        _tile(256, 128, 731.0, 132),
        _tile(128, 128, 757.0, 132),
    ),
    copy_tb_s=4.15,
    read_tb_s=3.5,
    start_us=8.5,
    launch_us=3.0,
    library_share=0.97,
    source="bf16, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30: "
    "benchmarks/results/gemm_bf16_tuned_h200_2026-11-30.jsonl; 256x128 from an earlier kernel; "
    "fixed: benchmarks/results/overlap_paced360_first_h200_2026-11-30.jsonl",
    # Measured time less the model at the measured product's rate, over emulated peers; their fork
    # and join are in it. Fused: the median of three calls, the smaller of two (the rest grows with
    # the call), the one with one row. Unfused: medians.
    fixed=(
        FixedCosts("ag_gemm", 23.0, 18.0),
        FixedCosts("gemm_rs", 39.0, 17.0),
        FixedCosts("gemm_ar", 26.0, 19.0),
    ),
)

_KNOWN = {rates.name: rates for rates in (H200,)}


def rates_of(gpu: str) -> Rates | None:
    """The rates of the GPU with this name, as `DeviceInfo.name` has it; None if not measured."""
    return _KNOWN.get(gpu)


__all__ = ["H200", "FixedCosts", "Rates", "TileRate", "rates_of"]
