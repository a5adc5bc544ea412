"""`/v1/completions`: raw text or token ids, without a template.

Control tokens in the text count as such. `text` holds the answer; thinking, where the model
thinks, is sent as `reasoning` and `reasoning_content` beside it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter, Request, Response

from thinkfold.config import EngineConfig
from thinkfold.errors import CapacityError, ParameterError
from thinkfold.server.chunks import ChunkWriter
from thinkfold.server.contract import Engine
from thinkfold.server.errors import ErrorReply
from thinkfold.server.fields import RequestFields, check_model
from thinkfold.server.folds import FIELD_NAMES
from thinkfold.server.generation import Job, respond
from thinkfold.server.logprobs import TextPosition, TokenBytes, legacy_logprobs
from thinkfold.server.replies import ChunkHead, DeltaEnding, Ending, Head, LegacyLogprobs, ThinkfoldReply, Usage
from thinkfold.server.reply import Choice
from thinkfold.server.routing import body_of, replies
from thinkfold.server.state import ServerState, state_of
from thinkfold.server.streaming import DONE
from thinkfold.types import CompletionOutput, Decision

router = APIRouter()


class CompletionRequest(RequestFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    # Understood and refused: only null or the value that asks for nothing.
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ParameterError("prompt", "must not be empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextChoice(Ending):
    """One choice of a completion; `text` is the answer."""

    index: int
    text: str
    reasoning: str | None
    reasoning_content: str | None
    logprobs: LegacyLogprobs | None


class TextDeltaChoice(DeltaEnding):
    """News of one choice; the last one says how it ended."""

    index: int
    text: str
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    logprobs: LegacyLogprobs | None


class TextCompletion(Head):
    """A completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    thinkfold: ThinkfoldReply


class TextCompletionChunk(ChunkHead):
    """One event of a streamed completion; `[DONE]` follows the last."""

    object: Literal["text_completion"]
    choices: list[TextDeltaChoice]


class CompletionShape:
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, num_logprobs: int | None, token_bytes: TokenBytes) -> None:
        self._num_logprobs = num_logprobs
        self._token_bytes = token_bytes
        self._positions: defaultdict[int, TextPosition] = defaultdict(TextPosition)

    def whole(self, choice: Choice) -> TextChoice:
        reasoning = choice.reasoning or None
        return {
            "index": choice.index,
            "text": choice.text,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
            "logprobs": self._logprobs(choice.index, choice),
            **choice.ending(),
        }

    def opening(self, choice: Choice) -> None:
        return None

    def deltas(self, choice: Choice, news: CompletionOutput) -> Iterator[TextDeltaChoice]:
        logprobs = self._logprobs(choice.index, news) if news.logprobs else None
        if not (news.reasoning or news.text or logprobs):
            return
        delta: TextDeltaChoice = {
            "index": choice.index,
            "text": news.text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if news.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = news.reasoning
        yield delta

    def closing(self, choice: Choice) -> TextDeltaChoice:
        return {"index": choice.index, "text": "", "logprobs": None, **choice.ending()}

    def _logprobs(self, index: int, source: Choice | CompletionOutput) -> LegacyLogprobs | None:
        if self._num_logprobs is None:
            return None
        return legacy_logprobs(source.logprobs, self._num_logprobs, self._token_bytes, self._positions[index])


@router.post("/v1/completions", responses=replies(TextCompletion, TextCompletionChunk | ErrorReply, 404, last=DONE))
async def completions(request: Request, body: Annotated[CompletionRequest, body_of(CompletionRequest)]) -> Response:
    """Raw text or token ids in, without a template."""
    state = state_of(request)
    engine = state.slot.require()
    job, writer = await asyncio.to_thread(_prepare, state, engine, body)
    return await respond(request, engine, job, writer)


def _prepare(state: ServerState, engine: Engine, body: CompletionRequest) -> tuple[Job, ChunkWriter]:
    model = check_model(engine, body.model)
    if body.chat_template_kwargs is not None:
        raise ParameterError("chat_template_kwargs", "needs a chat; a raw prompt has no template")
    sampling = body.sampling_params(state.slot.sampling_defaults, body.logprobs)
    sampling.check_vocabulary(engine.model.vocab_size)
    prompts = body.prompts()
    max_prompts = state.options.max_prompts
    if len(prompts) > max_prompts:
        raise ParameterError("prompt", f"at most {max_prompts} prompts a request, got {len(prompts)}")
    _check_queue(engine.config, len(prompts), sampling.n)
    job = Job(
        response_id=f"cmpl-{uuid.uuid4().hex}",
        model=model,
        prompts=[_encode(engine, prompt) for prompt in prompts],
        sampling=sampling,
        thinking=body.thinking_params(enabled_by_default=engine.config.enable_thinking),
        namespace=body.namespace,
        stream=bool(body.stream),
        wish=body.thinkfold,
        events=body.wants_events,
        control=body.control_params(),
        how=_decision(body, len(prompts)),
        names={**FIELD_NAMES, **body.vote_names},
    )
    return job, ChunkWriter(
        job, CompletionShape(body.logprobs, engine.prompts.token_bytes), include_usage=body.include_usage
    )


def _decision(body: CompletionRequest, prompts: int) -> Decision | None:
    """How samples of the one prompt decide. Raises ParameterError."""
    how = body.decision()
    if how is not None and prompts > 1:
        raise ParameterError("prompt", f"a {how.field} is over samples of one prompt, got {prompts}")
    return how


def _check_queue(config: EngineConfig, prompts: int, n: int) -> None:
    """Refuse several prompts that even an idle engine could not take together."""
    most = config.max_num_seqs + config.max_waiting
    if prompts > 1 and prompts * n > most:
        raise CapacityError(
            "prompt", f"{prompts} prompts of {n} choices are {prompts * n} sequences; this engine takes {most} at once"
        )


def _encode(engine: Engine, prompt: str | list[int]) -> list[int]:
    limit = engine.model.max_prompt_len
    ids = engine.prompts.encode_text(prompt, limit=limit) if isinstance(prompt, str) else prompt
    if not ids:
        raise ParameterError("prompt", "must hold at least one token")
    if len(ids) > limit:
        raise ParameterError("prompt", f"the prompt has {len(ids)} tokens, the model's limit is {limit}")
    bad = next((i for i in ids if not 0 <= i < engine.model.vocab_size), None)
    if bad is not None:
        raise ParameterError("prompt", f"token id {bad} is outside the vocabulary of {engine.model.vocab_size}")
    return ids
