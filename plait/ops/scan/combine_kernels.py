"""What a scan combines, by name: the vocabulary of the scan engine.

An accumulator is a tuple of tensors. Of each `combine` it holds:

    sum, prod     the value
    max, min      the value, its index
    logsumexp     the greatest value `top`; the sum of exp(x - top) less the 1 of `top` itself

Maxima and minima propagate NaN; of equal values the last index counts, and of NaNs, too. Without
the 1 of its greatest term a sum of exponentials keeps the digits that its logarithm near 0 needs.

A tile of a block's rows is (ROWS, BLOCK), and SERIAL is 0. Where the next row is closer than the
next element it is (SERIAL, SEGMENTS * ROWS): segments of SERIAL elements, each of which one thread
scans by itself, of all rows side by side.
"""

import triton
import triton.language as tl

from plait.ops.reduction.combine_kernels import as_dtype, highest, lowest


@triton.jit
def nothing(like, COMBINE: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr):
    """The accumulator of no elements, of the shape of `like`."""
    if COMBINE == "sum":
        return (tl.zeros(like.shape, ACC),)
    elif COMBINE == "prod":
        return (tl.full(like.shape, 1, ACC),)
    elif COMBINE == "max":
        return tl.full(like.shape, lowest(ACC), ACC), tl.full(like.shape, -1, INDEX)
    elif COMBINE == "min":
        return tl.full(like.shape, highest(ACC), ACC), tl.full(like.shape, -1, INDEX)
    else:
        return tl.full(like.shape, float("-inf"), ACC), tl.full(like.shape, -1.0, ACC)


@triton.jit
def elements(
    x, place, COMBINE: tl.constexpr, THROUGH: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr
):
    """The elements of a tile as accumulators, by way of dtype THROUGH; `place` is where in its row
    each one is."""
    v = as_dtype(x, THROUGH).to(ACC)
    if COMBINE == "max" or COMBINE == "min":
        return v, tl.zeros(v.shape, INDEX) + place.to(INDEX)
    elif COMBINE == "logsumexp":
        return v, tl.zeros_like(v)
    else:
        return (v,)


@triton.jit
def chosen(mask, acc, other, COMBINE: tl.constexpr):
    """`acc` where `mask`, else `other`."""
    if COMBINE == "sum" or COMBINE == "prod":
        return (tl.where(mask, acc[0], other[0]),)
    else:
        return tl.where(mask, acc[0], other[0]), tl.where(mask, acc[1], other[1])


@triton.jit
def across(x, SERIAL: tl.constexpr):
    """Values of the rows of a tile, or of its segments, as a tile that is 1 long."""
    if SERIAL == 0:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _across(acc, SERIAL: tl.constexpr, COMBINE: tl.constexpr):
    if COMBINE == "sum" or COMBINE == "prod":
        return (across(acc[0], SERIAL),)
    else:
        return across(acc[0], SERIAL), across(acc[1], SERIAL)


@triton.jit
def _reshaped(acc, shape: tl.constexpr, COMBINE: tl.constexpr):
    if COMBINE == "sum" or COMBINE == "prod":
        return (tl.reshape(acc[0], shape),)
    else:
        return tl.reshape(acc[0], shape), tl.reshape(acc[1], shape)


# --- combine functions: what comes before, and what comes after it


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _prod(a, b):
    return a * b


@triton.jit
def _max(a, i, b, j):
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)


@triton.jit
def _min(a, i, b, j):
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)


# A reduction keeps no order: the index tells which of two comes after the other.


@triton.jit
def _max_in_any_order(a, i, b, j):
    tie = (a == b) | ((a != a) & (b != b))
    keep = (a > b) | ((a != a) & (b == b)) | (tie & (i > j))
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def _min_in_any_order(a, i, b, j):
    tie = (a == b) | ((a != a) & (b != b))
    keep = (a < b) | ((a != a) & (b == b)) | (tie & (i > j))
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def _logsumexp(a, r, b, s):
    swap = ~(a >= b)  # also where one is NaN: it becomes the top, or the difference from it NaN
    top = tl.where(swap, b, a)
    low = tl.where(swap, a, b)
    # Equal infinities have no difference; any finite sum will do there.
    power = tl.exp(tl.where(a == b, 0.0, low - top).to(a.dtype))
    above, below = tl.where(swap, s, r), tl.where(swap, r, s)
    return tl.where(low == low, top, low), above + (1.0 + below) * power


@triton.jit
def combined(acc, new, COMBINE: tl.constexpr):
    """Two accumulators as one; `new` comes after `acc`."""
    if COMBINE == "sum":
        return (acc[0] + new[0],)
    elif COMBINE == "prod":
        return (acc[0] * new[0],)
    elif COMBINE == "max":
        return _max(acc[0], acc[1], new[0], new[1])
    elif COMBINE == "min":
        return _min(acc[0], acc[1], new[0], new[1])
    else:
        return _logsumexp(acc[0], acc[1], new[0], new[1])


@triton.jit
def _scanned(acc, axis: tl.constexpr, COMBINE: tl.constexpr):
    if acc[0].shape[axis] == 1:
        return acc
    elif COMBINE == "sum":
        return (tl.cumsum(acc[0], axis),)
    elif COMBINE == "prod":
        return (tl.associative_scan(acc[0], axis, _prod),)
    elif COMBINE == "max":
        return tl.associative_scan(acc, axis, _max)
    elif COMBINE == "min":
        return tl.associative_scan(acc, axis, _min)
    else:
        return tl.associative_scan(acc, axis, _logsumexp)


@triton.jit
def _folded(acc, axis: tl.constexpr, COMBINE: tl.constexpr):
    if COMBINE == "sum":
        return (tl.reduce(acc[0], axis, _sum),)
    elif COMBINE == "prod":
        return (tl.reduce(acc[0], axis, _prod),)
    elif COMBINE == "max":
        return tl.reduce(acc, axis, _max_in_any_order)
    elif COMBINE == "min":
        return tl.reduce(acc, axis, _min_in_any_order)
    else:
        return tl.reduce(acc, axis, _logsumexp)


# Prefixes without their last element: an accumulator of all but the last, then one of all. What
# comes after leaves off its own last element only.


@triton.jit
def _sum_before(e, a, f, b):
    return a + f, a + b


@triton.jit
def _prod_before(e, a, f, b):
    return a * f, a * b


@triton.jit
def _max_before(e, k, a, i, f, m, b, j):
    x, n = _max(a, i, f, m)
    y, o = _max(a, i, b, j)
    return x, n, y, o


@triton.jit
def _min_before(e, k, a, i, f, m, b, j):
    x, n = _min(a, i, f, m)
    y, o = _min(a, i, b, j)
    return x, n, y, o


@triton.jit
def _logsumexp_before(e, k, a, i, f, m, b, j):
    x, n = _logsumexp(a, i, f, m)
    y, o = _logsumexp(a, i, b, j)
    return x, n, y, o


@triton.jit
def _before(acc, none, COMBINE: tl.constexpr):
    """Of accumulators (SEGMENTS, ROWS) those of all segments before each; `none`: of nothing."""
    if COMBINE == "sum":
        both = tl.associative_scan((none[0], acc[0]), 0, _sum_before)
        return (both[0],)
    elif COMBINE == "prod":
        both = tl.associative_scan((none[0], acc[0]), 0, _prod_before)
        return (both[0],)
    else:
        all4 = (none[0], none[1], acc[0], acc[1])
        if COMBINE == "max":
            both = tl.associative_scan(all4, 0, _max_before)
        elif COMBINE == "min":
            both = tl.associative_scan(all4, 0, _min_before)
        else:
            both = tl.associative_scan(all4, 0, _logsumexp_before)
        return both[0], both[1]


@triton.jit
def folded(acc, ROWS: tl.constexpr, SERIAL: tl.constexpr, COMBINE: tl.constexpr):
    """Of each row of a tile (ROWS,) the accumulator of all its places."""
    if SERIAL == 0:
        return _folded(acc, 1, COMBINE)
    else:
        segments: tl.constexpr = acc[0].shape[1] // ROWS
        totals = _reshaped(_folded(acc, 0, COMBINE), [segments, ROWS], COMBINE)
        return _folded(totals, 0, COMBINE)


@triton.jit
def prefixes(
    acc, carry, CARRIED: tl.constexpr, ROWS: tl.constexpr, SERIAL: tl.constexpr,
    COMBINE: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Of each place of a tile the accumulator of its row up to there; where CARRIED, `carry`
    (ROWS,) comes before."""
    if SERIAL == 0:
        scanned = _scanned(acc, 1, COMBINE)
        if CARRIED:
            return combined(_across(carry, SERIAL, COMBINE), scanned, COMBINE)
        else:
            return scanned
    else:
        segments: tl.constexpr = acc[0].shape[1] // ROWS
        scanned = _scanned(acc, 0, COMBINE)
        if segments == 1 and not CARRIED:
            return scanned
        elif segments == 1:
            return combined(_across(carry, SERIAL, COMBINE), scanned, COMBINE)
        else:
            totals = _reshaped(_folded(acc, 0, COMBINE), [segments, ROWS], COMBINE)
            before = _before(totals, nothing(totals[0], COMBINE, ACC, INDEX), COMBINE)
            if CARRIED:
                before = combined(_across(carry, SERIAL, COMBINE), before, COMBINE)
            before = _reshaped(before, [segments * ROWS], COMBINE)
            return combined(_across(before, SERIAL, COMBINE), scanned, COMBINE)


# --- results


@triton.jit
def _log_of_one_more(r):
    """log(1 + r) for r >= 0, precise near 0."""
    if r.dtype == tl.float64:
        u = 1.0 + r
        rounded = u - 1.0  # Higham, Accuracy and Stability of Numerical Algorithms, section 1.14.1
        return tl.where(rounded == 0.0, r, tl.log(u) * (r / tl.where(rounded == 0.0, 1.0, rounded)))
    else:
        z = r / (2.0 + r)  # log(1 + r) = 2 atanh(z), z at most 1/9
        q = z * z
        near = 2.0 * z + 2.0 * z * q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9))))
        return tl.where(r < 0.25, near, tl.log(1.0 + r))


@triton.jit
def value_of(acc, COMBINE: tl.constexpr):
    """The value of accumulators."""
    if COMBINE == "logsumexp":
        return acc[0] + _log_of_one_more(acc[1])
    else:
        return acc[0]


__all__ = [
    "across",
    "chosen",
    "combined",
    "elements",
    "folded",
    "nothing",
    "prefixes",
    "value_of",
]
