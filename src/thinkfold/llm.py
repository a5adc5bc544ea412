"""Offline use: a synchronous shell over `AsyncEngine`, which is the one implementation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.samples import Question
from thinkfold.errors import EngineDeadError
from thinkfold.types import ControlParams, FoldParams, RequestOutput, SamplingParams, ThinkingParams, VoteParams

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
        try:
            self.engine = self._run(AsyncEngine.start(EngineConfig(model=model, **config)))
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
    ) -> list[RequestOutput]:
        """Continue raw prompts (text or token ids), one output each, in order."""
        return self._run(self._generate(_as_list(prompts), sampling, thinking, fold, control, vote))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        control: ControlParams | None = None,
        vote: VoteParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, one output each, in order; with `vote` each is that of the winner."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Conversation], [messages] if single else messages)
        thinking = (thinking or ThinkingParams()).with_default(self.engine.config.enable_thinking)
        encode = self.engine.prompts.encode_chat
        closes = thinking.spends_none and self.engine.model.budget_enforced
        prompts = [encode(c, enable_thinking=thinking.template_switch, closes=closes) for c in conversations]
        return self._run(self._generate(prompts, sampling, thinking, fold, control, vote))

    def close(self) -> None:
        """Stop the engine; calling it again does nothing."""
        if self._loop.is_running():
            self._run(self.engine.stop())
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | None,
        thinking: ThinkingParams | None,
        fold: FoldParams | None,
        control: ControlParams | None,
        how: VoteParams | None,
    ) -> list[RequestOutput]:
        config, n = self.engine.config, how.n if how else sampling.n if sampling else 1
        limit = asyncio.Semaphore(max(1, (config.max_num_seqs + config.max_waiting // 2) // n))

        async def one(prompt: str | Sequence[int]) -> RequestOutput:
            ids = self.engine.prompts.encode_text(prompt) if isinstance(prompt, str) else prompt
            async with limit:
                return await collect(self.engine, ids, sampling, thinking, fold, control, how)

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # the first error, or Ctrl-C, ends what still runs
            for task in tasks:
                task.cancel()

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
    how: VoteParams | None = None,
) -> RequestOutput:
    """Run one request to its end and return everything in one output."""
    total: RequestOutput | None = None
    if how is not None:
        question = Question(tuple(prompt_token_ids), sampling or SamplingParams(), thinking, fold, control)
        outputs = engine.decide(question, how)
    else:
        outputs = engine.generate(prompt_token_ids, sampling, thinking, fold, control=control)
    async for output in outputs:
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
