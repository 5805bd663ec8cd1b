"""Who may write which word: the layout of signal words and of the context that kernels read.

All words are int32 in symmetric memory, monotonic, compared with `seen - epoch >= 0` (so a wrap of
the 32-bit epoch is harmless) and never zeroed. A region's words, from its offset:

| word | written by | meaning |
|---|---|---|
| EPOCH | the owner's prologue | number of calls that used this region |
| ARRIVED | the owner's blocks | blocks that ended, over all calls |
| TARGET | the owner's prologue | ARRIVED when the last block of this call ends |
| CONSUMED + p | peer p | p has read all that call `epoch` put into p's region |
| READY + i | one peer (or its copy engine) | chunk i of this call is in this region |

The group's own words come first: ABORT (any peer), then the record of the wait that gave up.
"""

from __future__ import annotations

import enum

MAX_RANKS = 64

# --- group words
ABORT = 0  # 0, then CLAIMED by the first wait that gave up, then RECORDED with its record
ABORT_CLAIMED = 1
ABORT_RECORDED = 2
RECORD = 1  # rank, operator, word, peer, expected, seen, region
NUM_RECORD_WORDS = 7
GROUP_WORDS = 32

# --- region words, relative to the region's offset
EPOCH = 0
ARRIVED = 1
TARGET = 2
CONSUMED = 8
READY = CONSUMED + MAX_RANKS
NUM_READY_WORDS = 32768
REGION_WORDS = READY + NUM_READY_WORDS

# --- context: int64 entries that every kernel of a group reads through `ctx_ptr`
CTX_RANK = 0
CTX_WORLD_SIZE = 1
CTX_DEADLINE_NS = 2
CTX_STATUS = 3  # address of the pinned word that the host polls
CTX_MIRROR = 4  # address of the pinned mirror of EPOCH
CTX_REGION = 5  # offset of the region's words
CTX_WORDS = 8  # world_size addresses: each rank's words; then world_size addresses: region data


class Operator(enum.IntEnum):
    """Number of an operator in the record of a wait that gave up."""

    BARRIER = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_REDUCE = 4
    ALL_TO_ALL = 5
    AG_GEMM = 6
    GEMM_RS = 7
    GEMM_AR = 8
    USER = 99


def region_offset(region: int) -> int:
    """Offset of a region's words in the group's word buffer."""
    return GROUP_WORDS + region * REGION_WORDS


def describe_word(word: int) -> str:
    """A region word's name, for errors."""
    if word >= READY:
        return f"ready[{word - READY}]"
    if word >= CONSUMED:
        return f"consumed[{word - CONSUMED}]"
    return {EPOCH: "epoch", ARRIVED: "arrived", TARGET: "target"}.get(word, f"word {word}")


__all__ = [
    "ABORT",
    "ABORT_CLAIMED",
    "ABORT_RECORDED",
    "ARRIVED",
    "CONSUMED",
    "CTX_DEADLINE_NS",
    "CTX_MIRROR",
    "CTX_RANK",
    "CTX_REGION",
    "CTX_STATUS",
    "CTX_WORDS",
    "CTX_WORLD_SIZE",
    "EPOCH",
    "GROUP_WORDS",
    "MAX_RANKS",
    "NUM_READY_WORDS",
    "NUM_RECORD_WORDS",
    "READY",
    "RECORD",
    "REGION_WORDS",
    "TARGET",
    "Operator",
    "describe_word",
    "region_offset",
]
