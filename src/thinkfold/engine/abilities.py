"""What an engine may be able to do, by the names that `/v1/models` uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Ability = Literal["native", "emulated", "not available"]

NAMES = (
    "streaming",
    "token_ids",
    "reasoning_split",
    "thinking_budget",
    "end_thinking",
    "inject",
    "probes",
    "early_stop.margin",
    "early_stop.entropy",
    "early_stop.confidence",
    "early_stop.consistency",
    "votes",
    "vote.confidence",
    "best_of",
    "search",
    "logprobs",
    "logit_bias",
    "response_format",
    "tiers",
    "sessions",
    "costs.kv",
    "fold",
    "pause",
    "fork",
    "partial",
    "prefill",
)


def own_abilities(*, thinks: bool, enforced: bool) -> Mapping[str, Ability]:
    """Of thinkfold's own engine: all, but for what is about thinking where there is none, or none that can be ended."""
    thinking = ("reasoning_split", "thinking_budget", "fold")
    ending = ("thinking_budget", "end_thinking", "probes", "search", *(n for n in NAMES if n.startswith("early_stop.")))
    missing = (() if thinks else thinking) + (() if enforced else ending)
    return {name: "not available" if name in missing else "native" for name in NAMES}
