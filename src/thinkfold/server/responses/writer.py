"""A reply as a Response object, whole or as OpenAI's numbered stream events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinkfold.server.errors import failure_of
from thinkfold.server.generation import Job, Told
from thinkfold.server.logprobs import TokenBytes, chat_logprobs
from thinkfold.server.parts import Event, Part, PartReader, part_of, parts_of
from thinkfold.server.replies import TokenLogprob
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.responses.items import (
    ReasoningSeal,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from thinkfold.server.responses.shapes import Echo, Item, ItemStatus, ResponseBody, ResponseUsage, Status
from thinkfold.server.serving import Serving
from thinkfold.server.streaming import KEEP_ALIVE, event
from thinkfold.text.tool_calls import CallBegun, ToolFormat
from thinkfold.types import CompletionOutput, FinishReason, Phase, TokenLogprobs

Keep = Callable[[ResponseBody, Sequence[Part], Serving], bool]
_ID_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True, slots=True)
class Frame:
    """What a writer needs beside the job. `keep` stores a finished response, if it is to be stored."""

    echo: Echo  # the request's fields as the response repeats them
    seal: ReasoningSeal | None  # None: no encrypted content was asked for
    num_logprobs: int | None
    token_bytes: TokenBytes
    keep: Keep
    calls: ToolFormat | None  # how the model writes calls; None where it may write none


@dataclass(slots=True)
class _OpenItem:
    """The item that a stream writes; `pending` are the log-probabilities of text that is still held back."""

    part: Part
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pending: list[TokenLogprobs] = field(default_factory=list)


class ResponseWriter:
    """An item opens when its first text comes and is done when another begins, or the response ends."""

    keep_alive = KEEP_ALIVE
    keeps_text = True

    def __init__(self, job: Job, frame: Frame) -> None:
        self._job = job
        self._frame = frame
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._items: list[Item] = []
        self._parts: list[Part] = []
        self._open: _OpenItem | None = None
        self._reader = PartReader(frame.calls)
        self._early: list[TokenLogprobs] = []  # of answer tokens before their item has opened

    def whole(self, reply: Reply) -> ResponseBody:
        choice = reply.choices[0]
        answers = _answers(choice.logprobs)
        self._parts = parts_of(choice.runs, self._reader)
        for i, part in enumerate(self._parts):
            status = _status(choice)[0] if i == len(self._parts) - 1 else "completed"
            logprobs = next(answers, []) if part.kind == "text" else []
            self._items.append(self._item(part, part.text, status, logprobs))
        return self._finished(reply)

    def start(self, reply: Reply) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def news(self, choice: Choice, news: CompletionOutput, told: Sequence[Told]) -> Iterator[bytes]:
        answers = [item for item in news.logprobs if item.phase is Phase.ANSWER]
        yield from self._tell(self._reader.read(Phase.THINKING, news.reasoning))
        events = self._reader.read(Phase.ANSWER, news.text)
        events += self._reader.flush() if news.finish_reason is not None else []
        yield from self._tell(events, answers)
        for name, data in told:
            yield self._event(name, thinkfold=data)

    def end(self, reply: Reply) -> Iterator[bytes]:
        item_status, status = _status(reply.choices[0])
        yield from self._turn_to(None, item_status)
        if not reply.choices[0].runs:  # whoever cancelled the response wanted nothing of it
            self._items.clear()
            self._parts.clear()
        name = "completed" if status == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=self._finished(reply))

    def failed(self, error: Exception, reply: Reply) -> Iterator[bytes]:
        told = {"code": "server_error", "message": failure_of(error).message}
        yield self._event("response.failed", response={**self._response("failed"), "error": told})

    def _take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep log-probabilities of answer tokens until their text is told."""
        if self._open is None or self._open.part.kind != "text":
            self._early += logprobs
        else:
            self._open.pending += logprobs

    def _tell(self, events: Iterable[Event], logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[bytes]:
        for each in events:
            part = part_of(each, self._open.part if self._open is not None else None)
            yield from self._turn_to(part, "completed")
            self._take(logprobs)
            logprobs = ()
            if self._open is not None and not isinstance(each, CallBegun):
                yield self._delta(self._open, each.text)
        self._take(logprobs)

    def _turn_to(self, part: Part | None, status: ItemStatus) -> Iterator[bytes]:
        """Finish the open item, with `status`, unless it is that of `part`, and begin this one's."""
        item, index = self._open, len(self._items)
        if item is not None and item.part is part:
            return
        if item is not None:
            done = self._item(item.part, item.part.text, status, [*item.logprobs, *item.pending])
            yield from self._closing(item.part, done)
            yield self._event("response.output_item.done", output_index=index, item=done)
            self._items.append(done)
            self._parts.append(item.part)
        self._open = None
        if part is not None:
            self._open = _OpenItem(part)
            if part.kind == "text":
                self._open.pending, self._early = self._early, []
            begun = self._item(part, None, "in_progress", [])
            yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
            if part.kind != "call":
                content = reasoning_part("") if part.kind == "thinking" else text_part("", [])
                yield self._event("response.content_part.added", **self._place(part), part=content)

    def _closing(self, part: Part, done: Item) -> Iterator[bytes]:
        """The events between the last delta of an item and its own end."""
        if done["type"] == "function_call":
            told = {"name": part.name, "arguments": part.text}
            yield self._event("response.function_call_arguments.done", **self._place(part), **told)
            return
        content = done["content"][0]
        told: dict[str, Any] = {"text": content["text"]}
        if content["type"] == "output_text":
            told["logprobs"] = content["logprobs"]
        yield self._event(f"response.{content['type']}.done", **self._place(part), **told)
        yield self._event("response.content_part.done", **self._place(part), part=content)

    def _delta(self, item: _OpenItem, text: str) -> bytes:
        place = self._place(item.part)
        item.part.pieces.append(text)
        if item.part.kind == "call":
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if item.part.kind == "thinking":
            return self._event("response.reasoning_text.delta", **place, delta=text)
        logprobs = self._logprobs(item.pending)
        item.logprobs += item.pending
        item.pending = []
        return self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _place(self, part: Part) -> dict[str, Any]:
        place = {"item_id": self._item_id(part), "output_index": len(self._items)}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _item_id(self, part: Part) -> str:
        """The id of the next item."""
        return f"{_ID_PREFIXES[part.kind]}_{self._job.response_id.removeprefix('resp_')}_{len(self._items)}"

    def _item(self, part: Part, text: str | None, status: ItemStatus, logprobs: Sequence[TokenLogprobs]) -> Item:
        """The next item; `text` None if it only begins."""
        item_id = self._item_id(part)
        if part.kind == "call":
            return call_item(item_id, part, text or "", status)
        if part.kind == "text":
            return message_item(item_id, text, status, self._logprobs(logprobs))
        encrypted = self._frame.seal.seal(text) if self._frame.seal and text is not None else None
        return reasoning_item(item_id, text, status, encrypted)

    def _logprobs(self, items: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        count = self._frame.num_logprobs
        return [] if count is None else chat_logprobs(items, count, self._frame.token_bytes)["content"]

    def _finished(self, reply: Reply) -> ResponseBody:
        choice = reply.choices[0]
        response = self._response(_status(choice)[1])
        if choice.finish_reason is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["completed_at"] = int(time.time())
        response["usage"] = _usage(reply)
        response["thinking_end_reason"] = choice.thinking_end_reason
        response["thinkfold"] = reply.thinkfold()
        response["store"] = self._frame.keep(response, self._parts, reply.serving)
        return response

    def _response(self, status: Status) -> ResponseBody:
        return {
            "id": self._job.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._job.model,
            "output": list(self._items),
            "usage": None,
            **self._frame.echo,
        }

    def _event(self, name: str, /, **data: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **data}, name)


def _status(choice: Choice) -> tuple[ItemStatus, Status]:
    """Status of the last item and of the response."""
    if choice.finish_reason is FinishReason.STOP:
        return "completed", "completed"
    return "incomplete", "incomplete" if choice.finish_reason is FinishReason.LENGTH else "cancelled"


def _answers(logprobs: Sequence[TokenLogprobs]) -> Iterator[list[TokenLogprobs]]:
    """The stretches of answer tokens, one a message."""
    shown = [item for item in logprobs if item.phase is not None]
    for phase, group in itertools.groupby(shown, lambda item: item.phase):
        if phase is Phase.ANSWER:
            yield list(group)


def _usage(reply: Reply) -> ResponseUsage:
    costs, (output, thinking) = reply.costs(), reply.written()
    return {
        "input_tokens": costs.prompt_tokens,
        "input_tokens_details": {"cached_tokens": costs.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": costs.prompt_tokens + output,
        "thinkfold": reply.bill(),
    }
