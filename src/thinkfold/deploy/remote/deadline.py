"""Whether thinking must end now, so that the answer comes within a deadline or a price. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.deploy.remote.choice import Choice
from thinkfold.engine.ledger import ANSWER_TOKENS, MARGIN, SLACK_STEPS
from thinkfold.types import Costs, EngineRequest, ThinkingEndReason
from thinkfold.types.service import MILLION


def due(
    request: EngineRequest, choices: Sequence[Choice], costs: Costs, since_arrival_s: float
) -> ThinkingEndReason | None:
    """Why the request's thinking must end, if it must. A token takes as long as its tokens took so far."""
    service = request.service
    if not service.bounded or not request.thinking.enabled:
        return None
    thinkers = [choice for choice in choices if choice.thinks and not choice.control.ending]
    longest = max((choice.control.num_output_tokens for choice in choices), default=0)
    if not thinkers or not longest:
        return None
    token_s = MARGIN * (costs.thinking_s + costs.answer_s) / longest
    kept = request.thinking.answer_reserve or ANSWER_TOKENS
    left = (request.sampling.max_tokens or kept) - min(c.control.num_output_tokens for c in thinkers)
    tokens = max(0, min(kept, left))
    needed = (tokens + SLACK_STEPS) * token_s
    if service.deadline_ms is not None and since_arrival_s + needed >= service.deadline_ms / 1000:
        return ThinkingEndReason.DEADLINE
    if service.max_cost is not None:
        prices = service.prices
        price = prices.gpu_second * needed + prices.answer * tokens * len(thinkers) / MILLION
        if prices.cost(costs) + price >= service.max_cost:
            return ThinkingEndReason.COST
    return None
