"""One thinking policy behind every API: what a request says about thinking, and its echo.

An explicit budget beats `reasoning_effort`, which beats the default. Null and -1 mean no
limit. `max_tokens` wins over a larger budget. The engine turns the wish into a policy.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel
from thinkfold.server.replies import Policies
from thinkfold.types import UNLIMITED, FoldPolicy, Limits, ThinkingParams, ThinkingPolicy

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateKwargs(StrictModel):
    """The template switches that clients of other servers send."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ThinkingFields(StrictModel):
    """Fields about thinking, shared by all APIs."""

    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    eos_in_thinking: Literal["close", "stop"] | None = None

    def thinking_params(self, *, enabled_by_default: bool) -> ThinkingParams:
        """The wish in the engine's terms. Raises ParameterError for fields that disagree."""
        params = ThinkingParams(
            enabled=self._enabled(),
            thinking_token_budget=self._budget(),
            reasoning_effort=self.effort(),
            eos_in_thinking=self.eos_in_thinking or "close",
        )
        return params.with_default(enabled_by_default)

    def effort(self) -> Effort | None:
        """The effort that was asked for."""
        return self.reasoning_effort

    def _enabled(self) -> bool | None:
        kwargs = self.chat_template_kwargs or TemplateKwargs()
        given = {
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs.enable_thinking": kwargs.enable_thinking,
            "chat_template_kwargs.thinking": kwargs.thinking,
        }
        return agreed({name: value for name, value in given.items() if value is not None})

    def _budget(self) -> int | None:
        names = [n for n in ("thinking_token_budget", "max_thinking_tokens") if n in self.model_fields_set]
        given = {name: UNLIMITED if getattr(self, name) is None else getattr(self, name) for name in names}
        for name, budget in given.items():
            if budget < UNLIMITED:
                raise ParameterError(name, f"must be -1 (no limit) or more, got {budget}")
        return agreed(given)


def agreed(given: dict[str, Any]) -> Any:
    """The one value of fields that mean the same, None without any. Raises ParameterError if they differ."""
    names = list(given)
    for name in names[1:]:
        if given[name] != given[names[0]]:
            raise ParameterError(name, f"disagrees with {names[0]} ({given[name]} and {given[names[0]]})")
    return given[names[0]] if names else None


def echo(thinking: ThinkingPolicy, fold: FoldPolicy, limits: Limits) -> Policies:
    """The effective policy as the reply shows it; a null budget is no limit. `clamped`: what had to give way."""
    return {
        "thinking": asdict(thinking),
        "fold": asdict(fold),
        "max_tokens": limits.max_tokens,
        "clamped": [asdict(clamp) for clamp in limits.clamped],
        "tier": limits.tier,
        "deadline_ms": limits.deadline_ms,
        "max_cost": limits.max_cost,
    }
