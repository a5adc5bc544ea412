"""When to look: peeks at paragraphs, probes at ticks that grow with the thinking, both within a share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinkfold.control.facts import Facts
from thinkfold.control.rule import Action, AtBoundary, Boundary, Observation, Peek, Probe

MAX_PROBE_TOKENS = 32
EXPECTED_PROBE_TOKENS = 48  # before the first one came back: forced suffix and answer


@dataclass(frozen=True, slots=True)
class LookRule:
    """Peeks at most every `peek_every` tokens; probes each clamp(`tick_share` · length, tick_min, tick_max).

    Probes stay below `probe_share` of the thinking, the first `free_probes` excepted. `gated` ones
    wait until the peeked entropy fell by `gate_fall` or the margin is at most `gate_margin` nats;
    where neither is known there is no gate.
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
    name: str = "look"

    def decide(self, seen: Observation, facts: Facts) -> Action | None:
        if not isinstance(seen, AtBoundary) or seen.kind is Boundary.SENTENCE:
            return None
        if self.probes and self._probe_is_due(facts):
            return Probe(MAX_PROBE_TOKENS)
        rested = not facts.last_peek or facts.thinking_tokens - facts.last_peek >= self.peek_every
        return Peek() if self.peeks and rested and seen.kind is not Boundary.TRANSITION else None

    def _probe_is_due(self, facts: Facts) -> bool:
        length, count = facts.thinking_tokens, len(facts.probes)
        tick = min(max(self.tick_share * length, self.tick_min), self.tick_max)
        if length - facts.last_probe < tick:
            return False
        expected = facts.probe_tokens / count if count else EXPECTED_PROBE_TOKENS
        if count >= self.free_probes and facts.probe_tokens + expected > self.probe_share * length:
            return False
        return not self.gated or self._is_open(facts)

    def _is_open(self, facts: Facts) -> bool:
        known_entropy, known_margin = facts.num_peeks > 0, not math.isnan(facts.margin)
        if not (known_entropy or known_margin):
            return True
        fell = known_entropy and facts.entropy <= (1 - self.gate_fall) * facts.first_entropy
        return fell or (known_margin and facts.margin <= self.gate_margin)
