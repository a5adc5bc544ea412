"""From a checked job to an HTTP response, whole or streamed. Knows no API's shape."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from thinkfold.errors import ParameterError, RequestFailedError, ThinkfoldError
from thinkfold.server.contract import Engine
from thinkfold.server.errors import ClientGoneError, describe, renamed
from thinkfold.server.feed import Feed
from thinkfold.server.folds import EVENT, fold_data, log_fold
from thinkfold.server.metrics import RequestTimer
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.state import state_of
from thinkfold.server.streaming import DONE, KEEP_ALIVE, EventStream, event
from thinkfold.types import CompletionOutput, FoldParams, RequestOutput, SamplingParams, ThinkingParams

logger = logging.getLogger(__name__)


class Shape(Protocol):
    """How one API writes choices."""

    kind: str
    chunk_kind: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice of a reply that is not streamed."""
        ...

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a streamed choice."""
        ...

    def deltas(self, choice: Choice, news: CompletionOutput) -> Iterable[dict[str, Any]]:
        """Chunks for news of a choice, without its ending."""
        ...

    def closing(self, choice: Choice) -> dict[str, Any]:
        """The last chunk of a choice."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate, and how to send it. `events`: tell a stream's client each fold."""

    response_id: str
    model: str
    prompts: list[list[int]]
    sampling: SamplingParams
    thinking: ThinkingParams
    namespace: tuple[str, ...]
    stream: bool
    include_usage: bool
    fold: FoldParams | None = None
    events: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # the engine's names of fields as the client knows them

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": int(time.time()), "model": self.model}


async def respond(request: Request, engine: Engine, job: Job, shape: Shape) -> Response:
    """Run the job. Errors before the first output are raised, later ones end the stream."""
    state = state_of(request)
    timer = state.metrics.timer()
    feed = Feed(request, [_generate(engine, job, i) for i in range(len(job.prompts))])
    handed_over = False
    try:
        if not job.stream:
            return JSONResponse(await _whole(feed, job, shape, timer))
        # Refusals come at once; a request that only waits for its turn gets its headers.
        first = await feed.next(state.options.keepalive_s)
        stream = _Stream(feed, job, shape, timer, state.options.keepalive_s)
        handed_over = True
        return EventStream(stream.events(first), feed.close)
    finally:
        if not handed_over:
            await feed.close()


async def _generate(engine: Engine, job: Job, index: int) -> AsyncGenerator[RequestOutput, None]:
    request_id = job.response_id if len(job.prompts) == 1 else f"{job.response_id}-{index}"
    outputs = engine.generate(
        job.prompts[index], job.sampling, job.thinking, job.fold, request_id=request_id, namespace=job.namespace
    )
    async with aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except ParameterError as error:
            raise renamed(error, job.names) from None


def _folds(job: Job, choice: Choice, news: CompletionOutput) -> list[dict[str, Any]]:
    """The folds of a choice's news as JSON, each with its line in the log."""
    folds = [fold_data(choice.index, fold, choice.segments) for fold in news.folds]
    for data in folds:
        log_fold(job.response_id, data)
    return folds


async def _whole(feed: Feed, job: Job, shape: Shape, timer: RequestTimer) -> dict[str, Any]:
    reply = Reply(len(job.prompts), job.sampling.n, keep_text=True)
    while not reply.finished:
        item = await feed.next()
        if item is not None:
            timer.observe(item[1])
            for choice, news in reply.add(*item):
                _folds(job, choice, news)
    if reply.error is not None:
        raise RequestFailedError(reply.error)
    timer.finish(reply.longest)
    choices = [shape.whole(choice) for choice in reply.choices]
    return {**job.head(shape.kind), "choices": choices, "usage": reply.usage(), "thinkfold": reply.thinkfold()}


class _Stream:
    """The events of one streamed reply. A choice ends with one chunk that says why."""

    def __init__(self, feed: Feed, job: Job, shape: Shape, timer: RequestTimer, keepalive_s: float) -> None:
        self._feed = feed
        self._job = job
        self._shape = shape
        self._timer = timer
        self._keepalive_s = keepalive_s
        self._head = job.head(shape.chunk_kind)
        self._reply = Reply(len(job.prompts), job.sampling.n, keep_text=False)
        self._open = {choice.index for choice in self._reply.choices}

    async def events(self, item: tuple[int, RequestOutput] | None) -> AsyncGenerator[bytes, None]:
        """All events, from the first output (None: not there yet) on."""
        for choice in self._reply.choices:
            opening = self._shape.opening(choice)
            if opening is not None:
                yield self._chunk([opening])
        try:
            while True:
                if item is None:
                    yield KEEP_ALIVE
                else:
                    for data in self._news(*item):
                        yield data
                if self._reply.finished:
                    break
                item = await self._feed.next(self._keepalive_s)
        except ClientGoneError:
            return
        except Exception as error:
            if not isinstance(error, ThinkfoldError):
                logger.exception("a stream failed")
            yield event(describe(error)[1])
        else:
            for data in self._ending():
                yield data
        yield DONE

    def _news(self, prompt: int, output: RequestOutput) -> Iterable[bytes]:
        self._timer.observe(output)
        for choice, news in self._reply.add(prompt, output):
            for delta in self._shape.deltas(choice, news):
                yield self._chunk([delta])
            for data in _folds(self._job, choice, news):
                if self._job.events:
                    yield self._chunk([], {"thinkfold": {"fold": data}}, EVENT)
            # The last choice's end waits for the request's, so that costs can go with it.
            if choice.finish_reason is not None and len(self._open) > 1 and choice.index in self._open:
                self._open.discard(choice.index)
                yield self._chunk([self._shape.closing(choice)])

    def _ending(self) -> Iterable[bytes]:
        self._timer.finish(self._reply.longest)
        thinkfold = {"thinkfold": self._reply.thinkfold()}
        last = sorted(self._open)
        for index in last:
            closing = self._shape.closing(self._reply.choices[index])
            yield self._chunk([closing], {} if self._job.include_usage or index != last[-1] else thinkfold)
        if self._reply.error is not None:
            yield event(describe(RequestFailedError(self._reply.error))[1])
        elif self._job.include_usage:
            yield self._chunk([], {"usage": self._reply.usage(), **thinkfold})

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None, name: str = "") -> bytes:
        usage = {"usage": None} if self._job.include_usage else {}
        return event({**self._head, "choices": choices, **usage, **(more or {})}, name)
