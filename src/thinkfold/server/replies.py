"""Shapes of what every API's replies share: costs, policies, segments. The writers build them, the OpenAPI document
shows them.

Values are the dictionaries that are sent; `Shows` says which dataclass one was made from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from thinkfold.types import (
    BestOfState,
    ControlParams,
    FinishReason,
    FoldPolicy,
    SearchState,
    ThinkingEndReason,
    ThinkingPolicy,
    VoteState,
)
from thinkfold.types.limits import Clamp
from thinkfold.types.session import SessionView


class Shows:
    """Marks a dictionary as `asdict` of a dataclass, for the schema."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self._shown).core_schema)


class TokenCosts(TypedDict):
    """Tokens."""

    prompt: int
    cached: int
    computed_prompt: int
    thinking: int
    answer: int
    copied: int
    injected: int
    discarded: int
    recomputed: int
    probe: int


class KvCosts(TypedDict):
    """Memory held: bytes of KV pages integrated over seconds, and the most entries at once."""

    byte_seconds: float
    peak_entries: int
    swapped_bytes: int
    preemptions: int


class TimeCosts(TypedDict):
    """Seconds."""

    queue_s: float
    prefill_s: float
    thinking_s: float
    answer_s: float
    paused_s: float
    device_s: float


class StepCacheMark(TypedDict):
    """Whether the answer was a kept one, and how old it is."""

    hit: bool
    age_s: NotRequired[float]


class ServingCosts(TypedDict):
    """What limits, prices and kept answers add to a bill; `estimated` is what a remote engine does not tell."""

    estimated: NotRequired[list[str]]
    cost: NotRequired[float]
    step_cache: NotRequired[StepCacheMark]


class Bill(ServingCosts):
    """The three costs of a request, and what folding did."""

    tokens: TokenCosts
    kv: KvCosts
    time: TimeCosts
    folds: int
    folds_refused: int
    folded_tokens: int
    quantised_tokens: int


class Ending(TypedDict):
    """How a choice ended, and why its thinking did."""

    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None
    thinking_end_reason: ThinkingEndReason | None


class DeltaEnding(TypedDict):
    """The same in an event of a stream: null until the choice has ended."""

    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: NotRequired[str | int | None]
    thinking_end_reason: NotRequired[ThinkingEndReason | None]


class SegmentPlace(TypedDict):
    """A finished segment of thinking: `[start, end)` are output tokens of its choice."""

    choice: int
    id: int
    start: int
    end: int


class SegmentState(SegmentPlace):
    """What became of a finished segment."""

    state: Literal["folded", "quantised", "raw", "closed"]


class FoldNews(TypedDict):
    """One fold. `segment` is the one it ends in; an error that nobody has estimated is null."""

    choice: int
    id: int
    segment: int | None
    start: int
    end: int
    entries: float
    pages_freed: int
    error: float | None
    refused: bool
    quantised: bool


class DriftRecord(TypedDict):
    """The first thing of a conversation's earlier text that has changed, and what it cost."""

    kind: Literal["system", "tools", "history"]
    message: NotRequired[int]
    role: NotRequired[str]
    tool: NotRequired[int]
    character: int
    tokens_lost: int


class Policies(TypedDict):
    """The effective policies. `clamped` says what had to give way; `control` null is no early stopping."""

    thinking: Annotated[dict[str, Any], Shows(ThinkingPolicy)]
    fold: Annotated[dict[str, Any], Shows(FoldPolicy)]
    max_tokens: int | None
    clamped: Annotated[list[dict[str, Any]], Shows(list[Clamp])]
    tier: str
    deadline_ms: int | None
    max_cost: float | None
    control: NotRequired[Annotated[dict[str, Any] | None, Shows(ControlParams | None)]]


class ServingNews(TypedDict):
    """What a reply says of its session and of the conversation's earlier turns."""

    session: NotRequired[SessionView]
    drift: NotRequired[DriftRecord]


class ThinkfoldReply(ServingNews):
    """Our own object in a reply. Where several samples decided, one field says how."""

    policy: Policies
    segments: list[SegmentState]
    vote: NotRequired[Annotated[dict[str, Any], Shows(VoteState)]]
    best_of: NotRequired[Annotated[dict[str, Any], Shows(BestOfState)]]
    search: NotRequired[Annotated[dict[str, Any], Shows(SearchState)]]


class ThinkfoldEvent(TypedDict):
    """What `thinkfold.events` adds to a stream; beside text it says how many tokens have come."""

    output_tokens: NotRequired[int]
    segment: NotRequired[SegmentPlace]
    fold: NotRequired[FoldNews]
    vote: NotRequired[Annotated[dict[str, Any], Shows(VoteState)]]
    best_of: NotRequired[Annotated[dict[str, Any], Shows(BestOfState)]]
    search: NotRequired[Annotated[dict[str, Any], Shows(SearchState)]]


class TokenText(TypedDict):
    """A token, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TokenText):
    """A drawn token with the most likely ones."""

    top_logprobs: list[TokenText]


class Logprobs(TypedDict):
    """Log-probabilities of the answer's tokens, and apart from them those of thinking."""

    content: list[TokenLogprob]
    reasoning: list[TokenLogprob]
    refusal: None


class LegacyLogprobs(TypedDict):
    """Log-probabilities of the answer's tokens as lists side by side; `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Head(TypedDict):
    """What OpenAI's two older APIs begin with; `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class ChunkHead(Head):
    """The same in an event of a stream. The last one has usage where it was asked for, and our own object."""

    usage: NotRequired[Usage | None]
    thinkfold: NotRequired[ThinkfoldReply | ThinkfoldEvent]


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """OpenAI's usage with ours in it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    thinkfold: Bill
