"""`/v1/chat/completions`.

Thinking is sent as `reasoning` and, the same text, as `reasoning_content`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response

from thinkfold.errors import ParameterError
from thinkfold.server.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from thinkfold.server.chunks import ChunkWriter
from thinkfold.server.contract import Engine
from thinkfold.server.errors import ErrorReply
from thinkfold.server.fields import DecidingFields, RequestFields, check_model
from thinkfold.server.folds import FIELD_NAMES
from thinkfold.server.generation import Job, respond
from thinkfold.server.routing import body_of, replies
from thinkfold.server.state import state_of
from thinkfold.server.streaming import DONE
from thinkfold.server.structured import ResponseFormat
from thinkfold.server.tools import Tool, Toolbox, ToolChoice
from thinkfold.server.turns import NextTurn
from thinkfold.text.messages import last_question
from thinkfold.types import Grammar

router = APIRouter()


class ChatRequest(DecidingFields, RequestFields):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Understood and refused: only null or the value that asks for nothing.
    store: Literal[False] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None

    def output_limit(self) -> int | None:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ParameterError("max_completion_tokens", "disagrees with max_tokens; give one of them")
        return next(iter(limits), None)

    def answer_format(self) -> Grammar | None:
        """What an answer that calls no tool must match."""
        answer = self.response_format.format() if self.response_format else None
        return (
            None if answer is None or self.response_format is None else Grammar.of(answer, self.response_format.field)
        )

    def num_logprobs(self) -> int | None:
        """Alternatives to keep a token; None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise ParameterError("top_logprobs", f"must be in [0, 20], got {self.top_logprobs}")
        return (self.top_logprobs or 0) if self.logprobs else None


_REPLIES = replies(ChatCompletion, ChatCompletionChunk | ErrorReply, 404, last=DONE)


@router.post("/v1/chat/completions", responses=_REPLIES)
async def chat_completions(request: Request, body: Annotated[ChatRequest, body_of(ChatRequest)]) -> Response:
    """OpenAI chat completions."""
    state = state_of(request)
    engine = state.slot.require()
    job, writer = await asyncio.to_thread(_prepare, engine, body, state.slot.sampling_defaults)
    return await respond(request, engine, job, writer)


def _prepare(engine: Engine, body: ChatRequest, defaults: Mapping[str, float | int]) -> tuple[Job, ChunkWriter]:
    """Everything that takes time before the engine: checks, template, tokens."""
    model = check_model(engine, body.model)
    num_logprobs = body.num_logprobs()
    sampling = body.sampling_params(defaults, num_logprobs)
    toolbox = Toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
    sampling, calls = toolbox.arm(sampling, engine.prompts)
    sampling.check_vocabulary(engine.model.vocab_size)
    thinking = body.thinking_params(enabled_by_default=engine.config.enable_thinking)
    prompt = engine.prompts.encode_chat(
        body.messages,
        enable_thinking=thinking.template_switch,
        continue_final=body.continue_final_message,
        tools=toolbox.for_template(),
        reasoning_effort=thinking.reasoning_effort,
        limit=engine.model.max_prompt_len,
        closes=thinking.spends_none and engine.model.budget_enforced,
    )
    turn = NextTurn(body.messages, thinking.template_switch, thinking.reasoning_effort, toolbox.for_template())
    if calls is not None:
        turn.calls_begin = calls.begin
    job = Job(
        response_id=f"chatcmpl-{uuid.uuid4().hex}",
        model=model,
        prompts=[prompt],
        sampling=sampling,
        thinking=thinking,
        namespace=body.namespace,
        stream=bool(body.stream),
        wish=body.thinkfold,
        events=body.wants_events,
        turn=turn,
        parameters=(toolbox.for_template(),),
        control=toolbox.control(body.control_params()),
        how=toolbox.decision(body.decision()),
        question=last_question(body.messages),
        names={**FIELD_NAMES, **body.vote_names, "prompt": "messages"},
    )
    shape = ChatShape(num_logprobs, engine.prompts.token_bytes, calls)
    return job, ChunkWriter(job, shape, include_usage=body.include_usage)
