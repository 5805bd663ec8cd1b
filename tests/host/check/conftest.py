"""A script of events for the race detector, in place of the virtual device."""

import numpy as np
import pytest

from plait.check.detector import RaceDetector
from plait.symm.virtual.observe import Block, Item, Site

BUFFER, SIGNALS = 0x10000, 0x90000


def addresses(start, count, itemsize, step=1):
    return (start + itemsize * step * np.arange(count)).astype(np.uint64)


class Script:
    """Drives a detector as the virtual device would; rank 1 owns buffer and signal words."""

    buffer, signals = BUFFER, SIGNALS
    addresses = staticmethod(addresses)

    def __init__(self):
        self.detector = RaceDetector()
        self.detector.world_started(None)
        self.detector.region_added("gathered", 1, BUFFER, 4096)
        self.detector.signal_words_added(1, SIGNALS, 64)
        self.counts = {}

    def item(self, rank, stream="main", kind="launch", name="_kernel", grid=1, start=True):
        index = self.counts[rank, stream] = self.counts.get((rank, stream), -1) + 1
        item = Item(rank, stream, kind, "op", name, index, num_blocks=grid)
        self.detector.enqueued(item)
        if start:
            self.detector.item_started(item)
        return item

    def launch(self, rank, stream="main", name="_kernel", grid=1):
        item = self.item(rank, stream, "launch", name, grid)
        blocks = [Block(item, i) for i in range(grid)]
        for block in blocks:
            self.detector.block_started(block)
        return blocks if grid > 1 else blocks[0]

    def finish(self, *blocks):
        for block in blocks:
            self.detector.block_finished(block)
        self.detector.item_finished(blocks[0].item)

    def access(self, block, write, line, start=BUFFER, count=64, itemsize=4, tma=False, step=1):
        where = addresses(start, count, itemsize, step)
        site = Site("/somewhere/plait/push/kernels.py", line)
        self.detector.access(block, where, itemsize, write=write, async_proxy=tma, site=site)

    def store(self, block, line=1, **kwargs):
        self.access(block, True, line, **kwargs)

    def load(self, block, line=2, **kwargs):
        self.access(block, False, line, **kwargs)

    def barrier(self, block):
        self.detector.cta_barrier(block)

    def fence(self, block):
        self.detector.proxy_fence(block)

    def atomic(self, block, acquire=False, release=False, poll=False, scope="sys", word=SIGNALS,
               vector=False):  # fmt: skip
        self.detector.atomic(
            block, word, acquire=acquire, release=release, poll=poll, scope=scope,
            site=Site("s", 9), vector=vector,
        )  # fmt: skip

    def signal(self, block, **kwargs):
        self.atomic(block, release=True, **kwargs)

    def wait(self, block, **kwargs):
        self.atomic(block, acquire=True, poll=True, **kwargs)

    def copy(self, rank, dst, src, stream="comm", count=64):
        item = self.item(rank, stream, "copy", "copy")
        self.detector.copied(item, addresses(dst, count, 4), addresses(src, count, 4), 4)
        self.detector.item_finished(item)

    def copy_signal(self, rank, stream="comm", word=SIGNALS):
        item = self.item(rank, stream, "signal", "signal")
        self.detector.signalled(item, word)
        self.detector.item_finished(item)

    @property
    def kinds(self):
        return [race.kind for race in self.detector.races]

    # --- whole protocols
    def pushed(
        self, *, barrier=True, release=True, acquire=True, publish="sys", learn="sys", readers=1
    ):
        """Rank 0 stores and signals, a block of rank `readers` waits and loads."""
        writer, reader = self.launch(0), self.launch(readers, "comm")
        self.store(writer)
        if barrier:
            self.barrier(writer)
        self.atomic(writer, release=release, scope=publish)
        self.atomic(reader, acquire=acquire, poll=True, scope=learn)
        self.load(reader)
        return writer, reader

    def push_round(self, ordered=True):
        """A push by two blocks into rank 1's buffer, read there, with ready and consumed words."""
        push = self.launch(0, name="_push", grid=2)
        for half, block in enumerate(push):
            self.wait(block, word=SIGNALS + 16)
            self.store(block, 1, start=BUFFER + 256 * half, count=64)
            self.barrier(block)
            self.signal(block, word=SIGNALS + 4 * half)
        gemm = self.launch(1, name="_gemm", grid=2)
        for block in gemm:
            for half in (0, 1):
                self.wait(block, word=SIGNALS + 4 * half)
            self.fence(block)
            self.load(block, 2, count=128, tma=True)
            self.fence(block)
            self.barrier(block)
            if ordered:
                self.signal(block, word=SIGNALS + 16)
        self.finish(*push)
        self.finish(*gemm)
        self.detector.event_recorded(0, "main", self.counts[0, "main"])


@pytest.fixture
def script():
    return Script()
