"""Loops: thinking repeats itself word for word. Ends thinking instead of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import eq

from thinkfold.control.facts import Facts
from thinkfold.control.rule import EndThinking, Observation, Wrote


@dataclass(frozen=True, slots=True)
class LoopRule:
    """The last tokens are one piece at least `min_repeats` times over, `min_tokens` tokens or more in all."""

    min_repeats: int = 4
    min_tokens: int = 256
    name: str = "loop"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        if not isinstance(seen, Wrote) or len(facts.recent) < self.min_tokens:
            return None
        period = tail_period(facts.recent, self.min_repeats, self.min_tokens)
        return None if period is None else EndThinking(self.name, f"the last {period} tokens repeat")


def tail_period(tokens: Sequence[int], min_repeats: int, min_tokens: int) -> int | None:
    """The shortest period of the end of `tokens` that holds for enough repeats and tokens; None without one.

    Each place of the last token is compared with the end until they differ, which most do within a few tokens.
    """
    backwards = list(reversed(tokens))
    last, most = backwards[0], len(backwards) // min_repeats
    for period in [place for place, token in enumerate(backwards[: most + 1]) if token == last and place]:
        length = max(min_tokens, min_repeats * period)
        if length <= len(backwards) and all(map(eq, islice(backwards, period, length), backwards)):
            return period
    return None
