"""From a checked job to an HTTP response, whole or streamed. Knows no API's shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from thinkfold.engine.samples import Question
from thinkfold.errors import ConflictError, ParameterError, ThinkfoldError
from thinkfold.server.access.quotas import Lease
from thinkfold.server.contract import Engine, deciding
from thinkfold.server.drift import Conversations, Owner, look_back
from thinkfold.server.errors import ClientGoneError, renamed
from thinkfold.server.feed import Feed
from thinkfold.server.folds import EVENT, SEGMENT_EVENT, ThinkfoldFields, fold_data, log_fold, segment_data
from thinkfold.server.metrics import RequestTimer
from thinkfold.server.reply import Choice, Reply
from thinkfold.server.request_log import log_request
from thinkfold.server.serving import Asks, Serving, open_serving
from thinkfold.server.state import owned, state_of
from thinkfold.server.streaming import EventStream
from thinkfold.server.turns import NextTurn, compute_ahead
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Decision,
    Outcome,
    RequestOutput,
    SamplingParams,
    SearchParams,
    ThinkingParams,
)

logger = logging.getLogger(__name__)


class Told(NamedTuple):
    """An event of our own on a stream."""

    name: str
    data: dict[str, Any]


class Writer(Protocol):
    """How one API writes one reply. Bytes are whole server-sent events."""

    keep_alive: bytes
    keeps_text: bool  # whether a stream needs the choices' texts at its end

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """The body of a reply that is not streamed."""
        ...

    def start(self, reply: Reply) -> Iterable[bytes]:
        """Events before any output."""
        ...

    def news(self, choice: Choice, news: CompletionOutput, told: Sequence[Told]) -> Iterable[bytes]:
        """Events for the news of one choice; `told` are our own."""
        ...

    def end(self, reply: Reply) -> Iterable[bytes]:
        """The last events of a complete reply."""
        ...

    def failed(self, error: Exception, reply: Reply) -> Iterable[bytes]:
        """The last events of a stream that broke off; `reply.error` is set if the request itself failed."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate, and how to send it. `events`: tell a stream's client each segment and fold."""

    response_id: str
    model: str
    prompts: list[list[int]]
    sampling: SamplingParams
    thinking: ThinkingParams
    namespace: tuple[str, ...]
    stream: bool
    wish: ThinkfoldFields | None = None
    events: bool = False
    turn: NextTurn | None = None  # where the reply is an answer in a chat
    parameters: tuple[object, ...] = ()  # what else an answer depends on, such as tools
    control: ControlParams | None = None
    how: Decision | None = None  # where the reply is decided over several samples
    question: str = ""  # as a verifier reads it
    names: Mapping[str, str] = field(default_factory=dict)  # the engine's names of fields as the client knows them

    @property
    def samples(self) -> int:
        """Choices, samples or branches of a search, of each prompt."""
        return self.sampling.n if self.how is None else self.how.samples

    @property
    def thinking_choices(self) -> int:
        """Choices that may think."""
        return 0 if self.thinking.template_switch is False else len(self.prompts) * self.samples

    def asks(self, engine: Engine) -> Asks:
        """What its tier has to allow. The steps of a search end by their own rules, whatever the tier stops early."""
        field, can_stop = "n", engine.model.budget_enforced
        if self.how is not None:
            field = f"{self.names.get(self.how.field, self.how.field)}.{self.how.counted}"
            can_stop = can_stop and not isinstance(self.how, SearchParams)
        return Asks(len(self.prompts), self.samples, field, self.control, can_stop)


async def respond(request: Request, engine: Engine, job: Job, writer: Writer) -> Response:
    """Run the job. Errors before the first output are raised, later ones end the stream."""
    state = state_of(request)
    namespace = owned(request, job.namespace)
    depends = (job.model, job.namespace, job.thinking, job.control, job.how, *job.parameters)
    serving = open_serving(request, job.wish, job.sampling, job.asks(engine), depends)
    timer = state.metrics.timer(serving.service.tier.name, serving.slo)
    try:
        lease = state.access.lease(request, 0 if serving.answer else job.thinking_choices)
    except ThinkfoldError:
        serving.close()
        raise
    accounts = (lease, serving, state.conversations)
    feed = Feed(request, [_generate(engine, job, i, namespace, accounts) for i in range(len(job.prompts))])
    logged = state.options.log_requests
    keep_text = not job.stream or writer.keeps_text or logged == "text"
    reply = Reply(len(job.prompts), job.sampling.n, keep_text=keep_text, serving=serving)
    handed_over = False

    async def close() -> None:
        lease.close()
        serving.close()
        await feed.close()
        if logged != "none" and reply.begun:
            prompts = [engine.prompts.decode(prompt) for prompt in job.prompts] if logged == "text" else None
            log_request(job.response_id, reply, prompts)

    try:
        if not job.stream:
            return JSONResponse(await _whole(feed, job, writer, (timer, reply)))
        # Refusals come at once; a request that only waits for its turn gets its headers.
        first = await feed.next(state.options.keepalive_s)
        if first is not None and first[1].finished and first[1].failure is not None and len(job.prompts) == 1:
            raise first[1].failure
        events = _events(first, feed, job, writer, (timer, reply), state.options.keepalive_s)
        handed_over = True
        return EventStream(events, close)
    finally:
        if not handed_over:
            await close()


async def _generate(
    engine: Engine, job: Job, index: int, namespace: tuple[str, ...], accounts: tuple[Lease, Serving, Conversations]
) -> AsyncGenerator[RequestOutput, None]:
    request_id = job.response_id if len(job.prompts) == 1 else f"{job.response_id}-{index}"
    lease, serving, conversations = accounts
    if serving.answer is not None:
        outputs = serving.kept(request_id)
    else:
        outputs = _outputs(engine, job, index, request_id, namespace, serving)
    texts: list[str] = []
    chosen = job.sampling.n == 1 and serving.answer is None  # of several choices nobody knows which one goes on
    turn = job.turn if chosen else None
    async with aclosing(outputs):
        try:
            async for output in outputs:
                lease.note(index, output)
                if job.how is not None and not serving.leaves_traces:
                    raise ConflictError("its session was deleted")  # or it would start other samples
                if turn is not None:
                    turn.note(output)
                    if output.finished and serving.leaves_traces:
                        compute_ahead(engine, turn, request_id, namespace, serving.tenant, serving.session)
                serving.note(index, output)
                if output.finished and job.turn is not None and serving.answer is None and serving.leaves_traces:
                    owner = Owner(serving.tenant, job.namespace, serving.session)
                    tokens = len(job.prompts[index])
                    serving.drift = await look_back(conversations, owner, engine, job.turn, tokens, output)
                if serving.cache is not None:
                    texts += [news.text for news in output.outputs]
                    if output.finished:
                        serving.keep("".join(texts), output)
                yield output
        except ParameterError as error:
            raise renamed(error, job.names) from None


def _outputs(
    engine: Engine, job: Job, index: int, request_id: str, namespace: tuple[str, ...], serving: Serving
) -> AsyncGenerator[RequestOutput, None]:
    if job.how is not None:
        question = Question(
            tuple(job.prompts[index]),
            job.sampling,
            job.thinking,
            serving.fold,
            serving.control,
            request_id,
            namespace,
            serving.service,
            job.question,
        )
        return deciding(engine, job.how.field).decide(question, job.how)
    return engine.generate(
        job.prompts[index],
        job.sampling,
        job.thinking,
        serving.fold,
        request_id=request_id,
        namespace=namespace,
        service=serving.service,
        **({} if serving.control is None else {"control": serving.control}),
    )


def _told(job: Job, choice: Choice, news: CompletionOutput, outcome: Outcome | None = None) -> list[Told]:
    """What a client asked to be told beside a choice's news; each fold gets its line in the log."""
    folds = [fold_data(choice.index, fold, choice.segments) for fold in news.folds]
    for data in folds:
        log_fold(job.response_id, data)
    if not job.events:
        return []
    segments = [Told(SEGMENT_EVENT, {"segment": segment_data(choice.index, each)}) for each in news.segments]
    states = [] if outcome is None else [Told(f"thinkfold.{outcome.field}", {outcome.field: asdict(outcome)})]
    return segments + [Told(EVENT, {"fold": data}) for data in folds] + states


async def _whole(feed: Feed, job: Job, writer: Writer, accounts: tuple[RequestTimer, Reply]) -> Mapping[str, Any]:
    timer, reply = accounts
    while not reply.finished:
        item = await feed.next()
        if item is not None:
            timer.observe(item[1])
            for choice, news in reply.add(*item):
                _told(job, choice, news)
    if reply.failure is not None:
        timer.miss()
        raise reply.failure
    timer.finish(reply.longest)
    return writer.whole(reply)


async def _events(
    item: tuple[int, RequestOutput] | None,
    feed: Feed,
    job: Job,
    writer: Writer,
    accounts: tuple[RequestTimer, Reply],
    keepalive_s: float,
) -> AsyncGenerator[bytes, None]:
    """All events of a stream, from the first output (None: not there yet) on."""
    timer, reply = accounts
    for data in writer.start(reply):
        yield data
    try:
        while True:
            if item is None:
                yield writer.keep_alive
            else:
                timer.observe(item[1])
                for choice, news in reply.add(*item):
                    for data in writer.news(choice, news, _told(job, choice, news, item[1].outcome)):
                        yield data
            if reply.finished:
                break
            item = await feed.next(keepalive_s)
    except ClientGoneError:
        return
    except Exception as error:
        if not isinstance(error, ThinkfoldError):
            logger.exception("a stream failed")
        timer.miss()
        last = writer.failed(error, reply)
    else:
        timer.finish(reply.longest) if reply.failure is None else timer.miss()
        last = writer.end(reply) if reply.failure is None else writer.failed(reply.failure, reply)
    for data in last:
        yield data
