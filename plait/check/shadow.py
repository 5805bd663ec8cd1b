"""Shadow memory: the last write and the reads of every granule of a region.

A granule is 4 bytes, or fewer once an access needs it (neighbouring 2-byte elements of different
writers are no conflict). Writes keep one (thread id, clock) a granule; reads keep one clock a
granule for each thread id that read, in an array that spans only what that id has read.
Before any per-granule work a region asks whether some thread id's latest access is unordered at
all; in a correct program the answer is mostly no, and an access costs one or two array writes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from plait.check.clocks import VectorClock

Selection = slice | np.ndarray
ConflictKind = Literal["write-write", "write-read", "read-write"]

_COARSEST_BYTES = 4
_PAD_BYTES = 16  # the widest element; lets an access that begins inside end outside


class Conflict(NamedTuple):
    """An earlier access, unordered with the one being made, that touches the same byte."""

    kind: ConflictKind
    offset_bytes: int
    tid: int
    clock: int


class _Reads:
    """Clocks of one thread id's reads of the granules [low, low + clocks.size)."""

    __slots__ = ("clocks", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.clocks = np.zeros(high - low, np.int32)

    @property
    def high(self) -> int:
        return self.low + self.clocks.size

    def cover(self, low: int, high: int, limit: int) -> None:
        """Span [low, high) too; grows by half at least, so that many small steps stay cheap."""
        if low >= self.low and high <= self.high:
            return
        spare = self.clocks.size // 2
        low = self.low if low >= self.low else max(0, min(low, self.low - spare))
        high = self.high if high <= self.high else min(limit, max(high, self.high + spare))
        clocks = np.zeros(high - low, np.int32)
        clocks[self.low - low : self.high - low] = self.clocks
        self.low, self.clocks = low, clocks


class Shadow:
    """Shadow memory of one region of `nbytes` bytes, owned by `rank`."""

    def __init__(self, name: str, rank: int, nbytes: int) -> None:
        self.name = name
        self.rank = rank
        self.granule_bytes = _COARSEST_BYTES
        self._padded_bytes = (nbytes + 2 * _PAD_BYTES - 1) // _PAD_BYTES * _PAD_BYTES
        self._write_tid: np.ndarray | None = None
        self._write_clock: np.ndarray | None = None
        self._reads: dict[int, _Reads] = {}
        self._latest_write = np.zeros(1, np.int32)  # by thread id: clock of its latest write here
        self._latest_read = np.zeros(1, np.int32)

    @property
    def memory_bytes(self) -> int:
        """Bytes the shadow itself occupies."""
        arrays = [self._write_tid, self._write_clock, *(r.clocks for r in self._reads.values())]
        return sum(a.nbytes for a in arrays if a is not None)

    def read(
        self, offsets: np.ndarray, itemsize: int, tid: int, clock: VectorClock
    ) -> list[Conflict]:
        """Element byte offsets (int64) read by `tid`, whose own component was ticked before."""
        selection, low, high = self._select(offsets, itemsize)
        conflicts = self._unordered_write(selection, low, clock, "write-read")
        reads = self._reads.get(tid)
        if reads is None:
            reads = self._reads[tid] = _Reads(low, high)
        reads.cover(low, high, self._num_granules)
        now = clock[tid]
        reads.clocks[_shift(selection, reads.low)] = now
        self._latest_read = _put(self._latest_read, tid, now)
        return conflicts

    def write(
        self, offsets: np.ndarray, itemsize: int, tid: int, clock: VectorClock
    ) -> list[Conflict]:
        """Element byte offsets (int64) written by `tid`, whose own component was ticked before."""
        selection, low, high = self._select(offsets, itemsize)
        conflicts = self._unordered_write(selection, low, clock, "write-write")
        conflicts += self._unordered_reads(selection, low, high, clock)
        if self._write_tid is None or self._write_clock is None:
            self._write_tid = np.zeros(self._num_granules, np.int32)
            self._write_clock = np.zeros(self._num_granules, np.int32)
        now = clock[tid]
        self._write_tid[selection] = tid
        self._write_clock[selection] = now
        self._latest_write = _put(self._latest_write, tid, now)
        return conflicts

    # --- checks
    def _unordered_write(
        self, selection: Selection, low: int, clock: VectorClock, kind: ConflictKind
    ) -> list[Conflict]:
        if self._write_tid is None or self._write_clock is None:
            return []
        known = clock.dense(self._latest_write.size)
        if not (self._latest_write > known).any():
            return []
        tids = _gather(self._write_tid, selection)
        clocks = _gather(self._write_clock, selection)
        bad = clocks > known.take(tids)
        i = int(bad.argmax())
        if not bad[i]:
            return []
        offset = _granule(selection, i, low) * self.granule_bytes
        return [Conflict(kind, offset, int(tids[i]), int(clocks[i]))]

    def _unordered_reads(
        self, selection: Selection, low: int, high: int, clock: VectorClock
    ) -> list[Conflict]:
        """One conflict for each thread id with an unordered read."""
        known = clock.dense(self._latest_read.size)
        conflicts = []
        for tid in np.flatnonzero(self._latest_read > known).tolist():
            reads = self._reads[tid]
            if reads.low >= high or reads.high <= low:
                continue
            if reads.low <= low and high <= reads.high:
                part: Selection = selection
            elif isinstance(selection, slice):
                part = slice(max(low, reads.low), min(high, reads.high))
            else:
                part = selection[(selection >= reads.low) & (selection < reads.high)]
                if not part.size:
                    continue
            clocks = _gather(reads.clocks, _shift(part, reads.low))
            i = int(clocks.argmax())
            if clocks[i] > known[tid]:
                first = part.start if isinstance(part, slice) else 0
                offset = _granule(part, i, first) * self.granule_bytes
                conflicts.append(Conflict("read-write", offset, tid, int(clocks[i])))
        return conflicts

    # --- granules
    @property
    def _num_granules(self) -> int:
        return self._padded_bytes // self.granule_bytes

    def _select(self, offsets: np.ndarray, itemsize: int) -> tuple[Selection, int, int]:
        """The granules of the elements, as a slice if they are one run, and their [low, high)."""
        first, last = int(offsets[0]), int(offsets[-1])
        granule = _COARSEST_BYTES
        while first % granule or itemsize % granule:
            granule //= 2
        if granule < self.granule_bytes:
            self._refine(granule)
        granule = self.granule_bytes
        if last - first == (offsets.size - 1) * itemsize and (
            offsets.size <= 2 or bool((np.diff(offsets) == itemsize).all())
        ):
            low, high = first // granule, (last + itemsize) // granule
            return slice(low, high), low, high
        indices = offsets >> (granule.bit_length() - 1)
        width = itemsize // granule
        low, high = int(indices.min()), int(indices.max()) + width
        if width > 1:
            indices = (indices[:, None] + np.arange(width)).ravel()
        return indices, low, high

    def _refine(self, granule_bytes: int) -> None:
        factor = self.granule_bytes // granule_bytes
        self.granule_bytes = granule_bytes
        if self._write_tid is not None and self._write_clock is not None:
            self._write_tid = self._write_tid.repeat(factor)
            self._write_clock = self._write_clock.repeat(factor)
        for reads in self._reads.values():
            reads.low *= factor
            reads.clocks = reads.clocks.repeat(factor)


def _gather(values: np.ndarray, selection: Selection) -> np.ndarray:
    if isinstance(selection, slice):
        return values[selection]
    return values.take(selection)  # about twice as fast as indexing


def _shift(selection: Selection, by: int) -> Selection:
    if isinstance(selection, slice):
        return slice(selection.start - by, selection.stop - by)
    return selection - by if by else selection


def _granule(selection: Selection, i: int, low: int) -> int:
    return low + i if isinstance(selection, slice) else int(selection[i])


def _put(latest: np.ndarray, tid: int, clock: int) -> np.ndarray:
    if tid >= latest.size:
        latest = np.concatenate([latest, np.zeros(tid + 1 - latest.size, np.int32)])
    latest[tid] = clock
    return latest


__all__ = ["Conflict", "ConflictKind", "Shadow"]
