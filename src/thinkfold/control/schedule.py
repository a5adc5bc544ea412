"""When to look: peeks at paragraphs, probes at ticks that grow with the thinking, both within a share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import Action, AtBoundary, BoundaryKind, Observation, Peek, Probe

MAX_PROBE_TOKENS = 32
EXPECTED_PROBE_TOKENS = 48  # before the first one came back: forced suffix and answer


@dataclass(frozen=True, slots=True)
class LookRule:
    """Peeks at most every `peek_every` tokens; probes each clamp(`tick_share` · length, tick_min, tick_max).

    Probes stay below `probe_share` of the thinking, the first `free_probes` excepted. `gated` ones
    wait until the peeked entropy fell by `gate_fall` or the margin is at most `gate_margin` nats;
    where neither is known there is no gate. An answer with a probability of `sure` is asked for
    again `tick_min` tokens later, at any boundary, so that it need not wait for the next tick.
    """

    peeks: bool
    probes: bool
    gated: bool = True
    peek_every: int = 128
    tick_share: float = 0.08
    tick_min: int = 128
    tick_max: int = 1024
    probe_share: float = 0.06
    free_probes: int = 2
    gate_fall: float = 0.30
    gate_margin: float = 4.0
    sure: float = 0.95
    name: str = "look"

    def decide(self, seen: Observation, facts: Facts) -> Action | None:
        if not isinstance(seen, AtBoundary):
            return None
        again = self._was_sure(facts)
        if self.probes and (again or seen.kind is not BoundaryKind.SENTENCE) and self._probe_is_due(facts, again):
            return Probe(MAX_PROBE_TOKENS)
        if seen.kind is BoundaryKind.SENTENCE:
            return None
        rested = not facts.last_peek or facts.thinking_tokens - facts.last_peek >= self.peek_every
        return Peek() if self.peeks and rested and seen.kind is not BoundaryKind.TRANSITION else None

    def _was_sure(self, facts: Facts) -> bool:
        last = facts.probes[-1] if facts.probes else None
        return last is not None and last.answer is not None and last.confidence >= self.sure

    def _probe_is_due(self, facts: Facts, again: bool) -> bool:
        length, count = facts.thinking_tokens, len(facts.probes)
        tick = self.tick_min if again else min(max(self.tick_share * length, self.tick_min), self.tick_max)
        if length - facts.last_probe < tick:
            return False
        expected = facts.probe_tokens / count if count else EXPECTED_PROBE_TOKENS
        if count >= self.free_probes and facts.probe_tokens + expected > self.probe_share * length:
            return False
        return again or not self.gated or self._is_open(facts)

    def _is_open(self, facts: Facts) -> bool:
        known_entropy, known_margin = facts.num_peeks > 0, not math.isnan(facts.margin)
        if not (known_entropy or known_margin):
            return True
        fell = known_entropy and facts.entropy <= (1 - self.gate_fall) * facts.first_entropy
        return fell or (known_margin and facts.margin <= self.gate_margin)
