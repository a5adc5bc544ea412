"""`/v1/thinkfold/partial`: writes a part of a response and keeps its state, so that others can search from outside.

A part starts from a prompt, a chat or a handle and ends at a boundary. Handles belong to the namespace of
their request: to anybody else they are not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.server.body import StrictModel
from thinkfold.server.contract import Controllable, Engine
from thinkfold.server.control import controllable, handle_data
from thinkfold.server.feed import Feed
from thinkfold.server.fields import RequestFields, check_model, namespace_of
from thinkfold.server.replies import Bill, Ending, Shows
from thinkfold.server.reply import Reply
from thinkfold.server.routing import body_of, statuses
from thinkfold.server.serving import Asks, Serving, open_serving
from thinkfold.server.state import ServerState, owned, state_of
from thinkfold.types import CompletionOutput, Handle, Phase, RequestOutput, SamplingParams, Until

router = APIRouter()

_WHOLE = "is for whole responses, not for parts"
_WHOLE_ONLY = ("session", "step_cache", "control", "vote", "events")
_WITH_HANDLE = {"handle", "until", "n", "temperature", "seed", "model", "cache_salt", "prompt_cache_key", "user"}


class UntilFields(StrictModel):
    at: Literal["segment", "paragraph", "sentence"] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def until(self) -> Until:
        """Raises ParameterError."""
        return Until(self.at, self.min_tokens or 0, self.max_tokens)


class PartialRequest(RequestFields):
    """One of `prompt`, `messages` and `handle`. Without `until` it goes on to the response's end."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    handle: str | None = None
    until: UntilFields | None = None

    def check(self) -> None:
        """Raise ParameterError unless there is one start, and nothing that its handle has fixed."""
        if self.stream or self.stream_options is not None:
            raise ParameterError("stream" if self.stream else "stream_options", "a part is not streamed")
        for name in ("early_stop", "early_stop_threshold", "vote"):
            if getattr(self, name) is not None:
                raise ParameterError(name, _WHOLE)
        for name in _WHOLE_ONLY:
            if self.thinkfold is not None and getattr(self.thinkfold, name) is not None:
                raise ParameterError(f"thinkfold.{name}", _WHOLE)
        if sum(start is not None for start in (self.prompt, self.messages, self.handle)) != 1:
            raise ParameterError("handle", "give one of prompt, messages and handle")
        if self.handle is not None:
            fixed = sorted(name for name in self.model_fields_set - _WITH_HANDLE if getattr(self, name) is not None)
            if fixed:
                raise ParameterError(fixed[0], "was fixed when the handle's response began")


class PartialChoice(Ending):
    """What was written of one choice; without `handle` it has ended."""

    index: int
    reasoning: str
    text: str
    phase: Phase
    output_tokens: int
    handle: Annotated[dict[str, Any] | None, Shows(Handle | None)]


class PartialUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    thinkfold: Bill


class PartialReply(TypedDict):
    """A part of a response."""

    id: str
    object: Literal["thinkfold.partial"]
    model: str
    choices: list[PartialChoice]
    usage: PartialUsage


class DroppedHandle(TypedDict):
    handle: str
    object: Literal["thinkfold.handle"]
    deleted: bool


@router.post("/v1/thinkfold/partial", responses=statuses(404, 409))
async def partial(request: Request, body: Annotated[PartialRequest, body_of(PartialRequest)]) -> PartialReply:
    """A part of a response, and a handle to go on from."""
    state = state_of(request)
    engine = state.slot.require()
    body.check()
    controls, name = controllable(engine), f"part-{uuid.uuid4().hex}"
    model, namespace = check_model(engine, body.model), owned(request, body.namespace)
    serving = _serving(request, body)
    if body.handle is not None:
        until = body.until.until() if body.until else None
        outputs = controls.extend(
            body.handle,
            until,
            n=body.n or 1,
            temperature=body.temperature,
            seed=body.seed,
            request_id=name,
            namespace=namespace,
        )
    else:
        outputs = await asyncio.to_thread(_begin, state, engine, controls, body, name, namespace, serving)
    reply = Reply(1, body.n or 1, keep_text=True, serving=serving)
    ends = await _read(request, outputs, reply, lambda handle: controls.drop(handle, namespace))
    choices = [_choice(reply, news) for _, news in sorted(ends.items())]
    costs = reply.costs()
    usage: PartialUsage = {
        "prompt_tokens": costs.prompt_tokens,
        "completion_tokens": costs.thinking_tokens + costs.answer_tokens,
        "thinkfold": reply.bill(),
    }
    return {"id": name, "object": "thinkfold.partial", "model": model, "choices": choices, "usage": usage}


@router.delete("/v1/thinkfold/partial/{handle}", responses=statuses(404))
async def drop(request: Request, handle: str, cache_salt: str = "", prompt_cache_key: str = "") -> DroppedHandle:
    """Forget a handle. Its owner's labels are query parameters."""
    controls = controllable(state_of(request).slot.require())
    await controls.drop(handle, owned(request, namespace_of(cache_salt or None, prompt_cache_key or None)))
    return {"handle": handle, "object": "thinkfold.handle", "deleted": True}


def _serving(request: Request, body: PartialRequest) -> Serving:
    """Tier and limits of what begins here. Raises ParameterError."""
    return open_serving(request, body.thinkfold, SamplingParams(), Asks(samples=body.n or 1, can_stop=False))


def _begin(
    state: ServerState,
    engine: Engine,
    controls: Controllable,
    body: PartialRequest,
    name: str,
    space: tuple[str, ...],
    serving: Serving,
) -> AsyncGenerator[RequestOutput, None]:
    """Everything that takes time before the engine: checks, template, tokens."""
    sampling = body.sampling_params(state.slot.sampling_defaults, None)
    sampling.check_vocabulary(engine.model.vocab_size)
    thinking = body.thinking_params(enabled_by_default=engine.config.enable_thinking)
    limit = engine.model.max_prompt_len
    if body.messages is not None:
        ids = engine.prompts.encode_chat(
            body.messages,
            enable_thinking=thinking.template_switch,
            reasoning_effort=thinking.reasoning_effort,
            limit=limit,
            closes=thinking.spends_none and engine.model.budget_enforced,
        )
    else:
        prompt = body.prompt or ""
        ids = engine.prompts.encode_text(prompt, limit=limit) if isinstance(prompt, str) else prompt
    until = body.until.until() if body.until else None
    return controls.generate(
        ids, sampling, thinking, serving.fold, request_id=name, namespace=space, until=until, service=serving.service
    )


async def _read(
    request: Request, outputs: AsyncGenerator[RequestOutput, None], reply: Reply, drop: Callable[[str], Awaitable[None]]
) -> dict[int, CompletionOutput]:
    """Fill the reply; returns each choice's last news. A client that goes away leaves neither request nor handles."""
    lease, feed = state_of(request).access.lease(request, len(reply.choices)), Feed(request, [outputs])
    ends: dict[int, CompletionOutput] = {}
    try:
        while not reply.finished:
            item = await feed.next()
            if item is not None:
                lease.note(*item)
                ends |= {news.index: news for _, news in reply.add(*item)}
    finally:
        lease.close()
        left = await feed.close()
        if not reply.finished or reply.error is not None:
            told = [*ends.values(), *(news for output in left for news in output.outputs)]
            for handle in [news.handle for news in told if news.handle is not None]:
                with contextlib.suppress(ThinkfoldError):  # its time may be over
                    await drop(handle.id)
    if reply.failure is not None:
        raise reply.failure
    return ends


def _choice(reply: Reply, last: CompletionOutput) -> PartialChoice:
    choice = reply.choices[last.index]
    return {
        "index": choice.index,
        "reasoning": choice.reasoning,
        "text": choice.text,
        "phase": last.phase,
        "output_tokens": last.num_output_tokens,
        **choice.ending(),
        "handle": None if last.handle is None else handle_data(last.handle),
    }
