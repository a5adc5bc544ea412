"""Consistency: probes give the same answer again and again, or never will.

After Dynasor (arXiv 2412.20993), with hedge words matched as words, all of the window compared,
and the probability of the answers asked for (DEER, arXiv 2504.15895).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from thinkfold.control.facts import Facts
from thinkfold.control.rule import EndThinking, Observation, Probed


@dataclass(frozen=True, slots=True)
class ConsistencyRule:
    """`agreeing` of the last `window` probes give the last one's answer.

    The mean probability of these answers is at least `min_confidence`; with `each`, that of every one.
    """

    agreeing: int
    window: int
    min_confidence: float = 0.0
    each: bool = False
    name: str = "consistency"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        if not isinstance(seen, Probed) or len(facts.probes) < self.agreeing:
            return None
        if facts.agreeing(self.window) < self.agreeing:
            return None
        classes = facts.classes()
        recent = zip(facts.probes[-self.window :], classes[-self.window :], strict=True)
        trusted = [probe.confidence for probe, found in recent if found == classes[-1]]
        confidence = min(trusted) if self.each else fmean(trusted)
        if confidence < self.min_confidence:
            return None
        return EndThinking(self.name, f"{len(trusted)} of {self.window} probes agree at {confidence:.2f}")


@dataclass(frozen=True, slots=True)
class HopelessRule:
    """Many probes, most of them another answer than the one before, and none that the model believes in."""

    min_probes: int = 12
    max_flips: float = 0.6
    max_confidence: float = 0.4
    name: str = "hopeless"

    def decide(self, seen: Observation, facts: Facts) -> EndThinking | None:
        count = len(facts.probes)
        if not isinstance(seen, Probed) or count < self.min_probes:
            return None
        confidence = fmean(probe.confidence for probe in facts.probes[-self.min_probes :])
        if facts.flips() / count <= self.max_flips or confidence >= self.max_confidence:
            return None
        return EndThinking(self.name, f"{facts.flips()} of {count} probes changed the answer")
