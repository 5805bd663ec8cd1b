"""What is loaded, combined and made of the result, by name: the vocabulary of the reduction engine.

An accumulator is a tuple of tensors. Of each `combine` it holds:

    sum, prod, max, min    the value
    minmax                 least, greatest
    argmax, argmin         the value, its index
    moments                mean, sum of squared distances from it, number of elements
    logsumexp              greatest value (0 if that is not finite), sum of exp(x - that)

Maxima and minima propagate NaN; of equal values, and of NaNs, the first index counts.
"""

import triton
import triton.language as tl


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """`x` as PyTorch converts it; whether it is true, for int1."""
    if DTYPE == tl.int1:
        return x != 0
    return x.to(DTYPE)


@triton.jit
def loaded(x, LOAD: tl.constexpr, THROUGH: tl.constexpr, ACC: tl.constexpr, P: tl.constexpr):
    """An element as it is accumulated: by way of dtype THROUGH, in dtype ACC."""
    if LOAD == "nonzero":
        return (x != 0).to(ACC)
    if LOAD == "number":
        x = tl.where(x == x, x, tl.zeros_like(x))
    v = as_dtype(x, THROUGH).to(ACC)
    if LOAD == "abs":
        v = tl.abs(v)
    elif LOAD == "square":
        v = v * v
    elif LOAD == "power":
        v = power(tl.abs(v), P)
    return v


@triton.jit
def power(x, P: tl.constexpr):
    """x**P for x >= 0: by products and a root if 2 P is a small integer, else in fp64."""
    if P < 0:
        return 1.0 / power(x, -P)
    elif P == 0.5:
        return _root(x)
    elif P == 1.5:
        return x * _root(x)
    elif P == 2.5:
        return x * x * _root(x)
    elif P == 1.0:
        return x
    elif P == 2.0:
        return x * x
    elif P == 3.0:
        return x * x * x
    elif P == 4.0:
        return (x * x) * (x * x)
    else:
        return tl.exp2(tl.log2(x.to(tl.float64)) * P).to(x.dtype)


@triton.jit
def _root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _quotient(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


# --- accumulators of single elements


@triton.jit
def lowest(ACC: tl.constexpr):
    """What no value of ACC is below."""
    if ACC == tl.int32:
        return -(2**31)
    elif ACC == tl.int64:
        return -(2**63)
    else:
        return float("-inf")


@triton.jit
def highest(ACC: tl.constexpr):
    """What no value of ACC is above."""
    if ACC == tl.int32:
        return 2**31 - 1
    elif ACC == tl.int64:
        return 2**63 - 1
    else:
        return float("inf")


@triton.jit
def start(like, COMBINE: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr):
    """The accumulator of no elements, of the shape of `like`."""
    zero = tl.zeros(like.shape, ACC)
    if COMBINE == "sum":
        return (zero,)
    elif COMBINE == "prod":
        return (zero + 1,)
    elif COMBINE == "max":
        return (tl.full(like.shape, lowest(ACC), ACC),)
    elif COMBINE == "min":
        return (tl.full(like.shape, highest(ACC), ACC),)
    elif COMBINE == "minmax":
        return tl.full(like.shape, highest(ACC), ACC), tl.full(like.shape, lowest(ACC), ACC)
    elif COMBINE == "argmax":
        first = tl.full(like.shape, highest(INDEX), INDEX)
        return tl.full(like.shape, lowest(ACC), ACC), first
    elif COMBINE == "argmin":
        first = tl.full(like.shape, highest(INDEX), INDEX)
        return tl.full(like.shape, highest(ACC), ACC), first
    elif COMBINE == "moments":
        return zero, zero, zero
    else:
        return tl.full(like.shape, lowest(ACC), ACC), zero


@triton.jit
def single(v, mask, COMBINE: tl.constexpr, ACC: tl.constexpr):
    """Elements as accumulators; those not in `mask` count nothing. Not for what has an index."""
    if COMBINE == "sum":
        return (tl.where(mask, v, tl.zeros_like(v)),)
    elif COMBINE == "minmax":
        nothing = start(v, COMBINE, ACC, tl.int32)
        return tl.where(mask, v, nothing[0]), tl.where(mask, v, nothing[1])
    else:
        nothing = start(v, COMBINE, ACC, tl.int32)
        return (tl.where(mask, v, nothing[0]),)


@triton.jit
def nothing_like(v, COMBINE: tl.constexpr, ACC: tl.constexpr):
    """The value of no element where an index is asked for."""
    return start(v, COMBINE, ACC, tl.int32)[0]


@triton.jit
def beats(v, best, COMBINE: tl.constexpr):
    """Whether a later element takes the place of the best so far: a tie does not, a first NaN
    does."""
    if v.dtype == tl.int32 or v.dtype == tl.int64:
        return v > best if COMBINE == "argmax" else v < best
    elif COMBINE == "argmax":
        return ~(v <= best) & (best == best)
    else:
        return ~(v >= best) & (best == best)


# --- combine functions


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _prod(a, b):
    return a * b


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minmax(a, b, c, d):
    return _min(a, c), _max(b, d)


@triton.jit
def _moments(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    # Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    # variances, 1979.
    n = n_a + n_b
    share = n_b / tl.where(n > 0, n, 1.0)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def _logsumexp(a, s, b, t):
    top = _max(a, b)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return top, s * _scale(a, shift) + t * _scale(b, shift)


@triton.jit
def _scale(top, shift):
    # Sums are relative to their top, or to 0 where that is not finite.
    return tl.exp(tl.where(tl.abs(top) == float("inf"), 0.0, top) - shift)


@triton.jit
def combined(acc, new, COMBINE: tl.constexpr):
    """Two accumulators as one."""
    if COMBINE == "sum":
        return (acc[0] + new[0],)
    elif COMBINE == "prod":
        return (acc[0] * new[0],)
    elif COMBINE == "max":
        return (_max(acc[0], new[0]),)
    elif COMBINE == "min":
        return (_min(acc[0], new[0]),)
    elif COMBINE == "minmax":
        return _min(acc[0], new[0]), _max(acc[1], new[1])
    elif COMBINE == "moments":
        return _moments(acc[0], acc[1], acc[2], new[0], new[1], new[2])
    else:
        return _logsumexp(acc[0], acc[1], new[0], new[1])


@triton.jit
def folded(acc, COMBINE: tl.constexpr):
    """An accumulator without all its dims but the first."""
    if COMBINE == "argmax" or COMBINE == "argmin":
        return _folded_with_index(acc[0], acc[1], COMBINE)
    elif len(acc[0].shape) == 3:
        return _folded(_folded(acc, 2, COMBINE), 1, COMBINE)
    else:
        return _folded(acc, 1, COMBINE)


@triton.jit
def _folded_with_index(v, index, COMBINE: tl.constexpr):
    # The value first, then the first index where it is: one instruction an element, and three.
    best = folded((v,), "max" if COMBINE == "argmax" else "min")[0]
    all_best = best[:, None]
    if len(v.shape) == 3:
        all_best = best[:, None, None]
    hit = v == all_best
    if v.dtype != tl.int32 and v.dtype != tl.int64:
        hit = hit | (v != v)  # where there is a NaN, the best is one
    last = tl.full(index.shape, highest(index.dtype), index.dtype)
    return best, folded((tl.where(hit, index, last),), "min")[0]


@triton.jit
def _folded(acc, axis: tl.constexpr, COMBINE: tl.constexpr):
    if COMBINE == "sum":
        return (tl.reduce(acc[0], axis, _sum),)
    elif COMBINE == "prod":
        return (tl.reduce(acc[0], axis, _prod),)
    elif COMBINE == "max":
        return (tl.reduce(acc[0], axis, _max),)
    elif COMBINE == "min":
        return (tl.reduce(acc[0], axis, _min),)
    elif COMBINE == "minmax":
        return tl.reduce(acc, axis, _minmax)
    elif COMBINE == "moments":
        return tl.reduce(acc, axis, _moments)
    else:
        return tl.reduce(acc, axis, _logsumexp)


# --- whole tiles (BLOCK_K, BLOCK_O, BLOCK_I) as accumulators of their rows


@triton.jit
def tile_moments(v, mask, number):
    """(BLOCK_K,) moments of `number` elements a row: the mean first, then the distances."""
    zero = tl.zeros_like(v)
    n = tl.cast(number, tl.float64).to(v.dtype)
    safe = tl.where(n > 0, n, 1.0)
    mean = _quotient(tl.sum(tl.sum(tl.where(mask, v, zero), 2), 1), safe)
    distance = tl.where(mask, v - mean[:, None, None], zero)
    # What rounding of the mean leaves of the sum of distances is taken off again.
    left = tl.sum(tl.sum(distance, 2), 1)
    m2 = tl.sum(tl.sum(distance * distance, 2), 1) - _quotient(left * left, safe)
    return mean + _quotient(left, safe), m2, n + tl.zeros_like(mean)


@triton.jit
def tile_logsumexp(v, mask):
    """(BLOCK_K,) greatest value and sum of exponentials."""
    nothing = tl.full(v.shape, float("-inf"), v.dtype)
    top = tl.reduce(tl.reduce(tl.where(mask, v, nothing), 2, _max), 1, _max)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    exp = tl.exp(v - shift[:, None, None])
    return top, tl.sum(tl.sum(tl.where(mask, exp, tl.zeros_like(v)), 2), 1)


# --- results


@triton.jit
def finished(acc, count, FINISH: tl.constexpr, P: tl.constexpr):
    """The results, one or two, of an accumulator of `count` elements."""
    if FINISH == "mean":
        return (_quotient(acc[0], _as_float(count, acc[0].dtype)),)
    elif FINISH == "positive":  # what starts below 0 is false of no elements
        return ((acc[0] > 0).to(tl.uint8),)
    elif FINISH == "sqrt":
        return (_root(acc[0]),)
    elif FINISH == "root":
        return (_pth_root(acc[0], P),)
    elif FINISH == "index":
        return (acc[1],)
    elif FINISH == "both":
        return acc[0], acc[1]
    elif FINISH == "var":
        return (_variance(acc, count, P),)
    elif FINISH == "std":
        return (_root(_variance(acc, count, P)),)
    elif FINISH == "var mean":
        return _variance(acc, count, P), acc[0]
    elif FINISH == "std mean":
        return _root(_variance(acc, count, P)), acc[0]
    elif FINISH == "log":
        shift = tl.where(tl.abs(acc[0]) == float("inf"), 0.0, acc[0])
        return (tl.log(acc[1].to(tl.float64)) + shift,)
    else:
        return (acc[0],)


@triton.jit
def _as_float(count, DTYPE: tl.constexpr):
    return tl.cast(count, tl.float64).to(DTYPE)


@triton.jit
def _variance(acc, count, CORRECTION: tl.constexpr):
    # NaN for no elements at all.
    divisor = tl.cast(count, tl.float64) - CORRECTION
    return _quotient(acc[1], tl.zeros_like(acc[1]) + divisor.to(acc[1].dtype))


@triton.jit
def _pth_root(x, P: tl.constexpr):
    if P == 1.0:
        return x
    elif P == 2.0:
        return _root(x)
    elif P == 4.0:
        return _root(_root(x))
    elif P == 0.5:
        return x * x
    elif P == -1.0:
        return 1.0 / x
    else:
        return tl.exp2(tl.log2(x.to(tl.float64)) * (1.0 / P)).to(x.dtype)


__all__ = [
    "as_dtype",
    "beats",
    "combined",
    "finished",
    "folded",
    "highest",
    "loaded",
    "lowest",
    "nothing_like",
    "power",
    "single",
    "start",
    "tile_logsumexp",
    "tile_moments",
]
