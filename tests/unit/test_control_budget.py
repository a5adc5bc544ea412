"""The effective thinking policy: precedence, clamping, reserve, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from branch_script import Kit

from thinkfold.control.budget import answer_reserve, resolve_policy
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.types import EFFORT_BUDGETS, ThinkingParams, ThinkingPolicy

FAMILY = Kit().family
UNFORCED = replace(FAMILY, force_ids=())


def policy(family=FAMILY, *, max_tokens=100_000, max_model_len=131_072, switch=True, default=16_384, on=True, **params):
    return resolve_policy(
        ThinkingParams(**params),
        family=family,
        default_budget=default,
        default_enabled=on,
        template_switch=switch,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("value", [-2, True, 1.5, "7"])
def test_case_22_bad_budgets_name_the_field(value):
    with pytest.raises(ParameterError) as caught:
        policy(thinking_token_budget=value)
    assert caught.value.field == "thinking_token_budget"


def test_case_22_no_limit_and_huge():
    assert policy(thinking_token_budget=-1) == ThinkingPolicy(True, None, "thinking_token_budget")
    assert policy(thinking_token_budget=None).budget == 16_384
    assert policy(thinking_token_budget=10**12, max_tokens=1000).budget == 131_072
    assert policy(default=-1).budget is None


@pytest.mark.parametrize("budget", [500, 1000])
def test_case_22_short_max_tokens_wins(budget):
    assert policy(thinking_token_budget=budget, max_tokens=500) == ThinkingPolicy(True, budget, "thinking_token_budget")


@pytest.mark.parametrize(
    ("max_tokens", "reserve"),
    [(1, 0), (1023, 0), (1024, 512), (5120, 512), (10_000, 1000), (40_960, 4096), (10**6, 4096)],
)
def test_case_22_answer_reserve(max_tokens, reserve):
    assert answer_reserve(max_tokens) == reserve
    result = policy(thinking_token_budget=max_tokens, max_tokens=max_tokens, max_model_len=10**7)
    assert (result.budget, result.answer_reserve) == (max_tokens - reserve, reserve)


@pytest.mark.parametrize("effort", EFFORT_BUDGETS)
def test_case_54_every_effort(effort):
    for switch in (True, False):
        result = policy(reasoning_effort=effort, switch=switch)
        limit = EFFORT_BUDGETS[effort]
        want = 0 if effort == "none" else 100_000 - 4096 if limit == -1 else limit
        assert (result.enabled, result.budget, result.source) == (effort != "none", want, "reasoning_effort")


@pytest.mark.parametrize("effort", ["banana", 3, {}])
def test_case_54_unknown_effort_lists_the_values(effort):
    with pytest.raises(ParameterError, match="none, minimal, low, medium, high, xhigh, max"):
        policy(reasoning_effort=effort)


def test_case_54_precedence():
    both = policy(thinking_token_budget=100, reasoning_effort="none")
    assert both == ThinkingPolicy(True, 100, "thinking_token_budget", 4096)
    assert policy(thinking_token_budget=100, on=False).budget == 100
    assert policy(reasoning_effort="low", on=False).enabled
    off = ThinkingPolicy(False, 0, "disabled")
    assert policy(on=False) == off
    assert policy(enabled=False, thinking_token_budget=100, reasoning_effort="high") == off
    assert policy(enabled=True, on=False).source == "default"
    assert policy(thinking_token_budget=0) == ThinkingPolicy(True, 0, "thinking_token_budget", 4096)
    with pytest.raises(ParameterError, match="contradicts"):
        policy(enabled=True, reasoning_effort="none")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"enabled": True}, "enable_thinking"),
    ],
)
def test_case_19_a_model_that_does_not_think(params, field):
    with pytest.raises(UnsupportedError) as caught:
        policy(None, **params)
    assert caught.value.field == field


@pytest.mark.parametrize("params", [{}, {"thinking_token_budget": 0}, {"reasoning_effort": "none"}, {"enabled": False}])
def test_case_6_no_thinking_is_always_granted(params):
    assert policy(None, **params) == ThinkingPolicy(False, 0, "no_thinking_model")


def test_case_19_what_cannot_be_enforced_is_refused():
    assert policy(UNFORCED) == ThinkingPolicy(True, None, "default", 0, "stop")
    assert policy(UNFORCED, thinking_token_budget=-1).budget is None
    assert policy(UNFORCED, reasoning_effort="max").budget is None
    assert policy(UNFORCED, enabled=False).enabled is False
    for params, field in (
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"enabled": False, "switch": False}, "enable_thinking"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            policy(UNFORCED, **params)
        assert caught.value.field == field


def test_eos_rule_is_kept():
    assert policy(eos_in_thinking="stop").eos_in_thinking == "stop"
