"""What a request may spend, and with whom it shares the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from thinkfold.errors import ParameterError
from thinkfold.types.checks import integer, number
from thinkfold.types.messages import by_position
from thinkfold.types.output import Costs

MAX_WEIGHT = 1000.0
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MILLION = 1e6


@by_position
@dataclass(frozen=True, slots=True)
class Tier:
    """A named class of service, as the engine sees it. Raises ParameterError.

    `budget` is the thinking limit of a request that names none and the most that one may name (None: no
    limit of the tier's own). `weight` is its share of the work beside other tiers' weights, `kv_quota` the
    share of the KV pool that its requests may hold together.
    """

    name: str = ""
    budget: int | None = None
    weight: float = 1.0
    kv_quota: float = 1.0

    def __post_init__(self) -> None:
        if self.budget is not None:
            integer("budget", self.budget, 0)
        number("weight", self.weight, 0.0, MAX_WEIGHT, open_low=True)
        number("kv_quota", self.kv_quota, 0.0, 1.0, open_low=True)

    def quota(self, pages: int) -> int | None:
        """Pages of a pool of `pages` that the tier may hold; None where nothing bounds it."""
        return None if self.kv_quota >= 1.0 else max(1, int(self.kv_quota * pages))


@by_position
@dataclass(frozen=True, slots=True)
class Prices:
    """What an operator charges: for a second of the device, and for a million tokens of each kind.

    The default counts device seconds and nothing else. Raises ParameterError.
    """

    gpu_second: float = 1.0
    prompt: float = 0.0
    cached: float = 0.0
    thinking: float = 0.0
    answer: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            number(f"prices.{each.name}", getattr(self, each.name), 0.0, 1e9)
        if not any(getattr(self, each.name) for each in fields(self)):
            raise ParameterError("prices", "at least one must be above 0")

    def cost(self, costs: Costs) -> float:
        """What a request has cost so far."""
        kinds = ((self.cached, costs.cached_tokens), (self.thinking, costs.thinking_tokens))
        kinds += ((self.prompt, costs.prompt_tokens - costs.cached_tokens), (self.answer, costs.answer_tokens))
        return self.gpu_second * costs.device_s + sum(price * tokens for price, tokens in kinds) / MILLION


@by_position
@dataclass(frozen=True, slots=True)
class Service:
    """Tier and limits of one request. Raises ParameterError.

    `session` is the agent session it belongs to ("" is none): forgotten with it is what only it has used.
    `session_budget` are the thinking tokens that the session leaves for it. Thinking ends in time for an
    answer within `deadline_ms` milliseconds of arrival and within `max_cost`, which `prices` measure; None is no limit.
    """

    tier: Tier = field(default_factory=Tier)
    session_budget: int | None = None
    deadline_ms: int | None = None
    max_cost: float | None = None
    prices: Prices = field(default_factory=Prices)
    session: str = ""

    def __post_init__(self) -> None:
        if self.session_budget is not None:
            integer("session", self.session_budget, 0)
        if self.deadline_ms is not None:
            integer("deadline_ms", self.deadline_ms, 1, MAX_DEADLINE_MS)
        if self.max_cost is not None:
            number("max_cost", self.max_cost, 0.0, 1e12, open_low=True)

    @property
    def bounded(self) -> bool:
        """Whether its thinking may have to end for time or money."""
        return self.deadline_ms is not None or self.max_cost is not None
