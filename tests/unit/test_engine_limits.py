"""What a request may write: what can never fit is refused with both numbers, what is lowered is told."""

from __future__ import annotations

import logging

import pytest
from scripted import language

from thinkfold.engine.limits import Granter, Wish
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import CapacityError
from thinkfold.types import Clamp, FoldMode, FoldPolicy, ThinkingParams

OFF = FoldPolicy(FoldMode.OFF)
EAGER = FoldPolicy(FoldMode.EAGER)


def granter(capacity: int, length: int = 16_384, default: int = 16_384) -> Granter:
    model = ModelInfo("m", "qwen3", length, 1536, capacity // 16, 16, 1, capacity, "qwen3", True, True)
    return Granter(model, language()[2], default_budget=default, default_enabled=True, switch=True)


def grant(capacity, max_tokens=None, fold=OFF, prompt=100, **thinking):
    return granter(capacity).grant(Wish(prompt, max_tokens, ThinkingParams(**thinking), fold))


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
