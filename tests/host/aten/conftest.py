"""A made-up operator for the override's own tests, and nothing of it left for other tests."""

from __future__ import annotations

import pytest
import torch

from plait.ops.aten import registration, spec


class Marked:
    """Serves `keys` with a result that no ATen kernel gives, and remembers its calls."""

    def __init__(self, *keys, supports=lambda *args, **kwargs: "", run=None, name="marked"):
        self.calls = []
        self.spec = spec.OpSpec(name, keys, run=run or self._run, supports=supports)
        spec.add(self.spec)

    def _run(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        first = next(each for each in args if isinstance(each, torch.Tensor))
        return torch.full_like(first, 77)


@pytest.fixture
def marked():
    """`marked(*keys, supports=, run=)` makes one; they are the only operators of plait meanwhile.

    Afterwards they are gone, and every override too.
    """

    def make(*keys, **options):
        return Marked(*keys, **options)

    with spec.only():
        yield make
        registration.uninstall()
