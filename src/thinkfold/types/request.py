"""One request as the engine core receives it."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinkfold.types.fold import FoldPolicy
from thinkfold.types.limits import Limits
from thinkfold.types.phases import Phase
from thinkfold.types.sampling import SamplingParams
from thinkfold.types.service import Service, Tier
from thinkfold.types.thinking import ThinkingPolicy
from thinkfold.types.until import Until


@dataclass(frozen=True, slots=True)
class PromptState:
    """What the tail of a rendered prompt says, found once per request.

    `phase` is the phase of the first generated token; `prefilled_thinking` counts thinking
    tokens already in the prompt's open block; `visible_len` is the number of leading prompt
    tokens whose KV may be shared (none behind an open or closed think block in the tail).
    """

    phase: Phase
    prefilled_thinking: int
    visible_len: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One user's request as the core receives it: tokens and resolved policy, no text.

    `aside`: the engine asks by itself, so its tokens count as probe tokens and it is none of the finished choices.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    prompt: PromptState
    sampling: SamplingParams  # max_tokens and seed are resolved
    thinking: ThinkingPolicy
    namespace: tuple[str, ...] = ()  # labelled prefix-cache namespace, such as ("salt=acme",)
    arrival_time: float = 0.0
    fold: FoldPolicy = field(default_factory=FoldPolicy)
    limits: Limits = field(default_factory=Limits)
    until: Until | None = None
    service: Service = field(default_factory=Service)
    grammar: str | None = None  # `sampling.grammar` compiled (see `text.grammar`)
    aside: bool = False

    @property
    def tier(self) -> Tier:
        """Whose weight and quota it counts for."""
        return self.service.tier

    def is_of(self, labels: tuple[str, ...], session: str = "") -> bool:
        """Whether its namespace begins with `labels` and, where one is named, it belongs to `session`."""
        return self.namespace[: len(labels)] == labels and session in ("", self.service.session)
