"""Values that cross module borders: parameters, messages and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from thinkfold.errors import ParameterError

UNLIMITED = -1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 64
MAX_N = 128
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


class Phase(StrEnum):
    """Where in a response a token stands."""

    THINKING = "thinking"
    ANSWER = "answer"


class FinishReason(StrEnum):
    """Why a branch ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ThinkingEndReason(StrEnum):
    """Why thinking ended."""

    NATURAL = "natural"  # the model wrote its end marker
    BUDGET = "budget"  # the budget was spent
    EOS = "eos"  # the model sampled EOS inside thinking and the engine closed it
    UNCLOSED = "unclosed"  # the response ended while thinking was open


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(name, f"must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise ParameterError(name, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ParameterError(name, f"must be {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a response ends. Raises ParameterError.

    `max_tokens` None means up to the model's length. `seed` None draws a fresh seed.
    `forced_tokens` replaces sampling by a given stream (benchmarks). Stop strings and ids
    act on the answer only, unless `stop_in_thinking`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_in_thinking: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    forced_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ParameterError("min_tokens", f"must be at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            raise ParameterError("stop", f"must be a sequence of strings, got the string {self.stop!r}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ParameterError("stop", "must hold non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise ParameterError("stop_token_ids", f"at most {MAX_STOP_STRINGS} ids, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError if an id lies outside `[0, vocab_size)`."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("forced_tokens", self.forced_tokens),
        ):
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            if bad is not None:
                raise ParameterError(name, f"token id {bad} is outside the vocabulary of {vocab_size}")


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
            _integer("thinking_token_budget", self.thinking_token_budget, UNLIMITED)
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
        """What to tell the chat template: no thinking where none may be spent; None says nothing."""
        if self.enabled is not None:
            return self.enabled
        budget = self.thinking_token_budget
        spends_none = budget == 0 or (budget is None and self.reasoning_effort == "none")
        return False if spends_none else None


@dataclass(frozen=True, slots=True)
class ThinkingPolicy:
    """The effective thinking policy of one request, as echoed to the user.

    `budget` None means no limit. `source` says which input decided.
    """

    enabled: bool
    budget: int | None
    source: Literal["thinking_token_budget", "reasoning_effort", "default", "disabled", "no_thinking_model"]
    answer_reserve: int = 0
    eos_in_thinking: Literal["close", "stop"] = "close"


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
    """One user's request as the core receives it: tokens and resolved policy, no text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    prompt: PromptState
    sampling: SamplingParams  # max_tokens and seed are resolved
    thinking: ThinkingPolicy
    namespace: tuple[str, ...] = ()  # labelled prefix-cache namespace, such as ("salt=acme",)
    arrival_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one drawn token on raw logits, with the most likely ones.

    Injected tokens have none. `phase` is None for tokens that print nothing (markers, EOS).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Statistics of one sampling row on raw logits (nats; temperature 1, no penalties).

    `confidence` is the negative mean log-prob of the 20 most likely tokens (DeepConf);
    `margin` is log p(top 1) - log p(first end-marker token), NaN where there is no marker.
    """

    logprob: float
    entropy: float
    confidence: float
    margin: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A finished stretch of thinking: `[start, end)` are output token indices."""

    id: int
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """New output of one branch since the previous message; counts are cumulative."""

    index: int
    reasoning: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: list[TokenStats] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    phase: Phase = Phase.ANSWER
    num_output_tokens: int = 0
    num_thinking_tokens: int = 0
    num_injected_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    thinking_end_reason: ThinkingEndReason | None = None

    def merge(self, later: CompletionOutput) -> None:
        """Append `later` to self."""
        self.reasoning += later.reasoning
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.stats += later.stats
        self.segments += later.segments
        self.phase = later.phase
        self.num_output_tokens = later.num_output_tokens
        self.num_thinking_tokens = later.num_thinking_tokens
        self.num_injected_tokens = later.num_injected_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.thinking_end_reason = later.thinking_end_reason


@dataclass(slots=True)
class Costs:
    """What a request cost so far: tokens, KV memory held and time, over all branches.

    `computed_prompt_tokens` includes what a preemption computes again. Times in seconds;
    `kv_byte_seconds` is bytes of KV pages held integrated over time.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    thinking_tokens: int = 0
    answer_tokens: int = 0
    discarded_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_byte_seconds: float = 0.0
    kv_peak_entries: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    thinking_s: float = 0.0
    answer_s: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """What `AsyncEngine.generate` yields: the news of all branches since the last one."""

    request_id: str
    outputs: list[CompletionOutput]
    policy: ThinkingPolicy
    costs: Costs
    finished: bool = False
    error: str | None = None

    def merge(self, later: RequestOutput) -> None:
        """Append `later` to self, branch by branch; keeps branches sorted by index."""
        known = {o.index: o for o in self.outputs}
        for output in later.outputs:
            if output.index in known:
                known[output.index].merge(output)
            else:
                self.outputs.append(output)
        self.outputs.sort(key=lambda o: o.index)
        self.costs = later.costs
        self.finished = later.finished
        self.error = later.error or self.error
