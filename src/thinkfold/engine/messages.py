"""What goes between `AsyncEngine` and the core: plain serialisable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from thinkfold.engine.abilities import Ability
from thinkfold.engine.commands import Answer, Order
from thinkfold.errors import ParameterError
from thinkfold.types import Costs, EngineRequest, RequestOutput


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front needs to know about the loaded model and its KV pool.

    `kv_capacity` are the raw KV entries that the pool holds; a request that folds can be longer. `window`
    tokens are all that some layers see, and stay raw; 0 where all layers see everything. `fp8_error` is the
    relative error of the worst layer's attention with fp8 KV, where it was measured. `engine` is openai for a
    remote server: its KV is not ours, and what is told of it is estimated.
    """

    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    page_bytes: int
    kv_capacity: int
    family: str | None
    thinks: bool
    budget_enforced: bool
    window: int = 0
    kv_dtype: str = ""
    fp8_error: float | None = None
    engine: Literal["thinkfold", "openai"] = "thinkfold"
    abilities: Mapping[str, Ability] = field(default_factory=dict)

    @property
    def max_prompt_len(self) -> int:
        """Tokens that a prompt must stay below: it is never folded."""
        return min(self.max_model_len, self.kv_capacity)


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of the pool: `held` by requests, `cached` for nobody but the prefix tree, and `free`."""

    total: int
    held: int
    cached: int
    free: int


@dataclass(slots=True)
class EngineStats:
    """Counters since start and gauges of now. Pages by class name.

    `pressure` counts how often each rung of the pressure ladder was taken, by its name; `swaps`
    counts moves of a branch, parked or not, or of an answer's thinking KV to host memory; `swapped_bytes`,
    `kv_byte_seconds` and the tokens grow when a request ends, `generated_tokens` with every step.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_by_class: dict[str, int] = field(default_factory=dict)
    host_pages: int = 0
    host_pages_used: int = 0
    steps: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    thinking_tokens: int = 0
    answer_tokens: int = 0
    discarded_tokens: int = 0
    probe_tokens: int = 0
    ahead_tokens: int = 0
    warm_tokens: int = 0
    handles: int = 0
    kv_quantisation_error: float = 0.0
    folds: int = 0
    folds_refused: int = 0
    folded_tokens: int = 0
    quantised: int = 0
    quantised_tokens: int = 0
    swaps: int = 0
    swapped_bytes: int = 0
    recomputed_tokens: int = 0
    kv_byte_seconds: float = 0.0
    requests_by_reason: dict[str, int] = field(default_factory=dict)
    thinking_by_reason: dict[str, int] = field(default_factory=dict)
    pressure: dict[str, int] = field(default_factory=dict)
    decisions: dict[tuple[str, str], int] = field(default_factory=dict)  # of early stopping, by rule and outcome
    rules_off: tuple[tuple[str, str], ...] = ()  # (rule, task) that disagreed too often in shadow mode

    def add(self, costs: Costs, *, aside: bool = False) -> None:
        """A request has ended; probes of others are counted as they come, those `aside` here."""
        if aside:
            costs = costs.as_probe()
            self.probe_tokens += costs.probe_tokens
        self.prompt_tokens += costs.prompt_tokens
        self.computed_prompt_tokens += costs.computed_prompt_tokens
        self.thinking_tokens += costs.thinking_tokens
        self.answer_tokens += costs.answer_tokens
        self.recomputed_tokens += costs.recomputed_tokens
        self.swapped_bytes += costs.swapped_bytes
        self.kv_byte_seconds += costs.kv_byte_seconds

    @property
    def kv_pages(self) -> KVPages:
        """Who has the pool's pages. Idle cached and pinned ones are as good as free: whoever needs them gets them."""
        cached = self.pages_by_class.get("cached", 0) + self.pages_by_class.get("pinned", 0)
        held = sum(self.pages_by_class.values()) - cached
        return KVPages(self.pages_total, held, cached, self.pages_total - held - cached)


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop one request; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the core; running requests are aborted."""


Command = EngineRequest | Abort | Order | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and the loop runs."""

    model: ModelInfo


@dataclass(slots=True)
class News:
    """What happened since the last message; also the core's sign of life."""

    outputs: list[RequestOutput]
    stats: EngineStats
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dead:
    """The core has ended; `reason` is empty after an ordered stop.

    `error` is set if the model could not be loaded because a parameter is wrong.
    """

    reason: str
    error: ParameterError | None = None


Event = Ready | News | Dead
