"""The best tokens of each head in one Triton launch; the twin of `compaction.choose`.

Positive floats are ordered as their bits are: the bits of the last score that stays are found one by one, each by a
count, so nothing is sorted.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _order(scores, first, tokens, LANES: tl.constexpr):
    """What a tile of scores is ordered by, -1 behind the last."""
    token = first + tl.arange(0, LANES)
    bits = tl.load(scores + token, mask=token < tokens, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return token, tl.where(token < tokens, bits, -1)


@triton.jit
def _number(scores, tokens, least, LANES: tl.constexpr):
    """How many scores are ordered at `least` or above."""
    number = tl.zeros((LANES,), tl.int32)
    for first in range(0, tokens, LANES):
        _, bits = _order(scores, first, tokens, LANES)
        number += (bits >= least).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit(do_not_specialize=["tokens", "width"], do_not_specialize_on_alignment=["counts"])
def choose(scores, counts, indices, tokens, width, LANES: tl.constexpr):
    """Program h: the `counts[h]` tokens of head h with the largest `scores` `[heads, tokens]`, of equals the newest.

    `indices` `[heads, width]` ascend and end in -1.
    """
    head = tl.program_id(0).to(tl.int64)
    scores += head * tokens
    indices += head * width
    count = tl.load(counts + head).to(tl.int32)
    level = 0
    for i in range(31):
        higher = level | (1 << (30 - i))
        level = tl.where(_number(scores, tokens, higher, LANES) >= count, higher, level)
    older = _number(scores, tokens, level, LANES) - count  # of those equal to the level, so many do not stay
    taken = 0
    met = 0
    for first in range(0, tokens, LANES):
        token, bits = _order(scores, first, tokens, LANES)
        same = (bits == level).to(tl.int32)
        stays = (bits > level) | ((same > 0) & (met + tl.cumsum(same, 0) > older))
        place = taken + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(indices + place, token.to(tl.int64), mask=stays & (place < count))
        taken += tl.sum(stays.to(tl.int32), 0)
        met += tl.sum(same, 0)
    for first in range(0, width, LANES):
        place = first + tl.arange(0, LANES)
        tl.store(indices + place, -1, mask=(place >= count) & (place < width))
