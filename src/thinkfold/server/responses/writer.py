"""A reply as a Response object, whole or as OpenAI's numbered stream events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thinkfold.server.errors import failure_of
from thinkfold.server.folds import EVENT
from thinkfold.server.generation import Job
from thinkfold.server.logprobs import TokenBytes, chat_logprobs
from thinkfold.server.reply import Choice, Reply, three_costs
from thinkfold.server.responses.items import ReasoningSeal, message_item, reasoning_item, reasoning_part, text_part
from thinkfold.server.streaming import KEEP_ALIVE, event
from thinkfold.types import CompletionOutput, FinishReason, Phase, TokenLogprobs

_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}


@dataclass(frozen=True, slots=True)
class Frame:
    """What a writer needs beside the job. `keep` stores a finished response, if it is to be stored."""

    echo: dict[str, Any]  # the request's fields as the response repeats them
    seal: ReasoningSeal | None  # None: no encrypted content was asked for
    num_logprobs: int | None
    token_bytes: TokenBytes
    keep: Callable[[dict[str, Any], Choice], bool]


class ResponseWriter:
    """An item opens when its first text comes and is done when another begins, or the response ends."""

    keep_alive = KEEP_ALIVE
    keeps_text = True

    def __init__(self, job: Job, frame: Frame) -> None:
        self._job = job
        self._frame = frame
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._open: Phase | None = None
        self._pending: list[TokenLogprobs] = []  # of answer tokens whose text is still held back
        self._items: list[dict[str, Any]] = []

    def whole(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        for index in range(len(choice.runs)):
            self._items.append(self._item(choice, index))
        return self._finished(reply)

    def start(self, reply: Reply) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def news(self, choice: Choice, news: CompletionOutput, folds: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        self._pending += [item for item in news.logprobs if item.phase is Phase.ANSWER]
        for phase, text in ((Phase.THINKING, news.reasoning), (Phase.ANSWER, news.text)):
            if text:
                yield from self._turn_to(phase, choice)
                yield self._delta(phase, text)
        for data in folds:
            if self._job.events:
                yield self._event(EVENT, thinkfold={"fold": data})

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield from self._turn_to(None, reply.choices[0])
        response = self._finished(reply)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception, reply: Reply) -> Iterator[bytes]:
        told = {"code": "server_error", "message": failure_of(error).message}
        yield self._event("response.failed", response={**self._response("failed"), "error": told})

    def _turn_to(self, phase: Phase | None, choice: Choice) -> Iterator[bytes]:
        """Finish the open item unless it is of `phase`, and begin one of it."""
        if phase is self._open:
            return
        if self._open is not None:
            item = self._item(choice, len(self._items))
            part = item["content"][0]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **self._place(self._open), **done)
            yield self._event("response.content_part.done", **self._place(self._open), part=part)
            yield self._event("response.output_item.done", output_index=len(self._items), item=item)
            self._items.append(item)
        self._open = phase
        if phase is not None:
            part = reasoning_part("") if phase is Phase.THINKING else text_part("", [])
            item = self._made(phase, len(self._items), None, "in_progress", None, [])
            yield self._event("response.output_item.added", output_index=len(self._items), item=item)
            yield self._event("response.content_part.added", **self._place(phase), part=part)

    def _delta(self, phase: Phase, text: str) -> bytes:
        if phase is Phase.THINKING:
            return self._event("response.reasoning_text.delta", **self._place(phase), delta=text)
        logprobs, self._pending = self._logprobs(self._pending), []
        return self._event("response.output_text.delta", **self._place(phase), delta=text, logprobs=logprobs)

    def _place(self, phase: Phase) -> dict[str, Any]:
        index = len(self._items)
        return {"item_id": self._item_id(phase, index), "output_index": index, "content_index": 0}

    def _item_id(self, phase: Phase, index: int) -> str:
        prefix = "rs" if phase is Phase.THINKING else "msg"
        return f"{prefix}_{self._job.response_id.removeprefix('resp_')}_{index}"

    def _item(self, choice: Choice, index: int) -> dict[str, Any]:
        """The item of a choice's run; the last one of a response that was cut is incomplete."""
        run = choice.runs[index]
        last = index == len(choice.runs) - 1
        status = "incomplete" if last and choice.finish_reason is FinishReason.LENGTH else "completed"
        encrypted = self._frame.seal.seal(run.text) if self._frame.seal and run.phase is Phase.THINKING else None
        before = sum(r.phase is Phase.ANSWER for r in choice.runs[:index])
        return self._made(run.phase, index, run.text, status, encrypted, _answers(choice.logprobs, before))

    def _made(
        self,
        phase: Phase,
        index: int,
        text: str | None,
        status: str,
        encrypted: str | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        item_id = self._item_id(phase, index)
        if phase is Phase.THINKING:
            return reasoning_item(item_id, text, status, encrypted)
        return message_item(item_id, text, status, self._logprobs(logprobs))

    def _logprobs(self, items: Sequence[TokenLogprobs]) -> list[Any]:
        count = self._frame.num_logprobs
        return [] if count is None else chat_logprobs(items, count, self._frame.token_bytes)["content"]

    def _finished(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        status = _STATUS.get(choice.finish_reason, "cancelled") if choice.finish_reason else "cancelled"
        response = self._response(status)
        if status == "incomplete":
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


def _answers(logprobs: Sequence[TokenLogprobs], number: int) -> list[TokenLogprobs]:
    """Those of the `number`-th stretch of answer tokens."""
    shown = [item for item in logprobs if item.phase is not None]
    stretches = [list(group) for phase, group in itertools.groupby(shown, lambda x: x.phase) if phase is Phase.ANSWER]
    return stretches[number] if number < len(stretches) else []


def _usage(reply: Reply) -> dict[str, Any]:
    costs, choice = reply.costs(), reply.choices[0]
    return {
        "input_tokens": costs.prompt_tokens,
        "input_tokens_details": {"cached_tokens": costs.cached_tokens},
        "output_tokens": choice.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.num_thinking_tokens},
        "total_tokens": costs.prompt_tokens + choice.num_output_tokens,
        "thinkfold": three_costs(costs),
    }
