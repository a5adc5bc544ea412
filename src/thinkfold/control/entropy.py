"""Entropy: the first token of the answer has stopped being open.

Running mean (and variance) of the entropy behind a peeked end marker are low
(EAT, arXiv 2509.26522, formula reimplemented).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import EndThinking, Observation, Peeked


@dataclass(frozen=True, slots=True)
class EntropyRule:
    """`level` in nats bounds the running mean, `variance` (nats²) the running variance, None does not."""

    level: float
    variance: float | None
    min_peeks: int
    min_tokens: int
    name: str = "entropy"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        if not isinstance(seen, Peeked) or facts.num_peeks < self.min_peeks or facts.thinking_tokens < self.min_tokens:
            return None
        if facts.entropy >= self.level or (self.variance is not None and facts.variance >= self.variance):
            return None
        return EndThinking(self.name, f"entropy {facts.entropy:.3f} nats over {facts.num_peeks} peeks")
