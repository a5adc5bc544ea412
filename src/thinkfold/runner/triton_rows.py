"""Passes of a Triton program over one row of logits, and the search for a threshold that is made of them.

A threshold is found by bisection between logits that occur, so nothing is ordered. A pass reads V · 4 bytes, from the
L2 cache after the first. Sums are fp32 over lanes, always in the same order: neighbours change nothing.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MOST_LANES = 8192  # logits that a program looks at together
LANES_A_WARP = 512
LOG2_E = tl.constexpr(1.4426950408889634)


def launch_sizes(vocab_size: int) -> dict[str, Any]:
    """Lanes and warps of a program for rows of this length."""
    lanes = min(MOST_LANES, triton.next_power_of_2(vocab_size))
    return {"LANES": lanes, "num_warps": max(4, lanes // LANES_A_WARP)}


@triton.jit
def load(row, first, vocab, LANES: tl.constexpr):
    """Ids of the tile that starts at `first`, and their logits; -inf beyond the vocabulary."""
    ids = first + tl.arange(0, LANES)
    return ids, tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def weight_of(x, best, rate):
    """Probability over that of the most likely token: exp((x - best) / temperature)."""
    return tl.exp2((x - best) * rate)


@triton.jit
def ends(row, vocab, LANES: tl.constexpr):
    """The largest logit, the lowest id that has it, the smallest that is not -inf, and the largest of each lane."""
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    smallest = tl.full((LANES,), float("inf"), tl.float32)
    tile = tl.zeros((LANES,), tl.int32)
    for first in range(0, vocab, LANES):
        _, x = load(row, first, vocab, LANES)
        tile = tl.where(x > largest, first, tile)
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, tl.where(x > -float("inf"), x, float("inf")))
    best = tl.max(largest, 0)
    ids = tl.where(largest == best, tile + tl.arange(0, LANES), vocab)
    return best, tl.min(ids, 0), tl.min(smallest, 0), largest


@triton.jit
def _amount(row, vocab, level, best, rate, BY_MASS: tl.constexpr, LANES: tl.constexpr):
    """How many logits are at least `level`, or their weights' sum; the smallest of them, and the largest other one."""
    amount = tl.zeros((LANES,), tl.float32)
    above = tl.full((LANES,), float("inf"), tl.float32)
    below = tl.full((LANES,), -float("inf"), tl.float32)
    for first in range(0, vocab, LANES):
        _, x = load(row, first, vocab, LANES)
        inside = x >= level
        if BY_MASS:
            amount += tl.where(inside, weight_of(x, best, rate), 0.0)
        else:
            amount += tl.where(inside, 1.0, 0.0)
        above = tl.minimum(above, tl.where(inside, x, float("inf")))
        below = tl.maximum(below, tl.where(inside, -float("inf"), x))
    return tl.sum(amount, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def threshold(row, vocab, low, best, rate, goal, BY_MASS: tl.constexpr, LANES: tl.constexpr):
    """The largest logit for which it and all above come to `goal`; that is known of `low`, which occurs.

    Both ends are logits that occur, so it ends exactly, and outliers cost one pass each.
    """
    high = best
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        amount, above, below = _amount(row, vocab, middle, best, rate, BY_MASS, LANES)
        enough = amount >= goal
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit
def above(row, vocab, level, best, LANES: tl.constexpr):
    """How many logits are larger than `level`, what they lack to `best` in all, and the smallest of them."""
    number = tl.zeros((LANES,), tl.int32)
    lack = tl.zeros((LANES,), tl.float32)
    smallest = tl.full((LANES,), float("inf"), tl.float32)
    for first in range(0, vocab, LANES):
        _, x = load(row, first, vocab, LANES)
        number += (x > level).to(tl.int32)
        lack += tl.where(x > level, best - x, 0.0)
        smallest = tl.minimum(smallest, tl.where(x > level, x, float("inf")))
    return tl.sum(number, 0), tl.sum(lack, 0), tl.min(smallest, 0)


@triton.jit
def bound(crowd, least, best, k):
    """The `k`-th largest of a few numbers that are at hand, `least` where there are not so many."""
    low = least
    high = best
    if tl.sum((crowd >= least).to(tl.int32), 0) < k:
        high = least
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        inside = crowd >= middle
        if tl.sum(inside.to(tl.int32), 0) >= k:
            low = tl.min(tl.where(inside, crowd, float("inf")), 0)
        else:
            high = tl.max(tl.where(inside, -float("inf"), crowd), 0)
    return low


@triton.jit
def kth_largest(row, vocab, maxima, least, best, k, LANES: tl.constexpr):
    """The `k`-th largest logit of a row that has so many, how many are larger, and what these lack to `best` in all.

    The `k`-th largest of the lanes' maxima is never above it, and is it unless two of the largest share a lane:
    one pass tells, and only then the row is searched.
    """
    crowd = tl.max(tl.reshape(maxima, (min(LANES, 512), LANES // min(LANES, 512))), 1)
    low = bound(crowd, least, best, k)
    number, lack, smallest = above(row, vocab, low, best, LANES)
    if number >= k:
        low = threshold(row, vocab, smallest, best, 1.0, k.to(tl.float32), False, LANES)
        number, lack, smallest = above(row, vocab, low, best, LANES)
    return low, number, lack
