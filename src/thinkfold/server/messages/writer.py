"""A reply as a Message, whole or as Anthropic's stream events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinkfold.server.errors import failure_of
from thinkfold.server.generation import Job, Told
from thinkfold.server.messages.blocks import ThinkingSeal, call_block, content_of
from thinkfold.server.messages.errors import error_body
from thinkfold.server.messages.shapes import (
    BegunMessage,
    Block,
    InputDelta,
    Message,
    MessageEvent,
    MessageHead,
    MessageMore,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)
from thinkfold.server.parts import Part, PartReader, part_of, parts_of
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.streaming import event
from thinkfold.text.tool_calls import CallBegun, ToolFormat
from thinkfold.types import CompletionOutput, FinishReason, Phase

PING = event({"type": "ping"}, "ping")


class MessageWriter:
    """Blocks open when their first text comes and close when another begins, or the message ends."""

    keep_alive = PING
    keeps_text = True

    def __init__(self, job: Job, seal: ThinkingSeal, calls: ToolFormat | None, *, omits_thinking: bool) -> None:
        self._job = job
        self._seal = seal
        self._omitted = omits_thinking
        self._reader = PartReader(calls)
        self._open: Part | None = None
        self._index = -1

    def whole(self, reply: Reply) -> Message:
        choice = reply.choices[0]
        content = content_of(parts_of(choice.runs, self._reader), self._seal, omitted=self._omitted)
        return {
            **self._head(content),
            **self._stop(choice),
            "usage": _usage(reply),
            **_more(reply),
        }

    def start(self, reply: Reply) -> Iterator[bytes]:
        # How much of the prompt was cached is not known yet; `message_delta` says it.
        usage: MessageUsage = {"input_tokens": len(self._job.prompts[0]), "output_tokens": 0}
        message: BegunMessage = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": message})

    def news(self, choice: Choice, news: CompletionOutput, told: Sequence[Told]) -> Iterator[bytes]:
        events = [*self._reader.read(Phase.THINKING, news.reasoning), *self._reader.read(Phase.ANSWER, news.text)]
        events += self._reader.flush() if news.finish_reason is not None else []
        for each in events:
            part = part_of(each, self._open)
            yield from self._turn_to(part)
            if not isinstance(each, CallBegun):
                yield from self._delta(part, each.text)
        for name, data in told:
            yield event({"type": name, "thinkfold": data}, name)

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield from self._turn_to(None)
        stop = self._stop(reply.choices[0])
        yield _event({"type": "message_delta", "delta": stop, "usage": _usage(reply), **_more(reply)})
        yield _event({"type": "message_stop"})

    def failed(self, error: Exception, reply: Reply) -> Iterator[bytes]:
        yield event(error_body(failure_of(error)), "error")

    def _turn_to(self, part: Part | None) -> Iterator[bytes]:
        """End the open block unless it is that of `part`, and begin this one's."""
        if part is self._open:
            return
        if self._open is not None and self._open.kind == "thinking":
            signature = self._seal.signature(self._open.text, self._omitted)
            yield self._block_delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield _event({"type": "content_block_stop", "index": self._index})
        self._open = part
        if part is not None:
            self._index += 1
            yield _event({"type": "content_block_start", "index": self._index, "content_block": _begun(part)})

    def _delta(self, part: Part, text: str) -> Iterator[bytes]:
        if part.kind == "text":
            yield self._block_delta({"type": "text_delta", "text": text})
        elif part.kind == "call":
            yield self._block_delta({"type": "input_json_delta", "partial_json": text})
        else:
            part.pieces.append(text)
            if not self._omitted:
                yield self._block_delta({"type": "thinking_delta", "thinking": text})

    def _block_delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _head(self, content: list[Block]) -> MessageHead:
        return {
            "id": self._job.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
        }

    def _stop(self, choice: Choice) -> MessageStop:
        limit = self._job.sampling.max_tokens
        if choice.finish_reason is FinishReason.ABORT:  # cancelled from outside; sent back, it goes on
            return {"stop_reason": "pause_turn", "stop_sequence": None}
        if choice.finish_reason is FinishReason.LENGTH:
            at_limit = limit is not None and choice.num_output_tokens >= limit
            return {"stop_reason": "max_tokens" if at_limit else "model_context_window_exceeded", "stop_sequence": None}
        if self._reader.calls and choice.finish_reason is FinishReason.STOP:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(choice.stop_reason, str) and choice.stop_reason in self._job.sampling.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _begun(part: Part) -> Block:
    """A block without its content."""
    if part.kind == "call":
        return call_block(part)
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(data: MessageEvent) -> bytes:
    return event(data, data["type"])


def _more(reply: Reply) -> MessageMore:
    """What Anthropic's shape has no place for."""
    return {"thinking_end_reason": reply.choices[0].thinking_end_reason, "thinkfold": reply.thinkfold()}


def _usage(reply: Reply) -> MessageUsage:
    """Input tokens are those that the prefix cache did not have."""
    costs, (output, thinking) = reply.costs(), reply.written()
    return {
        "input_tokens": costs.prompt_tokens - costs.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": costs.cached_tokens,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
        "thinkfold": reply.bill(),
    }
