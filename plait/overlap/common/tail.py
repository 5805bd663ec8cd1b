"""The last wave of tiles of a persistent kernel, in smaller tiles where that ends sooner.

A wave is one tile on every SM. If the last one has few tiles, most SMs would wait for them: cut
into column pieces, they keep more SMs busy for a shorter time. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Share of the full rate at which tiles of half and of a quarter of the columns run.
_RATES = {1: 1.0, 2: 0.9, 4: 0.72}
_LEAST_COLUMNS = 64
_LEAST_GAIN = 0.12  # of a wave's time: a second launch costs some microseconds


@dataclass(frozen=True)
class Part:
    """`count` tiles from tile `first` on, each cut into `pieces` of its columns."""

    first: int
    count: int
    pieces: int = 1


def cut_last_wave(num_tiles: int, num_sms: int, block_n: int) -> list[Part]:
    """All tiles as they are, or whole waves of them and a last wave in smaller pieces.

    Example: 448 tiles of 256 columns on 131 SMs are 3 waves and 55 tiles; as 110 tiles of 128
    columns these take 0.56 of a wave's time: [Part(0, 393), Part(393, 55, 2)].
    """
    waves, rest = divmod(num_tiles, num_sms)
    if waves == 0 or rest == 0:
        return [Part(0, num_tiles)]
    times = {
        pieces: -(-rest * pieces // num_sms) / pieces / rate
        for pieces, rate in _RATES.items()
        if block_n // pieces >= _LEAST_COLUMNS or pieces == 1
    }
    best = min(times, key=lambda pieces: times[pieces])
    if times[best] > 1.0 - _LEAST_GAIN:
        return [Part(0, num_tiles)]
    return [Part(0, waves * num_sms), Part(waves * num_sms, rest, best)]


__all__ = ["Part", "cut_last_wave"]
