"""When to look: peeks at ticks that grow with the thinking, and probes where a peek says that an answer is there."""

from __future__ import annotations

from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import Action, AtBoundary, BoundaryKind, Observation, Peek, Peeked, Probe

MAX_PROBE_TOKENS = 32
EXPECTED_PROBE_TOKENS = 48  # before the first one came back: forced suffix and answer


@dataclass(frozen=True, slots=True)
class LookRule:
    """Looks each clamp(`tick_share` · length, `tick_min`, `tick_max`) tokens, at the end of a paragraph or segment.

    `gated` probes do not come by the tick: they follow a peek whose entropy is at most `open_entropy` nats at once, or
    come where the margin is at most `open_margin` nats. A peek costs half as much as a probe, and a first token that is
    open says enough. Probes wait until all looks stay within `look_share` of the thinking, the first `free_probes`
    excepted. An answer with a probability of `sure` is asked for again `again` tokens later, at any boundary.
    """

    peeks: bool
    probes: bool
    gated: bool = True
    tick_share: float = 0.08
    tick_min: int = 256
    tick_max: int = 512
    look_share: float = 0.06
    free_probes: int = 2
    open_entropy: float = 0.3
    open_margin: float = 4.0
    sure: float = 0.95
    again: int = 128
    name: str = "look"

    def decide(self, seen: Observation, facts: Facts) -> Action | None:
        if isinstance(seen, Peeked):
            return self._probe(facts) if self.gated and seen.entropy <= self.open_entropy else None
        if not isinstance(seen, AtBoundary):
            return None
        since_probe = facts.thinking_tokens - facts.last_probe
        if since_probe >= self.again and self._was_sure(facts):
            return self._probe(facts)
        if seen.kind is BoundaryKind.SENTENCE:
            return None
        tick = min(max(self.tick_share * facts.thinking_tokens, self.tick_min), self.tick_max)
        opened = not self.gated or seen.margin <= self.open_margin  # an unknown margin, NaN, opens nothing
        if since_probe >= tick and opened and (probe := self._probe(facts)):
            return probe
        rested = facts.thinking_tokens - max(facts.last_peek, facts.last_probe) >= tick
        return Peek() if self.peeks and rested and seen.kind is not BoundaryKind.TRANSITION else None

    def _was_sure(self, facts: Facts) -> bool:
        last = facts.probes[-1] if facts.probes else None
        return last is not None and last.answer is not None and last.confidence >= self.sure

    def _probe(self, facts: Facts) -> Probe | None:
        """A probe, if it is asked for and looks may still cost that much."""
        count, spent = len(facts.probes), facts.probe_tokens + facts.peek_tokens
        expected = facts.probe_tokens / count if count else EXPECTED_PROBE_TOKENS
        affordable = count < self.free_probes or spent + expected <= self.look_share * facts.thinking_tokens
        return Probe(MAX_PROBE_TOKENS) if self.probes and affordable else None
