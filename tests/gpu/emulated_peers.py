"""What emulated peers "send": known contents of their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import plait
from plait.symm.workspace import NUM_REGIONS


def fill_slots(group: plait.Group, parts: Sequence[torch.Tensor], slot_rows: int) -> None:
    """Put `parts[p]` into slot p of every region, on the live rank and, from where the link copies
    it, on peer p. The operator has been called twice: both regions have their memory."""
    for region in group.workspace.regions[:NUM_REGIONS]:
        for peer, part in enumerate(parts):
            offset = peer * slot_rows * part.shape[1] * part.element_size()
            for rank in {group.rank, peer}:
                region.data(rank, offset, tuple(part.shape), part.dtype).copy_(part)
