"""Two lists of most likely tokens from sums of different order, or machines: equal up to a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def assert_same_top(mine: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]], error: float) -> None:
    """Each rank has the same log-prob within `error`, and so has each token.

    So only tokens as near as that trade places. One that a list lacks is at most its last.
    """
    assert [value for _, value in mine] == pytest.approx([value for _, value in others], abs=error)
    one, two = dict(mine), dict(others)
    for token in one | two:
        assert one.get(token, mine[-1][1]) == pytest.approx(two.get(token, others[-1][1]), abs=error), token
