"""What a reduction reads and writes, as few dims as its strides allow.

K results, each of R elements. The kept dims number the results; the reduced dims are one inner dim
(the closest in memory, or the last one where an index is asked for) and up to three around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.ops.engine.dims import WIDE_FROM, Dim, by_closeness, count, merged, reach

MAX_KEPT, MAX_OUTER = 4, 3  # dims that kernels take, after merging


@dataclass(frozen=True)
class Layout:
    """The dims of a reduction, farthest first; strides are those of (input, result).

    Attributes:
        kept: at least one dim; number the results.
        outer: reduced dims around `inner`; may be empty.
        inner: the innermost reduced dim; its size is 0 if nothing is reduced, or if that dim is.
        wide: whether some offset or count needs 64 bits.
    """

    kept: tuple[Dim, ...]
    outer: tuple[Dim, ...]
    inner: Dim
    wide: bool

    @property
    def num_results(self) -> int:
        """K."""
        return count(self.kept)

    @property
    def num_outer(self) -> int:
        """Elements of the outer dims together."""
        return count(self.outer)

    @property
    def reduced(self) -> int:
        """R."""
        return self.num_outer * self.inner.size

    def arguments(self) -> dict[str, int]:
        """Launch arguments: sizes and strides, from the innermost dim outwards, missing ones 1 and
        0: k_size0.., k_stride0.., r_stride0.. (results), o_size0.., o_stride0.., inner_stride."""
        kept = _padded(self.kept, MAX_KEPT)
        outer = _padded(self.outer, MAX_OUTER)
        found = {"inner_stride": self.inner.strides[0]}
        found.update({f"k_size{n}": each.size for n, each in enumerate(kept[:-1])})
        found.update({f"k_stride{n}": each.strides[0] for n, each in enumerate(kept)})
        found.update({f"r_stride{n}": each.strides[1] for n, each in enumerate(kept)})
        found.update({f"o_size{n}": each.size for n, each in enumerate(outer[:-1])})
        found.update({f"o_stride{n}": each.strides[0] for n, each in enumerate(outer)})
        return found

    def result_arguments(self) -> dict[str, int]:
        """Those of `arguments` that a launch over partial results takes."""
        found = self.arguments()
        return {name: found[name] for name in found if name.startswith(("k_size", "r_stride"))}


def reduction_layout(
    sizes: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int],
    result_strides: Sequence[int],
    *,
    ordered: bool,
) -> Layout | None:
    """The layout of a reduction of a tensor (`sizes`, `strides`) over `dims`.

    Args:
        result_strides: of the result's dims, one for each dim of the input (any for reduced ones).
        ordered: the elements of a result are counted in the order of the tensor's dims, because
            their indices matter; otherwise any order will do.

    Returns None if more dims are left than kernels take.
    """
    every = [Dim(n, (a, b)) for n, a, b in zip(sizes, strides, result_strides, strict=True)]
    kept = merged(by_closeness(each for d, each in enumerate(every) if d not in dims))
    alone = [Dim(each.size, each.strides[:1]) for d, each in enumerate(every) if d in dims]
    reduced = merged(alone if ordered else by_closeness(alone))
    reduced = reduced or (Dim(1, (1,)),)
    if any(not each.size for each in reduced):
        reduced = (Dim(0, (1,)),)
    if len(kept) > MAX_KEPT or len(reduced) > MAX_OUTER + 1:
        return None
    kept = kept or (Dim(1, (0, 0)),)
    furthest = max(reach((*kept, *reduced), 0), reach(kept, 1), count(reduced), count(kept))
    return Layout(kept, reduced[:-1], reduced[-1], furthest >= WIDE_FROM)


def result_strides_of(result: torch.Tensor, ndim: int, dims: Sequence[int]) -> list[int]:
    """The strides of a result for each of the `ndim` dims of the input, whether kept or not."""
    strides = list(result.stride())
    if len(strides) == ndim:
        return strides
    left = iter(strides)
    return [0 if d in dims else next(left) for d in range(ndim)]


def _padded(dims: Sequence[Dim], number: int) -> list[Dim]:
    """From the innermost outwards, `number` of them."""
    return [*reversed(dims), *[Dim(1, (0, 0))] * (number - len(dims))]


__all__ = ["MAX_KEPT", "MAX_OUTER", "Layout", "reduction_layout", "result_strides_of"]
