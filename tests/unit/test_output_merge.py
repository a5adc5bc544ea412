"""News that a slow reader gets together say the same as one by one, rollbacks included."""

from __future__ import annotations

import copy
import itertools

import pytest

from thinkfold.types.output import CompletionOutput, TokenStats


def stat(value: int) -> TokenStats:
    return TokenStats(float(value), 0.0, 0.0, 0.0)


def told(text: str, first: int, count: int, restart: int | None = None) -> CompletionOutput:
    """News of sampled tokens `[first, first + count)`; with `restart` their text is the whole text so far."""
    stats = [stat(100 * len(text) + i) for i in range(first, first + count)]
    return CompletionOutput(0, text=text, stats=stats, num_output_tokens=first + count, restart=restart)


STREAM = [
    told("a", 0, 5),
    told("b", 5, 5),
    told("a b c", 7, 2, restart=7),
    told("d", 9, 4),
    told("a e", 6, 3, restart=6),
    told("a e f", 8, 3, restart=8),
]


@pytest.mark.parametrize("cuts", [cuts for n in range(6) for cuts in itertools.combinations(range(1, 6), n)])
def test_merged_news_equal_single_ones(cuts: tuple[int, ...]) -> None:
    alone = CompletionOutput(0)
    for news in STREAM:
        alone.merge(copy.deepcopy(news))
    together = CompletionOutput(0)
    for a, b in itertools.pairwise((0, *cuts, len(STREAM))):
        pending = copy.deepcopy(STREAM[a])
        for news in STREAM[a + 1 : b]:
            pending.merge(copy.deepcopy(news))
        together.merge(pending)
    assert (together.text, together.stats) == (alone.text, alone.stats)
    assert len(alone.stats) == alone.num_output_tokens == 11
