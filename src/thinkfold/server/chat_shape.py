"""How `/v1/chat/completions` writes choices: content, thinking, tool calls, log-probabilities."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from thinkfold.server.logprobs import TokenBytes, chat_logprobs
from thinkfold.server.replies import ChunkHead, DeltaEnding, Ending, Head, Logprobs, ThinkfoldReply, Usage
from thinkfold.server.reply import Choice
from thinkfold.text.tool_calls import CallArguments, CallBegun, Content, Event, ToolCallParser, ToolFormat
from thinkfold.types import CompletionOutput


class CalledFunction(TypedDict):
    """`arguments` are JSON in a string, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """`reasoning` and `reasoning_content` are the same text of thinking."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Ending):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None


class FunctionDelta(TypedDict):
    """The begin of a call has its name, later pieces more of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What has come of a choice's message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatDeltaChoice(DeltaEnding):
    """News of one choice; the last one says how it ended."""

    index: int
    delta: ChatDelta
    logprobs: Logprobs | None


class ChatCompletion(Head):
    """A chat completion that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    thinkfold: ThinkfoldReply


class ChatCompletionChunk(ChunkHead):
    """One event of a streamed chat completion; `[DONE]` follows the last."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDeltaChoice]


class ChatShape:
    """`calls` is how the model writes tool calls; None where the request allows none."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, num_logprobs: int | None, token_bytes: TokenBytes, calls: ToolFormat | None = None) -> None:
        self._num_logprobs = num_logprobs
        self._token_bytes = token_bytes
        self._calls = calls
        self._parsers: dict[int, ToolCallParser] = {}

    def whole(self, choice: Choice) -> ChatChoice:
        reasoning = choice.reasoning or None
        content, calls = choice.text, list[ToolCall]()
        if self._calls is not None:
            parser = self._parser(choice)
            content, calls = _joined([*parser.push(choice.text), *parser.flush()])
        message: ChatMessage = {
            "role": "assistant",
            "content": content or None if calls else content,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            **self._ending(choice),
        }

    def opening(self, choice: Choice) -> ChatDeltaChoice:
        return self._delta(choice, {"role": "assistant", "content": ""}, None)

    def deltas(self, choice: Choice, news: CompletionOutput) -> Iterator[ChatDeltaChoice]:
        pieces: list[ChatDelta] = []
        if news.reasoning:
            pieces.append({"reasoning": news.reasoning, "reasoning_content": news.reasoning})
        if self._calls is None:
            pieces += [ChatDelta(content=news.text)] if news.text else []
        else:
            parser = self._parser(choice)
            events = parser.push(news.text) if news.text else []
            events += parser.flush() if news.finish_reason is not None else []
            pieces += map(_piece, events)
        logprobs = self._logprobs(news) if news.logprobs else None
        if logprobs is not None and not pieces:
            pieces.append({})
        for i, piece in enumerate(pieces):
            yield self._delta(choice, piece, logprobs if i == len(pieces) - 1 else None)

    def closing(self, choice: Choice) -> ChatDeltaChoice:
        return {"index": choice.index, "delta": {}, "logprobs": None, **self._ending(choice)}

    def _parser(self, choice: Choice) -> ToolCallParser:
        if choice.index not in self._parsers:
            assert self._calls is not None
            self._parsers[choice.index] = ToolCallParser(self._calls)
        return self._parsers[choice.index]

    def _ending(self, choice: Choice) -> Ending:
        ending = choice.ending()
        if self._calls is not None and self._parser(choice).calls and ending["finish_reason"] == "stop":
            ending["finish_reason"] = "tool_calls"
            if ending["stop_reason"] == self._calls.end:
                ending["stop_reason"] = None  # our own, after a single call
        return ending

    def _delta(self, choice: Choice, delta: ChatDelta, logprobs: Logprobs | None) -> ChatDeltaChoice:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, source: Choice | CompletionOutput) -> Logprobs | None:
        if self._num_logprobs is None:
            return None
        return chat_logprobs(source.logprobs, self._num_logprobs, self._token_bytes)


def _piece(event: Event) -> ChatDelta:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    call = _call(event)
    begun: FunctionDelta = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": call["id"], "type": "function", "function": begun}]}


def _call(event: CallBegun) -> ToolCall:
    identity = f"call_{uuid.uuid4().hex[:24]}"
    return {"id": identity, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _joined(events: Iterable[Event]) -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole answer."""
    content: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, CallBegun):
            calls.append(_call(event))
        else:
            calls[event.index]["function"]["arguments"] += event.text
    return "".join(content), calls
