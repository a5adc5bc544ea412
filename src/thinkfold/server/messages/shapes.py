"""Shapes of a Message, its blocks and its stream's events."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from thinkfold.server.replies import Bill, ThinkfoldEvent, ThinkfoldReply
from thinkfold.types import ThinkingEndReason


class TextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Thinking. Send the block back as it came: its signature proves, or holds, the text."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call of a tool. What the model wrote that is no JSON object is `{"INVALID_JSON": text}`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """`input_tokens` are those that the prefix cache did not have. A stream's first event knows two fields only."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_read_input_tokens: NotRequired[int]
    output_tokens_details: NotRequired[ThinkingTokens]
    thinkfold: NotRequired[Bill]


class MessageStop(TypedDict):
    """Why the message ended; null at a stream's begin."""

    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"]
        | None
    )
    stop_sequence: str | None


class MessageHead(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]


class MessageMore(TypedDict):
    """What Anthropic's shape has no place for."""

    thinking_end_reason: ThinkingEndReason | None
    thinkfold: ThinkfoldReply


class Message(MessageHead, MessageStop, MessageMore):
    """A message that is not streamed."""

    usage: MessageUsage


class BegunMessage(MessageHead, MessageStop):
    """A message at its stream's begin."""

    usage: MessageUsage


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(MessageMore):
    type: Literal["message_delta"]
    delta: MessageStop
    usage: MessageUsage


class PlainEvent(TypedDict):
    type: Literal["ping", "message_stop"]


class MessageNews(TypedDict):
    """An event of ours, where `thinkfold.events` asked for it."""

    type: Literal["thinkfold.segment", "thinkfold.fold", "thinkfold.vote", "thinkfold.best_of", "thinkfold.search"]
    thinkfold: ThinkfoldEvent


class ErrorDetail(TypedDict):
    type: str
    message: str


class MessagesError(TypedDict):
    """Anthropic's error; the message begins with the field's name. In a stream it is the last event."""

    type: Literal["error"]
    error: ErrorDetail


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | PlainEvent | MessageNews | MessagesError


class TokenCount(TypedDict):
    """Tokens of a prompt."""

    input_tokens: int
