"""What a request may write: what can never fit is refused with both numbers, what is lowered is told."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from scripted import language

from thinkfold.engine.limits import Granter, Wish
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import CapacityError, UnsupportedError
from thinkfold.types import Clamp, FoldMode, FoldPolicy, Service, ThinkingParams, Tier

OFF = FoldPolicy(FoldMode.OFF)
EAGER = FoldPolicy(FoldMode.EAGER)


def granter(capacity: int, length: int = 16_384, default: int = 16_384) -> Granter:
    model = ModelInfo("m", "qwen3", length, 1536, capacity // 16, 16, 1, capacity, "qwen3", True, True)
    return Granter(model, language()[2], default_budget=default, default_enabled=True, switch=True)


def grant(capacity, max_tokens=None, fold=OFF, prompt=100, service=None, **thinking):
    wish = Wish(prompt, max_tokens, ThinkingParams(**thinking), fold, service or Service())
    return granter(capacity).grant(wish)


def test_ample_memory_clamps_nothing_that_was_not_asked_for():
    limits, policy = grant(100_000)
    assert (limits.max_tokens, limits.clamped) == (16_284, ())
    assert policy.budget == 16_284 - 1628
    assert grant(100_000, thinking_token_budget=-1)[0].clamped == ()
    assert grant(100_000, reasoning_effort="max")[0].clamped == ()
    assert grant(100_000, max_tokens=500)[0].clamped == ()


def test_case_39_max_tokens_that_can_never_fit_are_refused_with_both_numbers():
    with pytest.raises(
        CapacityError, match=r"^max_tokens: 5000 tokens can never fit: after a prompt of 100.* 3900 "
    ) as e:
        grant(4000, max_tokens=5000)
    assert e.value.field == "max_tokens"
    assert grant(4000, max_tokens=3900)[0].max_tokens == 3900


def test_folding_makes_room_for_what_would_not_fit_raw():
    limits, _ = grant(4000, max_tokens=5000, fold=EAGER)
    assert (limits.max_tokens, limits.clamped) == (5000, ())
    with pytest.raises(CapacityError, match="its thinking folded, this engine holds"):
        grant(1500, max_tokens=9000, fold=EAGER)


@pytest.mark.parametrize("budget", [3901, 12_000, 10**9])
def test_a_budget_that_can_never_fit_is_refused_with_both_numbers(budget):
    with pytest.raises(CapacityError, match=rf"^thinking_token_budget: {budget} tokens can never fit.* 3900 "):
        grant(4000, thinking_token_budget=budget)


def test_case_22_max_tokens_wins_over_a_larger_budget_and_the_reply_says_so():
    limits, policy = grant(4000, max_tokens=2000, thinking_token_budget=10**6)
    assert policy.budget == 2000 - 512
    assert limits.clamped == (Clamp("thinking_token_budget", 10**6, 1488, "max_tokens"),)


def test_what_is_longer_than_the_model_is_lowered_and_told():
    limits, policy = grant(100_000, max_tokens=10**6, thinking_token_budget=10**6)
    assert policy.budget == 16_284 - 1628
    assert limits.clamped == (
        Clamp("max_tokens", 10**6, 16_284, "model_length"),
        Clamp("thinking_token_budget", 10**6, 14_656, "max_tokens"),
    )
    limits, _ = grant(100_000, thinking_token_budget=20_000)
    assert limits.clamped == (Clamp("thinking_token_budget", 20_000, 14_656, "model_length"),)


@pytest.mark.parametrize(
    ("thinking", "field", "asked"),
    [
        ({}, "default_thinking_budget", 16_384),
        ({"reasoning_effort": "medium"}, "reasoning_effort", 16_384),
        ({"reasoning_effort": "max"}, "reasoning_effort", None),
        ({"thinking_token_budget": 3800}, "thinking_token_budget", 3800),
    ],
)
def test_what_the_pool_shortens_is_told_to_the_client_and_once_to_the_operator(thinking, field, asked, caplog):
    made = granter(4000)
    with caplog.at_level(logging.WARNING, "thinkfold.engine.limits"):
        for _ in range(3):
            limits, policy = made.grant(Wish(100, None, ThinkingParams(**thinking), OFF))
    assert limits.clamped == (
        Clamp("max_tokens", None, 3900, "kv_pool"),
        Clamp(field, asked, 3900 - 512, "kv_pool"),
    )
    assert (limits.max_tokens, policy.budget) == (3900, 3388)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2 and "KV pool of 250 pages of 16" in lines[0] and field in lines[1]


def test_without_thinking_only_max_tokens_counts():
    limits, policy = grant(4000, enabled=False)
    assert (policy.enabled, limits.clamped) == (False, (Clamp("max_tokens", None, 3900, "kv_pool"),))


def test_no_limit_stays_no_limit():
    limits, policy = grant(4000, thinking_token_budget=-1)
    assert policy.budget is None and [c.field for c in limits.clamped] == ["max_tokens"]


def test_a_tiers_budget_is_the_default_and_the_most_that_may_be_asked_for():
    tier = Service(Tier("quick", budget=1000))
    limits, policy = grant(100_000, service=tier)
    assert (policy.budget, policy.source, limits.tier, limits.clamped) == (1000, "default", "quick", ())
    assert grant(100_000, service=tier, thinking_token_budget=300)[1].budget == 300
    for wish, asked, field in (
        ({"thinking_token_budget": 5000}, 5000, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, None, "thinking_token_budget"),
        ({"reasoning_effort": "high"}, 65_536, "reasoning_effort"),
        ({"reasoning_effort": "max"}, None, "reasoning_effort"),
    ):
        limits, policy = grant(100_000, service=tier, **wish)
        assert policy.budget == 1000 and limits.clamped == (Clamp(field, asked, 1000, "tier"),), wish
    assert grant(100_000, service=Service(Tier("deep", budget=65_536)))[1].budget == 16_284 - 1628
    assert not grant(100_000, service=tier, enabled=False)[1].enabled


def test_what_is_left_of_a_session_is_a_limit_below_the_tiers():
    limits, policy = grant(100_000, service=Service(Tier("t", budget=1000), session_budget=400))
    assert policy.budget == 400 and limits.clamped == (Clamp("default_thinking_budget", 1000, 400, "session"),)
    assert grant(100_000, service=Service(session_budget=400), thinking_token_budget=100)[1].budget == 100


def test_a_quota_is_as_good_as_a_smaller_pool():
    tier = Service(Tier("small", kv_quota=0.1))
    with pytest.raises(CapacityError, match=r"^max_tokens: 5000 .* tier 'small' \(250 pages\) holds 3900 "):
        grant(40_000, max_tokens=5000, service=tier)
    assert grant(40_000, max_tokens=3900, service=tier)[0].max_tokens == 3900
    with pytest.raises(CapacityError, match=r"^prompt: "):
        grant(40_000, prompt=4000, service=tier)


@pytest.mark.parametrize(
    ("service", "field"),
    [
        (Service(Tier("t", budget=100)), "tier"),
        (Service(session_budget=100), "session"),
        (Service(deadline_ms=100), "deadline_ms"),
        (Service(max_cost=1.0), "max_cost"),
    ],
)
def test_limits_that_this_model_cannot_keep_are_refused(service, field):
    family = replace(language()[2], force_ids=())
    model = ModelInfo("m", "qwen3", 16_384, 1536, 6250, 16, 1, 100_000, "qwen3", True, False)
    made = Granter(model, family, default_budget=-1, default_enabled=True, switch=True)
    with pytest.raises(UnsupportedError, match=f"^{field}: "):
        made.grant(Wish(100, None, ThinkingParams(), OFF, service))
