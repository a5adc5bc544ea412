"""Confidence: the model says that it is sure, or answers a probe as if it were."""

from __future__ import annotations

from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import AtBoundary, EndThinking, Observation, Probed


@dataclass(frozen=True, slots=True)
class ConfidenceRule:
    """With `stated`, a model's own `<confidence>` tags count and silence its probes; else probes only."""

    threshold: float
    stated: bool
    name: str = "confidence"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        said = facts.stated_confidence if self.stated else None
        if said is not None:
            if isinstance(seen, AtBoundary) and said > self.threshold:
                return EndThinking(self.name, f"the model states {said:g}")
            return None
        if not isinstance(seen, Probed) or facts.probes[-1].answer is None:
            return None
        probability = facts.probes[-1].confidence
        if probability <= self.threshold:
            return None
        return EndThinking(self.name, f"a probe's answer has probability {probability:.3f}")
