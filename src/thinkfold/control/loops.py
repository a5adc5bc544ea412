"""Loops: thinking repeats itself word for word. Ends thinking instead of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        period = tail_period(list(facts.recent), self.min_repeats, self.min_tokens)
        return None if period is None else EndThinking(self.name, f"the last {period} tokens repeat")


def tail_period(tokens: Sequence[int], min_repeats: int, min_tokens: int) -> int | None:
    """The shortest period of the end of `tokens` that holds for enough repeats and tokens; None without one.

    Prefix function of the reversed tokens (Knuth, Morris, Pratt 1977): linear.
    """
    backwards = tokens[::-1]
    borders = [0] * len(backwards)
    best: int | None = None
    for index in range(1, len(backwards)):
        border = borders[index - 1]
        while border and backwards[index] != backwards[border]:
            border = borders[border - 1]
        borders[index] = border + (backwards[index] == backwards[border])
        length = index + 1
        period = length - borders[index]
        if length >= min_tokens and length >= min_repeats * period and (best is None or period < best):
            best = period
    return best
