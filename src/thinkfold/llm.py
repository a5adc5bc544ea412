"""Offline use: a synchronous shell over `AsyncEngine`, which is the one implementation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, cast

from thinkfold.config import EngineConfig, own_names
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.samples import Question
from thinkfold.engine.sessions import SessionStore
from thinkfold.errors import EngineDeadError
from thinkfold.text.messages import last_question
from thinkfold.types import (
    BestOfParams,
    ControlParams,
    Decision,
    FoldParams,
    RequestOutput,
    SamplingParams,
    SearchParams,
    Service,
    SessionParams,
    SessionState,
    ThinkingParams,
    VoteParams,
    one_decision,
)

Message = Mapping[str, Any]
Conversation = Sequence[Message]
T = TypeVar("T")


class LLM:
    """A model in this process. `LLM("pebble").chat([{"role": "user", "content": "…"}])`.

    Keyword arguments are those of `EngineConfig`. Use it as a context manager or call
    `close()`. Raises what `AsyncEngine.start` and `AsyncEngine.generate` raise.
    """

    def __init__(self, model: str = "pebble", **config: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="thinkfold-llm", daemon=True)
        self._thread.start()
        self._sessions = SessionStore()
        try:
            self.engine = self._run(AsyncEngine.start(EngineConfig(model=model, **own_names(config))))
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        control: ControlParams | None = None,
        vote: VoteParams | None = None,
        *,
        best_of: BestOfParams | None = None,
        search: SearchParams | None = None,
        service: Service | None = None,
        session: SessionParams | None = None,
    ) -> list[RequestOutput]:
        """Continue raw prompts (text or token ids), one output each, in order.

        `service` bounds time and money, each prompt for itself. With `session` all of them are one call of an agent
        session, whose budget they share.
        """
        encode, how = self.engine.prompts.encode_text, one_decision(vote, best_of, search)
        asked = [(encode(p), p) if isinstance(p, str) else (p, "") for p in _as_list(prompts)]
        return self._run(self._answer(asked, sampling, thinking, fold, control, how, service, session))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        control: ControlParams | None = None,
        vote: VoteParams | None = None,
        *,
        best_of: BestOfParams | None = None,
        search: SearchParams | None = None,
        service: Service | None = None,
        session: SessionParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, one output each, in order; with a decision that of the chosen one.

        `service` and `session` are those of `generate`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Conversation], [messages] if single else messages)
        thinking = (thinking or ThinkingParams()).with_default(self.engine.config.enable_thinking)
        switches: dict[str, Any] = {
            "enable_thinking": thinking.template_switch,
            "reasoning_effort": thinking.reasoning_effort,
            "closes": thinking.spends_none and self.engine.model.budget_enforced,
        }
        encode, how = self.engine.prompts.encode_chat, one_decision(vote, best_of, search)
        asked = [(encode(each, **switches), last_question(each)) for each in conversations]
        return self._run(self._answer(asked, sampling, thinking, fold, control, how, service, session))

    def session(self, name: str) -> SessionState:
        """Where an agent session stands. Raises NotFoundError."""

        async def show() -> SessionState:  # sessions live in the engine's thread
            return self._sessions.show("", name)

        return self._run(show())

    def close(self) -> None:
        """Stop the engine; calling it again does nothing."""
        if self._loop.is_running():
            self._run(self.engine.stop())
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer(
        self,
        asked: Sequence[tuple[Sequence[int], str]],
        sampling: SamplingParams | None,
        thinking: ThinkingParams | None,
        fold: FoldParams | None,
        control: ControlParams | None,
        how: Decision | None,
        service: Service | None,
        session: SessionParams | None,
    ) -> list[RequestOutput]:
        """Outputs for prompts with their questions, in order."""
        config, n = self.engine.config, how.samples if how else sampling.n if sampling else 1
        call = None if session is None else self._sessions.open("", session, len(asked) * n)
        if call is not None:
            service = replace(service or Service(), session=call.name, session_budget=call.budget)
        limit = asyncio.Semaphore(max(1, (config.max_num_seqs + config.max_waiting // 2) // n))

        async def one(number: int, ids: Sequence[int], text: str) -> RequestOutput:
            note = None if call is None else partial(call.note, number)
            async with limit:
                return await collect(self.engine, ids, sampling, thinking, fold, control, how, service, note, text)

        tasks = [asyncio.ensure_future(one(number, *each)) for number, each in enumerate(asked)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # the first error, or Ctrl-C, ends what still runs
            for task in tasks:
                task.cancel()
            if call is not None:
                call.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("it was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def collect(
    engine: AsyncEngine,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    thinking: ThinkingParams | None = None,
    fold: FoldParams | None = None,
    control: ControlParams | None = None,
    how: Decision | None = None,
    service: Service | None = None,
    note: Callable[[RequestOutput], None] | None = None,
    text: str = "",
) -> RequestOutput:
    """Run one request to its end and return everything in one output; `note` hears each as it comes.

    `text` is the question as verifiers read it.
    """
    total: RequestOutput | None = None
    if how is not None:
        asked = sampling or SamplingParams()
        question = Question(tuple(prompt_token_ids), asked, thinking, fold, control, service=service, text=text)
        outputs = engine.decide(question, how)
    else:
        outputs = engine.generate(prompt_token_ids, sampling, thinking, fold, control=control, service=service)
    async for output in outputs:
        if note is not None:
            note(output)
        if total is None:
            total = output
        else:
            total.merge(output)
    assert total is not None
    return total


def _as_list(prompts: Any) -> list[str | Sequence[int]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
