"""A kernel of your own between ranks: a ring shift, written with `plait.symm.lang`.

Every rank puts its values into its right neighbour's memory, signals, waits for its left neighbour
and reads what came. Four virtual ranks share the current GPU, or one CPU where there is none.

    python examples/user_kernel.py
"""

import torch
import triton
import triton.language as tl

import plait
from plait.symm.lang import (
    READY,
    USER,
    data_ptr,
    get,
    get_epoch,
    get_rank,
    get_world_size,
    put,
    signal,
    wait,
)

WORLD_SIZE = 4


@triton.jit
def _ring_shift_kernel(ctx_ptr, x_ptr, out_ptr, num_values, BLOCK: tl.constexpr):
    """One block: out = the left neighbour's x, NaN if it never came; [num_values] of fp32."""
    rank = get_rank(ctx_ptr)
    world_size = get_world_size(ctx_ptr)
    epoch = get_epoch(ctx_ptr)
    right = (rank + 1) % world_size
    left = (rank + world_size - 1) % world_size
    offs = tl.arange(0, BLOCK)
    mask = offs < num_values
    values = tl.load(x_ptr + offs, mask=mask)
    put(ctx_ptr, right, data_ptr(ctx_ptr, right, tl.float32), offs, values, mask)
    signal(ctx_ptr, right, READY, epoch)  # after the put; READY + 1, ... are free for more
    arrived = wait(ctx_ptr, READY, epoch, left, USER)
    values = get(data_ptr(ctx_ptr, rank, tl.float32), offs, mask, 0.0)
    tl.store(out_ptr + offs, tl.where(arrived, values, float("nan")), mask=mask)


def ring_shift(x, *, group):
    """The x [n] (fp32, contiguous, the same n everywhere) of the rank to the left."""
    out = torch.empty_like(x)
    region = group.take_region(x.numel() * x.element_size())  # the same size on every rank
    block = triton.next_power_of_2(x.numel())
    group.launch(
        _ring_shift_kernel, 1, region=region, x_ptr=x, out_ptr=out, num_values=len(x), BLOCK=block
    )
    return out


def _rank(group):
    x = torch.arange(3.0, device=group.device) + 10 * group.rank
    for _ in range(2):
        x = ring_shift(x, group=group)
    group.synchronize()
    return x.cpu()


def main():
    """Shift twice; print and return every rank's values."""
    results = plait.run_virtual(_rank, WORLD_SIZE)
    for rank, values in enumerate(results):
        print(f"rank {rank} has {values.tolist()}")
    return results


if __name__ == "__main__":
    main()
