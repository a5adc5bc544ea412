"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated

from fastapi import APIRouter, Request, Response

from thinkfold.server.contract import Engine
from thinkfold.server.conversation import naming
from thinkfold.server.fields import check_model
from thinkfold.server.generation import Job, respond
from thinkfold.server.messages.blocks import ThinkingSeal, conversation_of
from thinkfold.server.messages.fields import NAMES, TOOL_NAMES, MessagesRequest, PromptFields
from thinkfold.server.messages.shapes import Message, MessageEvent, TokenCount
from thinkfold.server.messages.writer import MessageWriter
from thinkfold.server.routing import body_of, replies, statuses
from thinkfold.server.state import ServerState, state_of, tenant_of
from thinkfold.server.tools import flat_names
from thinkfold.text.messages import last_question
from thinkfold.types import SamplingParams

router = APIRouter()


@router.post("/v1/messages", responses=replies(Message, MessageEvent, 404))
async def messages(request: Request, body: Annotated[MessagesRequest, body_of(MessagesRequest)]) -> Response:
    """Anthropic Messages."""
    state = state_of(request)
    engine = state.slot.require()
    job, writer = await asyncio.to_thread(_prepare, state, engine, body, tenant_of(request))
    return await respond(request, engine, job, writer)


@router.post("/v1/messages/count_tokens", responses=statuses(404))
async def count_tokens(request: Request, body: Annotated[PromptFields, body_of(PromptFields)]) -> TokenCount:
    """Tokens of the prompt that such a request would have."""
    state = state_of(request)
    engine = state.slot.require()
    seal = ThinkingSeal(state.options.keyring, tenant_of(request))
    return {"input_tokens": len(await asyncio.to_thread(_encode, engine, body, seal))}


def _encode(engine: Engine, body: PromptFields, seal: ThinkingSeal) -> list[int]:
    check_model(engine, body.model)
    with naming(NAMES), flat_names(TOOL_NAMES):
        toolbox = body.toolbox()
        toolbox.arm(SamplingParams(), engine.prompts)
        return conversation_of(body, seal).encode(engine, body.thinking_params(None), toolbox)


def _prepare(state: ServerState, engine: Engine, body: MessagesRequest, tenant: str) -> tuple[Job, MessageWriter]:
    """Everything that takes time before the engine: checks, template, tokens."""
    seal = ThinkingSeal(state.options.keyring, tenant)
    model = check_model(engine, body.model)
    with naming(NAMES), flat_names(TOOL_NAMES):
        toolbox = body.toolbox()
        sampling, calls = toolbox.arm(body.sampling_params(state.slot.sampling_defaults), engine.prompts)
        thinking = body.thinking_params(body.max_tokens)
        chat = conversation_of(body, seal)
        prompt = chat.encode(engine, thinking, toolbox)
    job = Job(
        response_id=f"msg_{uuid.uuid4().hex}",
        model=model,
        prompts=[prompt],
        sampling=sampling,
        thinking=thinking,
        namespace=body.namespace,
        stream=bool(body.stream),
        wish=body.thinkfold,
        events=body.wants_events,
        turn=chat.turn(thinking, toolbox, calls),
        parameters=(toolbox.for_template(),),
        control=toolbox.control(body.control_params()),
        how=toolbox.decision(body.decision()),
        question=last_question(chat.messages),
        names={**NAMES, **body.vote_names},
    )
    return job, MessageWriter(job, seal, calls, omits_thinking=body.omits_thinking)
