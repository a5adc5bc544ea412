"""`/v1/responses`: make one, show a stored one, forget it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.server.contract import Engine
from thinkfold.server.conversation import Conversation, naming
from thinkfold.server.errors import ResponseNotFoundError
from thinkfold.server.fields import check_model
from thinkfold.server.generation import Job, respond
from thinkfold.server.parts import Part
from thinkfold.server.responses.fields import ENCRYPTED, ResponsesRequest
from thinkfold.server.responses.items import CALL_PREFIX, ReasoningSeal, add_input
from thinkfold.server.responses.shapes import DeletedResponse, Echo, ResponseBody, ResponseEvent
from thinkfold.server.responses.store import StoredResponse
from thinkfold.server.responses.writer import Frame, Keep, ResponseWriter
from thinkfold.server.routing import body_of, replies, statuses
from thinkfold.server.serving import Serving
from thinkfold.server.state import ServerState, state_of, tenant_of
from thinkfold.server.tools import flat_names
from thinkfold.text.messages import last_question
from thinkfold.types import SamplingParams

router = APIRouter()


@router.post("/v1/responses", responses=replies(ResponseBody, ResponseEvent, 404))
async def create(request: Request, body: Annotated[ResponsesRequest, body_of(ResponsesRequest)]) -> Response:
    """OpenAI Responses."""
    state = state_of(request)
    engine = state.slot.require()
    tenant = tenant_of(request)
    previous = _previous(state, tenant, body.previous_response_id)
    job, writer = await asyncio.to_thread(_prepare, state, engine, body, tenant, previous)
    return await respond(request, engine, job, writer)


@router.get("/v1/responses/{response_id}", responses=statuses(404))
async def show(request: Request, response_id: str) -> ResponseBody:
    """A stored response."""
    for name in request.query_params:
        raise UnsupportedError(name, "is not supported by this server; a stored response is shown as it is")
    found = state_of(request).responses.get(tenant_of(request), response_id)
    if found is None:
        raise ResponseNotFoundError(response_id)
    return found.body


@router.delete("/v1/responses/{response_id}", responses=statuses(404))
async def delete(request: Request, response_id: str) -> DeletedResponse:
    """Forget a stored response."""
    if not state_of(request).responses.delete(tenant_of(request), response_id):
        raise ResponseNotFoundError(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _previous(state: ServerState, tenant: str, response_id: str | None) -> StoredResponse | None:
    if response_id is None:
        return None
    found = state.responses.get(tenant, response_id)
    if found is None:
        message = f"no response {response_id!r:.100} is stored here; they are kept for {state.responses.ttl_s:.0f} s"
        raise ParameterError("previous_response_id", message)
    return found


def _prepare(
    state: ServerState, engine: Engine, body: ResponsesRequest, tenant: str, previous: StoredResponse | None
) -> tuple[Job, ResponseWriter]:
    """Everything that takes time before the engine: checks, template, tokens."""
    model = check_model(engine, body.model)
    body.check()
    stores = _stores(state, body)
    seal = ReasoningSeal(state.options.keyring, tenant)
    with naming(body.names), flat_names({}):
        toolbox = body.toolbox()
        sampling, calls = toolbox.arm(body.sampling_params(state.slot.sampling_defaults), engine.prompts)
        thinking = body.thinking_params(enabled_by_default=engine.config.enable_thinking)
    history = Conversation("input")
    history.extend("previous_response_id", previous.messages if previous else [])
    add_input(history, body.input, seal)
    prompt = Conversation("input")
    if body.instructions is not None:
        prompt.add_text("instructions", "system", body.instructions)
    prompt.extend_with(history)
    job = Job(
        response_id=f"resp_{uuid.uuid4().hex}",
        model=model,
        prompts=[prompt.encode(engine, thinking, toolbox)],
        sampling=sampling,
        thinking=thinking,
        namespace=body.namespace,
        stream=bool(body.stream),
        wish=body.thinkfold,
        events=body.wants_events,
        turn=prompt.turn(thinking, toolbox, calls),
        parameters=(toolbox.for_template(),),
        control=toolbox.control(body.control_params()),
        how=toolbox.decision(body.decision()),
        question=last_question(prompt.messages),
        names=body.names,
    )
    frame = Frame(
        echo=_echo(body, sampling, stores),
        seal=seal if body.wants(ENCRYPTED) or not stores else None,
        num_logprobs=sampling.logprobs,
        token_bytes=engine.prompts.token_bytes,
        keep=_keeper(state, tenant, history) if stores else lambda response, parts, serving: False,
        calls=calls,
    )
    return job, ResponseWriter(job, frame)


def _stores(state: ServerState, body: ResponsesRequest) -> bool:
    """Whether the response is to be stored: unless the request, or the server, says no."""
    possible = state.responses.max_bytes > 0
    if body.store and not possible:
        raise UnsupportedError("store", "this server stores no responses")
    return possible if body.store is None else body.store


def _keeper(state: ServerState, tenant: str, history: Conversation) -> Keep:
    def keep(response: ResponseBody, parts: Sequence[Part], serving: Serving) -> bool:
        if not serving.leaves_traces:
            return False
        history.add_reply(parts, CALL_PREFIX)
        stored = StoredResponse({**response, "store": True}, history.messages, serving.session)
        return state.responses.put(tenant, response["id"], stored)

    return keep


def _format(body: ResponsesRequest) -> dict[str, Any]:
    given = body.text.format if body.text else None
    return given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}


def _tool_choice(body: ResponsesRequest) -> str | dict[str, Any]:
    given = body.tool_choice or "auto"
    return given if isinstance(given, str) else given.model_dump()


def _echo(body: ResponsesRequest, sampling: SamplingParams, stores: bool) -> Echo:
    """The request's fields as the response repeats them, with what stands in for those not given."""
    return {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": sampling.logprobs or 0,
        "reasoning": {"effort": body.effort(), "summary": None},
        "text": {"format": _format(body)},
        "tools": [each.model_dump() for each in body.tools or ()],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
        "metadata": body.metadata or {},
        "store": stores,
    }
