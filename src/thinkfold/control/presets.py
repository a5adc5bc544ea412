"""The numbers of every rule, by preset: those of the sources that the rules name, or chosen on Pebble's traces.

That an answer comes again says little; how sure it is says nearly all (docs/control.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinkfold.control.confidence import ConfidenceRule
from thinkfold.control.consistency import ConsistencyRule, HopelessRule
from thinkfold.control.entropy import EntropyRule
from thinkfold.control.loops import LoopRule
from thinkfold.control.margin import MarginRule
from thinkfold.control.rule import Rule
from thinkfold.control.schedule import LookRule
from thinkfold.types import ControlParams, Preset

KNOB_MIN_TOKENS = 128
KNOB_MIN_PEEKS = 3


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules in the order in which they are asked, and when to look for them."""

    rules: tuple[Rule, ...] = ()
    look: LookRule | None = None


PRESETS: Mapping[Preset, RuleSet] = {
    Preset.EXACT: RuleSet(),
    Preset.CONSERVATIVE: RuleSet(
        (MarginRule(0.0), ConsistencyRule(3, 3, min_confidence=0.98, each=True), LoopRule()),
        LookRule(peeks=True, probes=True),
    ),
    Preset.BALANCED: RuleSet(
        (
            MarginRule(0.25, agreeing_probes=2),
            ConsistencyRule(2, 2, min_confidence=0.98, each=True),
            LoopRule(),
        ),
        LookRule(peeks=True, probes=True),
    ),
    Preset.AGGRESSIVE: RuleSet(
        (
            MarginRule(1.0),
            EntropyRule(level=0.3, variance=1e-4, min_peeks=10, min_tokens=512),
            ConsistencyRule(2, 2, min_confidence=0.95, each=True),
            ConfidenceRule(0.995, stated=False),
            HopelessRule(),
            LoopRule(),
        ),
        LookRule(peeks=True, probes=True),
    ),
}


def rules_for(params: ControlParams) -> RuleSet:
    """The rules that a request asks for: its preset's, and one for each knob."""
    preset = PRESETS[Preset(params.preset)] if params.preset else RuleSet()
    knobs = params.early_stop
    if knobs is None:
        return preset
    rules: list[Rule] = []
    if knobs.entropy is not None:
        rules.append(EntropyRule(knobs.entropy, variance=None, min_peeks=KNOB_MIN_PEEKS, min_tokens=KNOB_MIN_TOKENS))
    if knobs.confidence is not None:
        rules.append(ConfidenceRule(knobs.confidence, stated=True))
    if knobs.consistency is not None:
        rules.append(ConsistencyRule(*knobs.consistency))
    look = LookRule(
        peeks=knobs.entropy is not None or preset.look is not None,
        probes=knobs.needs_probes or preset.look is not None,
        gated=preset.look is not None,
    )
    return RuleSet((*rules, *preset.rules), look)
