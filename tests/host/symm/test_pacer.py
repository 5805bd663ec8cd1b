"""The pacer's rounds: what is sent, when each thread's clock says something else."""

import torch
import triton
import triton.language as tl

import plait
from plait.backends.commands import Launch, Program
from plait.symm.transports.emulation import PACER_BLOCK
from plait.symm.transports.pacer_kernels import _send

EPOCH, NOW = 7, 5


@triton.jit
def _send_once_kernel(table_ptr, out_ptr, num_entries, epoch, now, BLOCK: tl.constexpr):
    tl.store(out_ptr, _send(table_ptr, num_entries, num_entries, 0, epoch, now, BLOCK))


def sent(releases: list[int]) -> tuple[int, list[int]]:
    """How many entries one round sends whose times are `releases`, and their words."""
    words, out = torch.zeros(len(releases), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows = [[0, words.data_ptr() + 4 * i, 0, release] for i, release in enumerate(releases)]
    args = {
        "table_ptr": torch.tensor(rows, dtype=torch.int64).t().contiguous(),
        "out_ptr": out,
        "num_entries": len(releases),
        "epoch": EPOCH,
        "now": NOW,
        "BLOCK": PACER_BLOCK,
    }

    def rank(group: plait.Group) -> None:
        group.executor.run(Program("send", [Launch(_send_once_kernel, 1, args, num_warps=1)]))

    plait.run_virtual(rank, 1, device="cpu", check=False)
    return int(out), words.tolist()


def test_what_is_due_is_sent() -> None:
    assert sent([1, 4, 5, 6, 9]) == (3, [EPOCH, EPOCH, EPOCH, 0, 0])


def test_an_entry_that_is_not_due_is_not_passed_over() -> None:
    # To the thread of the third entry it is due, to that of the second the second is not.
    assert sent([1, 6, 5]) == (1, [EPOCH, 0, 0])
