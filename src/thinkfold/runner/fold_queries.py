"""Which kept queries choose what stays of a span, and which judge the choice. Plain integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

AHEAD = (256, 768)  # queries of the past are turned to so many positions after the newest, in turn
HELD_OUT = 3  # the newest of so many late positions judge the fold and have no part in it
STAND_INS = 4 * HELD_OUT  # newest positions that stand for late ones where there are none yet


class FoldQueries(NamedTuple):
    """Logical positions, ascending. `late` and `past` choose, those of the past turned by `turns`; `held` judge."""

    late: list[int]
    past: list[int]
    turns: list[int]
    held: list[int]

    @classmethod
    def of(cls, positions: Sequence[int], end: int) -> FoldQueries:
        """From all kept `positions` for a span that ends at `end`. Late ones are as new as that or newer.

        A single or a second late position judges and chooses.
        """
        late = [p for p in positions if p >= end] or list(positions[-STAND_INS:])
        past = [p for p in positions if p < late[0]]
        turns = [late[-1] + AHEAD[i % len(AHEAD)] - p for i, p in enumerate(past)]
        apart = len(late) // HELD_OUT
        return cls(late[: len(late) - apart], past, turns, late[-apart:])
