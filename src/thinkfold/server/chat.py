"""`/v1/chat/completions`.

Thinking is sent as `reasoning` and, the same text, as `reasoning_content`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from thinkfold.errors import ParameterError
from thinkfold.server.body import StrictModel, read_body
from thinkfold.server.chunks import ChunkWriter
from thinkfold.server.contract import Engine
from thinkfold.server.fields import RequestFields, check_model
from thinkfold.server.folds import FIELD_NAMES
from thinkfold.server.generation import Job, respond
from thinkfold.server.logprobs import TokenBytes, chat_logprobs
from thinkfold.server.reply import Choice
from thinkfold.server.state import state_of
from thinkfold.types import CompletionOutput

router = APIRouter()


class ResponseFormat(StrictModel):
    type: Literal["text"]


class ChatRequest(RequestFields):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool | None = None
    response_format: ResponseFormat | None = None
    # Understood and refused: only null or the value that asks for nothing.
    store: Literal[False] | None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: None = None
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

    def num_logprobs(self) -> int | None:
        """Alternatives to keep a token; None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs: true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise ParameterError("top_logprobs", f"must be in [0, 20], got {self.top_logprobs}")
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatShape:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, num_logprobs: int | None, token_bytes: TokenBytes) -> None:
        self._num_logprobs = num_logprobs
        self._token_bytes = token_bytes

    def whole(self, choice: Choice) -> dict[str, Any]:
        reasoning = choice.reasoning or None
        message = {
            "role": "assistant",
            "content": choice.text,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            **choice.ending(),
        }

    def opening(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {"role": "assistant", "content": ""}, None)

    def deltas(self, choice: Choice, news: CompletionOutput) -> Iterator[dict[str, Any]]:
        pieces: list[dict[str, str]] = []
        if news.reasoning:
            pieces.append({"reasoning": news.reasoning, "reasoning_content": news.reasoning})
        if news.text:
            pieces.append({"content": news.text})
        logprobs = self._logprobs(news) if news.logprobs else None
        if logprobs is not None and not pieces:
            pieces.append({})
        for i, piece in enumerate(pieces):
            yield self._delta(choice, piece, logprobs if i == len(pieces) - 1 else None)

    def closing(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "logprobs": None, **choice.ending()}

    def _delta(self, choice: Choice, delta: dict[str, str], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, source: Choice | CompletionOutput) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        return chat_logprobs(source.logprobs, self._num_logprobs, self._token_bytes)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    engine = state.slot.require()
    body = await read_body(request, ChatRequest, state.options.max_body_bytes)
    job, writer = await asyncio.to_thread(_prepare, engine, body, state.slot.sampling_defaults)
    return await respond(request, engine, job, writer)


def _prepare(engine: Engine, body: ChatRequest, defaults: Mapping[str, float | int]) -> tuple[Job, ChunkWriter]:
    """Everything that takes time before the engine: checks, template, tokens."""
    model = check_model(engine, body.model)
    num_logprobs = body.num_logprobs()
    sampling = body.sampling_params(defaults, num_logprobs)
    sampling.check_vocabulary(engine.model.vocab_size)
    thinking = body.thinking_params(enabled_by_default=engine.config.enable_thinking)
    prompt = engine.prompts.encode_chat(
        body.messages,
        enable_thinking=thinking.template_switch,
        continue_final=body.continue_final_message,
        reasoning_effort=body.reasoning_effort,
        limit=engine.model.max_prompt_len,
        closes=thinking.spends_none and engine.model.budget_enforced,
    )
    job = Job(
        response_id=f"chatcmpl-{uuid.uuid4().hex}",
        model=model,
        prompts=[prompt],
        sampling=sampling,
        thinking=thinking,
        namespace=body.namespace,
        stream=bool(body.stream),
        fold=body.fold_params(),
        events=body.wants_events,
        names={**FIELD_NAMES, "prompt": "messages"},
    )
    return job, ChunkWriter(job, ChatShape(num_logprobs, engine.prompts.token_bytes), include_usage=body.include_usage)
