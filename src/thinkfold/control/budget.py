"""What a request asks of thinking, turned into one effective policy. Pure functions.

Knows nothing about tokens: enforcing the policy is `control.branch`'s work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from thinkfold.errors import ConflictError, ParameterError, UnsupportedError
from thinkfold.thinking.families import Family
from thinkfold.types import EFFORT_BUDGETS, UNLIMITED, ThinkingParams, ThinkingPolicy
from thinkfold.types.checks import integer

RESERVE_FROM_MAX_TOKENS = 1024
MIN_ANSWER_RESERVE = 512
MAX_ANSWER_RESERVE = 4096
MAX_GRACE_TOKENS = 64

Source = Literal["thinking_token_budget", "reasoning_effort", "default"]


def resolve_policy(
    params: ThinkingParams,
    *,
    family: Family | None,
    default_budget: int,
    default_enabled: bool,
    template_switch: bool,
    max_tokens: int,
    max_model_len: int,
) -> ThinkingPolicy:
    """The effective policy, as echoed to the user.

    An explicit budget beats `reasoning_effort`, which beats the default. `enabled=False`
    beats them all. Budgets are clamped to the model's length; -1 given explicitly stays
    without limit. With `max_tokens` of 1024 or more a part of it is kept for the answer;
    below that, max_tokens wins and may cut thinking.

    `template_switch` says that the chat template can render thinking off by itself.
    Raises UnsupportedError for what this model cannot honour, ParameterError for a
    contradiction.
    """
    if params.enabled and params.reasoning_effort == "none" and params.thinking_token_budget is None:
        raise ParameterError("reasoning_effort", "none contradicts enable_thinking: true")
    if family is None:
        return _without_thinking(params)
    budget, source = _asked_budget(params, default_budget)
    if _is_off(params, default_enabled):
        if not template_switch and not family.force_ids:
            raise UnsupportedError("enable_thinking", f"thinking of family {family.name} cannot be switched off")
        by_effort = params.enabled is None and source == "reasoning_effort"
        return ThinkingPolicy(False, 0, "reasoning_effort" if by_effort else "disabled")
    if not family.force_ids:
        return _unenforceable(family, budget, source)
    if budget == UNLIMITED and source != "reasoning_effort":
        return ThinkingPolicy(True, None, source, 0, params.eos_in_thinking)
    limit = max_model_len if budget == UNLIMITED else min(budget, max_model_len)
    reserve = answer_reserve(max_tokens)
    if reserve:
        limit = min(limit, max_tokens - reserve)
    return ThinkingPolicy(True, limit, source, reserve, params.eos_in_thinking)


def answer_reserve(max_tokens: int) -> int:
    """Tokens of `max_tokens` that thinking may not take: a tenth, within [512, 4096]."""
    if max_tokens < RESERVE_FROM_MAX_TOKENS:
        return 0
    return min(max(max_tokens // 10, MIN_ANSWER_RESERVE), MAX_ANSWER_RESERVE)


def changed_policy(policy: ThinkingPolicy, budget: int, max_tokens: int) -> ThinkingPolicy:
    """`policy` with another budget for a response that runs; -1 is no limit, the answer keeps its reserve.

    Raises ParameterError, and ConflictError where thinking is off.
    """
    integer("budget", budget, UNLIMITED)
    if not policy.enabled:
        raise ConflictError("thinking is off in this response, it has no budget")
    if budget == UNLIMITED:
        return replace(policy, budget=None, source="control", answer_reserve=0)
    reserve = answer_reserve(max_tokens)
    limit = min(budget, max_tokens - reserve) if reserve else budget
    return replace(policy, budget=limit, source="control", answer_reserve=reserve)


def grace_tokens(budget: int) -> int:
    """How many tokens before the end of `budget` a sentence end may close thinking."""
    return min(budget // 10, MAX_GRACE_TOKENS)


def _asked_budget(params: ThinkingParams, default_budget: int) -> tuple[int, Source]:
    if params.thinking_token_budget is not None:
        return params.thinking_token_budget, "thinking_token_budget"
    if params.reasoning_effort is not None:
        return EFFORT_BUDGETS[params.reasoning_effort], "reasoning_effort"
    return default_budget, "default"


def _is_off(params: ThinkingParams, default_enabled: bool) -> bool:
    if params.enabled is not None:
        return not params.enabled
    if params.thinking_token_budget is not None:
        return False
    if params.reasoning_effort is not None:
        return params.reasoning_effort == "none"
    return not default_enabled


def _without_thinking(params: ThinkingParams) -> ThinkingPolicy:
    if params.enabled:
        raise UnsupportedError("enable_thinking", "this model does not think")
    if params.thinking_token_budget:
        raise UnsupportedError("thinking_token_budget", "this model does not think, a budget has no effect")
    if params.reasoning_effort not in (None, "none"):
        raise UnsupportedError("reasoning_effort", "this model does not think")
    return ThinkingPolicy(False, 0, "no_thinking_model")


def _unenforceable(family: Family, budget: int, source: Source) -> ThinkingPolicy:
    """No limit where none was asked for; an asked limit is refused."""
    if budget != UNLIMITED and source != "default":
        raise UnsupportedError(source, f"a thinking budget cannot be enforced for family {family.name}")
    return ThinkingPolicy(True, None, source, 0, "stop")
