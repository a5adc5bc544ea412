"""What may be asked of thinking, and the effective policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import integer
from thinkfold.types.messages import by_position

UNLIMITED = -1
EFFORT_BUDGETS: Mapping[str, int] = {
    "none": 0,
    "minimal": 1_024,
    "low": 4_096,
    "medium": 16_384,
    "high": 65_536,
    "xhigh": UNLIMITED,
    "max": UNLIMITED,
}
DEFAULT_THINKING_BUDGET = EFFORT_BUDGETS["medium"]


@dataclass(frozen=True, slots=True)
class ThinkingParams:
    """What a user may ask of thinking. Raises ParameterError.

    `enabled` None leaves the choice to the model's template. `thinking_token_budget` None
    means not given, -1 no limit. An explicit budget beats `reasoning_effort`, which beats
    the default of 16k. `eos_in_thinking`: `close` turns the first EOS inside thinking into
    the end marker, `stop` ends the response there.
    """

    enabled: bool | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: str | None = None
    eos_in_thinking: Literal["close", "stop"] = "close"

    def __post_init__(self) -> None:
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise ParameterError("enable_thinking", f"must be true or false, got {self.enabled!r}")
        if self.thinking_token_budget is not None:
            integer("thinking_token_budget", self.thinking_token_budget, UNLIMITED)
        effort = self.reasoning_effort
        if effort is not None and (not isinstance(effort, str) or effort not in EFFORT_BUDGETS):
            raise ParameterError("reasoning_effort", f"must be one of {', '.join(EFFORT_BUDGETS)}, got {effort!r}")
        if self.eos_in_thinking not in ("close", "stop"):
            raise ParameterError("eos_in_thinking", f"must be close or stop, got {self.eos_in_thinking!r}")

    def with_default(self, enabled: bool) -> ThinkingParams:
        """Thinking off where the request says nothing and the server's default is off."""
        silent = (self.enabled, self.thinking_token_budget, self.reasoning_effort) == (None, None, None)
        return replace(self, enabled=False) if silent and not enabled else self

    @property
    def template_switch(self) -> bool | None:
        """What to tell the chat template: some thinking where a budget or an effort asks for it; None says nothing."""
        if self.enabled is not None:
            return self.enabled
        asks = self.thinking_token_budget is not None or self.reasoning_effort is not None
        return not self.spends_none if asks else None

    @property
    def spends_none(self) -> bool:
        """Whether the budget is 0, by number or by effort, and thinking is not switched off as such."""
        budget = self.thinking_token_budget
        none = budget == 0 or (budget is None and self.reasoning_effort == "none")
        return none and self.enabled is not False


@by_position
@dataclass(frozen=True, slots=True)
class ThinkingPolicy:
    """The effective thinking policy of one request, as echoed to the user.

    `budget` None means no limit. `source` says which input decided (`control`: it was
    changed while the response ran).
    """

    enabled: bool
    budget: int | None
    source: Literal["thinking_token_budget", "reasoning_effort", "default", "disabled", "no_thinking_model", "control"]
    answer_reserve: int = 0
    eos_in_thinking: Literal["close", "stop"] = "close"
