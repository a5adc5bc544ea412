"""A reply as a Response object, whole or as OpenAI's numbered stream events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinkfold.server.errors import failure_of
from thinkfold.server.generation import Job, Told
from thinkfold.server.logprobs import TokenBytes, chat_logprobs
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.responses.items import ReasoningSeal, message_item, reasoning_item, reasoning_part, text_part
from thinkfold.server.streaming import KEEP_ALIVE, event
from thinkfold.types import CompletionOutput, FinishReason, Phase, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Frame:
    """What a writer needs beside the job. `keep` stores a finished response, if it is to be stored."""

    echo: dict[str, Any]  # the request's fields as the response repeats them
    seal: ReasoningSeal | None  # None: no encrypted content was asked for
    num_logprobs: int | None
    token_bytes: TokenBytes
    keep: Callable[[dict[str, Any], Choice], bool]


@dataclass(slots=True)
class _OpenItem:
    """The item that a stream writes; `pending` are the log-probabilities of text that is still held back."""

    phase: Phase
    parts: list[str] = field(default_factory=list)
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
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._early: list[TokenLogprobs] = []  # of answer tokens before their item has opened

    def whole(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        answers = _answers(choice.logprobs)
        for i, run in enumerate(choice.runs):
            status = _status(choice)[0] if i == len(choice.runs) - 1 else "completed"
            logprobs = next(answers, []) if run.phase is Phase.ANSWER else []
            self._items.append(self._item(run.phase, run.text, status, logprobs))
        return self._finished(reply)

    def start(self, reply: Reply) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def news(self, choice: Choice, news: CompletionOutput, told: Sequence[Told]) -> Iterator[bytes]:
        answers = [item for item in news.logprobs if item.phase is Phase.ANSWER]
        for phase, text in ((Phase.THINKING, news.reasoning), (Phase.ANSWER, news.text)):
            if text:
                yield from self._turn_to(phase, "completed")
            if phase is Phase.ANSWER:
                self._take(answers)
            if text and self._open is not None:
                yield self._delta(self._open, text)
        for name, data in told:
            yield self._event(name, thinkfold=data)

    def end(self, reply: Reply) -> Iterator[bytes]:
        item_status, status = _status(reply.choices[0])
        yield from self._turn_to(None, item_status)
        if not reply.choices[0].runs:
            self._items.clear()  # whoever cancelled the response wanted nothing of it
        name = "completed" if status == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=self._finished(reply))

    def failed(self, error: Exception, reply: Reply) -> Iterator[bytes]:
        told = {"code": "server_error", "message": failure_of(error).message}
        yield self._event("response.failed", response={**self._response("failed"), "error": told})

    def _take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep log-probabilities of answer tokens until their text is told."""
        if self._open is None or self._open.phase is not Phase.ANSWER:
            self._early += logprobs
        else:
            self._open.pending += logprobs

    def _turn_to(self, phase: Phase | None, status: str) -> Iterator[bytes]:
        """Finish the open item, with `status`, unless it is of `phase`, and begin one of it."""
        item, index = self._open, len(self._items)
        if item is not None:
            if item.phase is phase:
                return
            done = self._item(item.phase, "".join(item.parts), status, [*item.logprobs, *item.pending])
            part = done["content"][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **self._place(item.phase), **told)
            yield self._event("response.content_part.done", **self._place(item.phase), part=part)
            yield self._event("response.output_item.done", output_index=index, item=done)
            self._items.append(done)
        self._open = None
        if phase is not None:
            self._open = _OpenItem(phase)
            if phase is Phase.ANSWER:
                self._open.pending, self._early = self._early, []
            part = reasoning_part("") if phase is Phase.THINKING else text_part("", [])
            begun = self._item(phase, None, "in_progress", [])
            yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
            yield self._event("response.content_part.added", **self._place(phase), part=part)

    def _delta(self, item: _OpenItem, text: str) -> bytes:
        item.parts.append(text)
        if item.phase is Phase.THINKING:
            return self._event("response.reasoning_text.delta", **self._place(item.phase), delta=text)
        logprobs = self._logprobs(item.pending)
        item.logprobs += item.pending
        item.pending = []
        return self._event("response.output_text.delta", **self._place(item.phase), delta=text, logprobs=logprobs)

    def _place(self, phase: Phase) -> dict[str, Any]:
        return {"item_id": self._item_id(phase), "output_index": len(self._items), "content_index": 0}

    def _item_id(self, phase: Phase) -> str:
        """The id of the next item."""
        prefix = "rs" if phase is Phase.THINKING else "msg"
        return f"{prefix}_{self._job.response_id.removeprefix('resp_')}_{len(self._items)}"

    def _item(self, phase: Phase, text: str | None, status: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next item; `text` None if it only begins."""
        if phase is Phase.ANSWER:
            return message_item(self._item_id(phase), text, status, self._logprobs(logprobs))
        encrypted = self._frame.seal.seal(text) if self._frame.seal and text is not None else None
        return reasoning_item(self._item_id(phase), text, status, encrypted)

    def _logprobs(self, items: Sequence[TokenLogprobs]) -> list[Any]:
        count = self._frame.num_logprobs
        return [] if count is None else chat_logprobs(items, count, self._frame.token_bytes)["content"]

    def _finished(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        response = self._response(_status(choice)[1])
        if choice.finish_reason is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {
            "completed_at": int(time.time()),
            "usage": _usage(reply),
            "thinking_end_reason": choice.thinking_end_reason,
            "thinkfold": reply.thinkfold(),
        }
        response["store"] = self._frame.keep(response, choice)
        return response

    def _response(self, status: str) -> dict[str, Any]:
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

    def _event(self, name: str, **data: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **data}, name)


def _status(choice: Choice) -> tuple[str, str]:
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


def _usage(reply: Reply) -> dict[str, Any]:
    costs, (output, thinking) = reply.costs(), reply.written()
    return {
        "input_tokens": costs.prompt_tokens,
        "input_tokens_details": {"cached_tokens": costs.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": costs.prompt_tokens + output,
        "thinkfold": reply.bill(),
    }
