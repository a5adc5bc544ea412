"""OpenAI's two older APIs as a reply is written: one JSON object, or chunks that end with `[DONE]`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from thinkfold.server.errors import failure_of, openai_body
from thinkfold.server.generation import Job, Told
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.streaming import DONE, KEEP_ALIVE, event
from thinkfold.types import CompletionOutput


class Shape(Protocol):
    """How an API writes choices."""

    kind: str
    chunk_kind: str

    def whole(self, choice: Choice) -> Mapping[str, Any]:
        """A finished choice of a reply that is not streamed."""
        ...

    def opening(self, choice: Choice) -> Mapping[str, Any] | None:
        """The first chunk of a streamed choice."""
        ...

    def deltas(self, choice: Choice, news: CompletionOutput) -> Iterable[Mapping[str, Any]]:
        """Chunks for news of a choice, without its ending."""
        ...

    def closing(self, choice: Choice) -> Mapping[str, Any]:
        """The last chunk of a choice."""
        ...


class ChunkWriter:
    """Writes the choices of a `shape`. A streamed choice ends with one chunk that says why."""

    keep_alive = KEEP_ALIVE
    keeps_text = False

    def __init__(self, job: Job, shape: Shape, *, include_usage: bool) -> None:
        self._job = job
        self._shape = shape
        self._include_usage = include_usage
        self._head = self._new_head(shape.chunk_kind)
        self._open: set[int] = set()

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        choices = [self._shape.whole(choice) for choice in reply.choices]
        head = self._new_head(self._shape.kind)
        return {**head, "choices": choices, "usage": reply.usage(), "thinkfold": reply.thinkfold()}

    def start(self, reply: Reply) -> Iterator[bytes]:
        self._open = {choice.index for choice in reply.choices}
        for choice in reply.choices:
            opening = self._shape.opening(choice)
            if opening is not None:
                yield self._chunk([opening])

    def news(self, choice: Choice, news: CompletionOutput, told: Sequence[Told]) -> Iterator[bytes]:
        so_far = {"thinkfold": {"output_tokens": news.num_output_tokens}} if self._job.events else {}
        for delta in self._shape.deltas(choice, news):
            yield self._chunk([delta], so_far)
        for name, data in told:
            yield self._chunk([], {"thinkfold": data}, name)
        # The last choice's end waits for the request's, so that costs can go with it.
        if choice.finish_reason is not None and len(self._open) > 1 and choice.index in self._open:
            self._open.discard(choice.index)
            yield self._chunk([self._shape.closing(choice)])

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield from self._close_choices(reply)
        if self._include_usage:
            yield self._chunk([], {"usage": reply.usage(), "thinkfold": reply.thinkfold()})
        yield f"data: {DONE}\n\n".encode()

    def failed(self, error: Exception, reply: Reply) -> Iterator[bytes]:
        if reply.error is not None:
            yield from self._close_choices(reply)
        yield event(openai_body(failure_of(error)))
        yield f"data: {DONE}\n\n".encode()

    def _close_choices(self, reply: Reply) -> Iterator[bytes]:
        last = sorted(self._open)
        for index in last:
            more = {} if self._include_usage or index != last[-1] else {"thinkfold": reply.thinkfold()}
            yield self._chunk([self._shape.closing(reply.choices[index])], more)

    def _chunk(self, choices: list[Mapping[str, Any]], more: Mapping[str, Any] | None = None, name: str = "") -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": choices, **usage, **(more or {})}, name)

    def _new_head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.response_id, "object": kind, "created": int(time.time()), "model": self._job.model}
