"""Addresses: the context, signal words and region data of this rank and its peers."""

import triton
import triton.language as tl

from plait.symm import signals as layout

ABORT = tl.constexpr(layout.ABORT)
ABORT_CLAIMED = tl.constexpr(layout.ABORT_CLAIMED)
ABORT_RECORDED = tl.constexpr(layout.ABORT_RECORDED)
RECORD = tl.constexpr(layout.RECORD)
EPOCH = tl.constexpr(layout.EPOCH)
ARRIVED = tl.constexpr(layout.ARRIVED)
TARGET = tl.constexpr(layout.TARGET)
CONSUMED = tl.constexpr(layout.CONSUMED)
READY = tl.constexpr(layout.READY)
CTX_RANK = tl.constexpr(layout.CTX_RANK)
CTX_WORLD_SIZE = tl.constexpr(layout.CTX_WORLD_SIZE)
CTX_DEADLINE_NS = tl.constexpr(layout.CTX_DEADLINE_NS)
CTX_STATUS = tl.constexpr(layout.CTX_STATUS)
CTX_MIRROR = tl.constexpr(layout.CTX_MIRROR)
CTX_REGION = tl.constexpr(layout.CTX_REGION)
CTX_WORDS = tl.constexpr(layout.CTX_WORDS)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
USER = tl.constexpr(int(layout.Operator.USER))  # OP of waits in kernels outside plait


@triton.jit
def get_rank(ctx_ptr):
    """This rank's number in the group (int32)."""
    return tl.load(ctx_ptr + CTX_RANK).to(tl.int32)


@triton.jit
def get_world_size(ctx_ptr):
    """The group's number of ranks (int32)."""
    return tl.load(ctx_ptr + CTX_WORLD_SIZE).to(tl.int32)


@triton.jit
def group_word_ptr(ctx_ptr, peer, word):
    """Address of a word of the group (not of a region) in `peer`'s memory."""
    return tl.load(ctx_ptr + CTX_WORDS + peer).to(tl.pointer_type(tl.int32)) + word


@triton.jit
def word_ptr(ctx_ptr, peer, word):
    """Address of a word of this region in `peer`'s memory."""
    return group_word_ptr(ctx_ptr, peer, tl.load(ctx_ptr + CTX_REGION) + word)


@triton.jit
def data_ptr(ctx_ptr, peer, DTYPE: tl.constexpr):
    """Start of this region's data in `peer`'s memory, 16-byte aligned, as a pointer to DTYPE."""
    world_size = get_world_size(ctx_ptr)
    address = tl.load(ctx_ptr + CTX_WORDS + world_size + peer)
    # Triton ignores an alignment hint on a loaded address, and would move 2 bytes at a time: so the
    # address is reached from a kernel argument that is aligned, in steps of 16 bytes.
    apart = address - ctx_ptr.to(tl.int64)
    return ctx_ptr.to(tl.pointer_type(DTYPE), bitcast=True) + (apart >> 4) * (
        128 // DTYPE.primitive_bitwidth
    )


@triton.jit
def get_epoch(ctx_ptr):
    """The epoch of the running call, as its prologue wrote it."""
    return tl.load(word_ptr(ctx_ptr, get_rank(ctx_ptr), EPOCH))
