"""What a request may write at most, and which of its numbers had to give way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinkfold.types.messages import by_position


@dataclass(frozen=True, slots=True)
class Clamp:
    """A number of a request that was lowered from `asked` (None: as much as there is) to `granted`.

    `by` says what it ran into: the model's length, the KV pool, the request's own max_tokens, its tier or
    its agent session.
    """

    field: Literal["max_tokens", "thinking_token_budget", "reasoning_effort", "default_thinking_budget"]
    asked: int | None
    granted: int
    by: Literal["model_length", "kv_pool", "max_tokens", "tier", "session"]


@by_position
@dataclass(frozen=True, slots=True)
class Limits:
    """The effective `max_tokens` of one request, as echoed to the user, and all that was `clamped`.

    `tier` is the class of service, empty where the server has none. Thinking ends in time for the answer to come
    within `deadline_ms` milliseconds of arrival and within `max_cost`; None is no limit.
    """

    max_tokens: int | None = None
    clamped: tuple[Clamp, ...] = ()
    tier: str = ""
    deadline_ms: int | None = None
    max_cost: float | None = None
