"""Shadow memory and address ranges, against simple models."""

import numpy as np

from plait.check.clocks import VectorClock
from plait.check.intervals import IntervalMap
from plait.check.shadow import Shadow


def test_shadow_agrees_with_a_byte_by_byte_model():
    rng = np.random.default_rng(5)
    size, num_threads = 96, 4
    for _ in range(40):
        shadow = Shadow("r", 0, size)
        clocks = [VectorClock() for _ in range(num_threads + 1)]
        last_write = np.zeros((size, 2), np.int64)
        reads = np.zeros((size, num_threads + 1), np.int64)
        for _ in range(30):
            tid = int(rng.integers(1, num_threads + 1))
            if rng.random() < 0.4:
                clocks[tid].join(clocks[int(rng.integers(1, num_threads + 1))])
            itemsize = int(rng.choice([1, 2, 4, 8]))
            count = int(rng.integers(1, 6))
            elements = rng.choice(size // itemsize, count, replace=bool(rng.random() < 0.3))
            if rng.random() < 0.5:
                elements = elements.min() + np.arange(min(count, size // itemsize - elements.min()))
            offsets = (elements * itemsize).astype(np.int64)
            touched = np.unique(offsets[:, None] + np.arange(itemsize))
            write = bool(rng.random() < 0.5)
            now = clocks[tid].tick(tid)
            known = clocks[tid].dense(num_threads + 1)
            expected = set()
            if (last_write[touched, 1] > known[last_write[touched, 0]]).any():
                expected.add("write-write" if write else "write-read")
            if write and (reads[touched] > known).any():
                expected.add("read-write")
            found = (shadow.write if write else shadow.read)(offsets, itemsize, tid, clocks[tid])
            assert {conflict.kind for conflict in found} == expected
            if write:
                last_write[touched] = (tid, now)
            else:
                reads[touched, tid] = now


def test_intervals():
    ranges = IntervalMap()
    for name, start in (("b", 200), ("a", 100), ("c", 300)):
        ranges.add(start, 50, name)
    found = {at: ranges.find(at) for at in (99, 100, 149, 150, 249, 349, 350)}
    names = [None if hit is None else hit.value for hit in found.values()]
    assert names == [None, "a", "a", None, "b", "c", None]
    parts, rest = ranges.split(np.array([90, 120, 310, 200, 130, 260], np.uint64))
    assert [(hit.value, part.tolist()) for hit, part in parts] == [
        ("a", [120, 130]),
        ("b", [200]),
        ("c", [310]),
    ]
    assert rest.tolist() == [90, 260]
    ranges.add(140, 70, "new")  # overlaps a and b: both are gone
    assert [ranges.find(at) is None for at in (120, 145, 220, 320)] == [True, False, True, False]
    assert ranges.remove(140).value == "new"
    assert ranges.remove(140) is None
    assert len(ranges) == 1
