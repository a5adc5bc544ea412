"""Profiles of `thinkfold serve`: settings that go together for one kind of work, each with its reason.

A profile only stands in for what flags, environment and file leave open. What it sets exists as an option of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from thinkfold.errors import ParameterError

GIB = 1 << 30


class Choice(NamedTuple):
    """One setting of a profile, and why."""

    value: Any
    why: str


PROFILES: Mapping[str, Mapping[str, Choice]] = {
    "agents": {
        "default_thinking_budget": Choice(4_096, "a step of an agent is short; who needs more names it"),
        "kv_cache_dtype": Choice("fp8_e4m3", "many short requests at once: half the KV each"),
        "fold_policy": Choice("pressure", "short thinking is folded only instead of forcing a request out"),
        "early_stop": Choice(
            "balanced", "a step whose answer is settled goes on at once; requests with tools only drop loops"
        ),
    },
    "maths": {
        "default_thinking_budget": Choice(65_536, "proofs and long sums think for tens of thousands of tokens"),
        "fold_policy": Choice("pressure", "long thinking outgrows the pool: closed segments give way first"),
        "fold_at_answer": Choice("recycle", "an answer reads little of its thinking: what is closed is folded"),
        "fold_prefer": Choice("fold", "admission counts on the folded peak, so more requests think at once"),
    },
    "chains": {
        "fold_at_answer": Choice(
            "swap", "calls of a chain follow each other: thinking makes place for the next answer"
        ),
        "swap_space_bytes": Choice(4 * GIB, "swapping needs host memory"),
        "session_ttl_s": Choice(14_400.0, "a chain may rest for hours between two calls and keep its budget"),
        "step_cache_ttl_s": Choice(14_400.0, "a step that comes up again in a chain is answered from the cache"),
    },
}


def settings_of(profile: str | None) -> dict[str, Any]:
    """What a profile sets. Raises ParameterError for one that is not there."""
    if profile is None:
        return {}
    if profile not in PROFILES:
        raise ParameterError("profile", f"must be one of {', '.join(PROFILES)}, got {profile!r:.60}")
    return {name: choice.value for name, choice in PROFILES[profile].items()}


def explained(profile: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """One line a setting: what it is now, and the reason, or what has overruled the profile."""
    for name, choice in PROFILES[profile].items():
        if origins[name] == "profile":
            yield f"profile {profile}: {name} = {choice.value} ({choice.why})"
        else:
            yield f"profile {profile}: {name} = {values[name]} (your {origins[name]}; the profile has {choice.value})"
