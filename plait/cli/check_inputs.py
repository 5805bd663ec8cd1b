"""What the cases of `plait check` share: exact inputs, memory, a gap between two calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.backends.commands import Copy, Program
from plait.check.explore import WrongValueError
from plait.check.mutants import CASE_PROGRAM
from plait.collectives.push import close_region, open_region
from plait.symm import signals
from plait.symm.group import Group
from plait.symm.workspace import NUM_REGIONS


def integers(shape: Sequence[int], *key: int) -> torch.Tensor:
    """fp32 integers from -3 to 3, the same for the same key on every rank."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, tuple(shape), generator=generator).float()


def expect(name: str, group: Group, index: int, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise WrongValueError unless `got` is `want`, bitwise."""
    if torch.equal(got, want):
        return
    if got.shape != want.shape:
        detail = f"shape {list(got.shape)}, expected {list(want.shape)}"
    else:
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist())
        detail = (
            f"{len(wrong)} of {got.numel()} wrong, first at {at}: {got[at]}, expected {want[at]}"
        )
    raise WrongValueError(f"{name}: rank {group.rank}, round {index}: {detail}")


def reserve(group: Group, num_elements: int) -> None:
    """Make both regions large enough for all rounds: growing them would let the ranks meet."""
    for _ in range(NUM_REGIONS):
        group.take_region(4 * num_elements)


def copy_by_case(group: Group, dst: torch.Tensor, src: torch.Tensor) -> None:
    """`dst.copy_(src)` on this rank's `main`, as work of the case's and not of the operator's."""
    if src.numel():
        group.executor.run(Program(CASE_PROGRAM, [Copy(dst, src, "main")]))


class Input:
    """This rank's input, in symmetric memory: overwritten on `main` at the beginning of a round."""

    def __init__(self, group: Group, num_elements: int) -> None:
        self.group, self.memory = group, group.empty(num_elements)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """The values as a tensor that the race detector watches."""
        tensor = self.memory[: values.numel()].view(values.shape)
        copy_by_case(self.group, tensor, values)
        return tensor


def gap(group: Group) -> None:
    """Use the other region without sending anything.

    The operator's next call then has the same region as its last one, and in between the ranks
    learned nothing of each other that its consumed signals would not say.
    """
    region = group.take_region(4)
    commands = [open_region(region, 1, signals.Operator.USER), close_region(region)]
    group.executor.run(Program(CASE_PROGRAM, list(commands)))


__all__ = ["Input", "copy_by_case", "expect", "gap", "integers", "reserve"]
