"""Margin: the model itself would nearly end thinking here.

At the end of a sentence, log p(top 1) - log p(end marker) is at most a threshold
(ThinkBrake, arXiv 2510.00546). Costs nothing: both are in the row that is sampled anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import AtBoundary, EndThinking, Observation


@dataclass(frozen=True, slots=True)
class MarginRule:
    """`threshold` in nats; the last `agreeing_probes` probes must agree, 0 asks for none."""

    threshold: float
    min_tokens: int = 256
    agreeing_probes: int = 0
    name: str = "margin"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        if not isinstance(seen, AtBoundary) or seen.thinking_tokens < self.min_tokens:
            return None
        if math.isnan(seen.margin) or seen.margin > self.threshold:
            return None
        if self.agreeing_probes and facts.agreeing(self.agreeing_probes) < self.agreeing_probes:
            return None
        return EndThinking(self.name, f"margin {seen.margin:.2f} nats is at most {self.threshold:g}")
