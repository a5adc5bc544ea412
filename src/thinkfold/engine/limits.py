"""What one request may write: max_tokens and thinking budget against the model's length and the KV pool.

An explicit number that the pool can never hold is refused; what the model's length or a default's size
forbids is lowered, and the reply says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Literal

from thinkfold.control.budget import answer_reserve, resolve_policy
from thinkfold.engine.capacity import most_output_tokens
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import CapacityError, UnsupportedError
from thinkfold.thinking.family import Family
from thinkfold.types import (
    EFFORT_BUDGETS,
    UNLIMITED,
    Clamp,
    FoldMode,
    FoldPolicy,
    Limits,
    Service,
    ThinkingParams,
    ThinkingPolicy,
    Tier,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for: `max_tokens` None is as much as there is."""

    prompt_tokens: int
    max_tokens: int | None
    thinking: ThinkingParams
    fold: FoldPolicy
    service: Service = field(default_factory=Service)

    @property
    def tier(self) -> Tier:
        return self.service.tier

    @property
    def ceiling(self) -> tuple[int | None, Literal["tier", "session"]]:
        """The most thinking tokens that its tier and its session allow, and which of them says so."""
        tier, session = self.tier.budget, self.service.session_budget
        if session is not None and (tier is None or session < tier):
            return session, "session"
        return tier, "tier"


class Granter:
    """Resolves wishes for one model and one server's defaults."""

    def __init__(
        self, model: ModelInfo, family: Family | None, *, default_budget: int, default_enabled: bool, switch: bool
    ) -> None:
        """`switch`: the chat template can render thinking off by itself."""
        self._model = model
        self._family = family
        self._default_budget = default_budget
        self._default_enabled = default_enabled
        self._switch = switch
        self._warned: set[str] = set()

    def grant(self, wish: Wish) -> tuple[Limits, ThinkingPolicy]:
        """The effective numbers. Raises CapacityError, with both numbers, for what can never fit the KV pool.

        A tier's quota is as good as a smaller pool. Raises UnsupportedError for a budget that cannot be enforced.
        """
        model = self._within_quota(wish.tier)
        room = most_output_tokens(wish.prompt_tokens, wish.fold, model)
        length = model.max_model_len - wish.prompt_tokens
        wanted = length if wish.max_tokens is None else min(wish.max_tokens, length)
        if wish.max_tokens is not None and wanted > room:
            raise self._never_fits("max_tokens", wish.max_tokens, wish, room)
        max_tokens = min(wanted, room)
        policy = resolve_policy(
            wish.thinking,
            family=self._family,
            default_budget=self._default_of(wish),
            default_enabled=self._default_enabled,
            template_switch=self._switch,
            max_tokens=max_tokens,
            max_model_len=model.max_model_len,
        )
        ceiling, by = wish.ceiling
        budget = wish.thinking.thinking_token_budget
        most = wanted if ceiling is None else min(wanted, ceiling)
        if policy.source == "thinking_token_budget" and budget is not None and min(budget, most) > room:
            raise self._never_fits("thinking_token_budget", budget, wish, room)
        clamped: list[Clamp] = []
        if wish.max_tokens is None and room < length:
            clamped.append(Clamp("max_tokens", None, room, "kv_pool"))
        elif wish.max_tokens is not None and max_tokens < wish.max_tokens:
            clamped.append(Clamp("max_tokens", wish.max_tokens, max_tokens, "model_length"))
        if ceiling is not None and policy.enabled and (policy.budget is None or policy.budget > ceiling):
            policy, asked = self._lowered(wish, policy, max_tokens), self._asked(wish, policy)
            assert policy.budget is not None
            clamped.append(Clamp(_field(policy), None if asked == UNLIMITED else asked, policy.budget, by))
        else:
            clamped += self._budget_clamp(wish, policy, short=room < length)
        self._warn(clamped, wish)
        service = wish.service
        if service.bounded and policy.enabled and not model.budget_enforced:
            field = "max_cost" if service.deadline_ms is None else "deadline_ms"
            raise UnsupportedError(field, "thinking of this model cannot be ended from outside")
        return Limits(max_tokens, tuple(clamped), wish.tier.name, service.deadline_ms, service.max_cost), policy

    def _within_quota(self, tier: Tier) -> ModelInfo:
        """The model as one tier sees it."""
        model, quota = self._model, tier.quota(self._model.num_pages)
        return model if quota is None else replace(model, kv_capacity=min(model.kv_capacity, quota * model.page_size))

    def _default_of(self, wish: Wish) -> int:
        """The budget of a request that names none: its tier's or the server's."""
        return self._default_budget if wish.tier.budget is None else wish.tier.budget

    def _lowered(self, wish: Wish, policy: ThinkingPolicy, max_tokens: int) -> ThinkingPolicy:
        """`policy` with the budget that the tier or the session allows; the answer keeps its part of max_tokens."""
        ceiling, by = wish.ceiling
        assert ceiling is not None
        if not self._model.budget_enforced:
            raise UnsupportedError(by, f"its thinking budget of {ceiling} cannot be enforced for this model")
        reserve = answer_reserve(max_tokens)
        return replace(policy, budget=min(ceiling, max_tokens - reserve), answer_reserve=reserve)

    def _budget_clamp(self, wish: Wish, policy: ThinkingPolicy, *, short: bool) -> list[Clamp]:
        """The note that a thinking budget was lowered, the answer's part of max_tokens included.

        No limit, and a default, are meant to end with the model's length or max_tokens: only the pool is news there.
        """
        asked, granted = self._asked(wish, policy), policy.budget
        if asked is None or granted is None or 0 <= asked <= granted:
            return []
        by = "kv_pool" if short else "model_length"
        if wish.max_tokens is not None and granted < self._model.max_model_len:
            by = "max_tokens"
        if by != "kv_pool" and (policy.source == "default" or asked == UNLIMITED):
            return []
        return [Clamp(_field(policy), None if asked == UNLIMITED else asked, granted, by)]

    def _asked(self, wish: Wish, policy: ThinkingPolicy) -> int | None:
        """The budget that was asked for, -1 without limit; None where no budget holds."""
        if not policy.enabled:
            return None
        if policy.source == "thinking_token_budget":
            return wish.thinking.thinking_token_budget
        if policy.source == "reasoning_effort":
            return EFFORT_BUDGETS[wish.thinking.reasoning_effort or "medium"]
        return self._default_of(wish)

    def _never_fits(self, field: str, asked: int, wish: Wish, room: int) -> CapacityError:
        model = self._model
        quota = wish.tier.quota(model.num_pages)
        holder = "this engine" if quota is None else f"tier {wish.tier.name!r} ({quota} pages)"
        folds = "" if wish.fold.policy is FoldMode.OFF else ", its thinking folded,"
        return CapacityError(
            field,
            f"{asked} tokens can never fit: after a prompt of {wish.prompt_tokens} tokens{folds} {holder} holds "
            f"{room} (a KV pool of {model.num_pages} pages of {model.page_size}); ask for fewer, or leave it out",
        )

    def _warn(self, clamped: list[Clamp], wish: Wish) -> None:
        """One line for the operator the first time that the pool, and not the user, shortens a number."""
        for clamp in clamped:
            if clamp.by == "kv_pool" and clamp.field not in self._warned:
                self._warned.add(clamp.field)
                asked = "as much as the model's length allows" if clamp.asked is None else clamp.asked
                logger.warning(
                    "%s: %s cannot be held by the KV pool of %d pages of %d after a prompt of %d tokens: lowered to %d "
                    "(told once; replies say it in thinkfold.policy.clamped)",
                    clamp.field, asked, self._model.num_pages, self._model.page_size, wish.prompt_tokens, clamp.granted,
                )  # fmt: skip


def _field(policy: ThinkingPolicy) -> Literal["thinking_token_budget", "reasoning_effort", "default_thinking_budget"]:
    """What decided a budget, in the words of clamps."""
    if policy.source in ("thinking_token_budget", "reasoning_effort"):
        return policy.source
    return "default_thinking_budget"
