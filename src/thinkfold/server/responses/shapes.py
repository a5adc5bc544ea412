"""Shapes of a Response, its items and its stream's events."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from thinkfold.server.policy import Effort
from thinkfold.server.replies import (
    Bill,
    CachedTokens,
    ReasoningTokens,
    Shows,
    ThinkfoldEvent,
    ThinkfoldReply,
    TokenLogprob,
)
from thinkfold.server.responses.fields import FunctionTool, NamedFunction, TextFormat
from thinkfold.types import ThinkingEndReason

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class ReasoningPart(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class TextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningItem(TypedDict):
    """Thinking. `encrypted_content` holds it for clients that keep nothing readable."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningPart]
    encrypted_content: str | None
    status: ItemStatus


class MessageItem(TypedDict):
    """A stretch of the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[TextPart]
    status: ItemStatus


class CallItem(TypedDict):
    """A call of a tool; `arguments` are JSON in a string, as the model wrote it."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = ReasoningItem | MessageItem | CallItem


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    thinkfold: Bill


class ReasoningEcho(TypedDict):
    effort: Effort | None
    summary: None


class TextEcho(TypedDict):
    format: Annotated[dict[str, Any], Shows(TextFormat)]


class Echo(TypedDict):
    """The request's fields as the response repeats them, with what stands in for those not given."""

    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    reasoning: ReasoningEcho
    text: TextEcho
    tools: Annotated[list[dict[str, Any]], Shows(list[FunctionTool])]
    tool_choice: Annotated[str | dict[str, Any], Shows(Literal["none", "auto", "required"] | NamedFunction)]
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    background: Literal[False]
    service_tier: Literal["default"]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    metadata: dict[str, str]
    store: bool


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseFailure(TypedDict):
    code: str
    message: str


class ResponseBody(Echo):
    """A response. The last two fields come with its end."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    thinking_end_reason: NotRequired[ThinkingEndReason | None]
    thinkfold: NotRequired[ThinkfoldReply]


class Numbered(TypedDict):
    """Every event of a stream has the next number."""

    sequence_number: int


class StateEvent(Numbered):
    """`failed` has the response's error."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseBody


class ItemEvent(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class Placed(Numbered):
    """An event of one item, and of one part of it unless the item is a call."""

    item_id: str
    output_index: int
    content_index: NotRequired[int]


class PartEvent(Placed):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: ReasoningPart | TextPart


class DeltaEvent(Placed):
    type: Literal[
        "response.function_call_arguments.delta", "response.reasoning_text.delta", "response.output_text.delta"
    ]
    delta: str
    logprobs: NotRequired[list[TokenLogprob]]


class TextDoneEvent(Placed):
    type: Literal["response.reasoning_text.done", "response.output_text.done"]
    text: str
    logprobs: NotRequired[list[TokenLogprob]]


class ArgumentsDoneEvent(Placed):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ResponseNews(Numbered):
    """An event of ours, where `thinkfold.events` asked for it."""

    type: Literal["thinkfold.segment", "thinkfold.fold", "thinkfold.vote", "thinkfold.best_of", "thinkfold.search"]
    thinkfold: ThinkfoldEvent


ResponseEvent = StateEvent | ItemEvent | PartEvent | DeltaEvent | TextDoneEvent | ArgumentsDoneEvent | ResponseNews


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool
