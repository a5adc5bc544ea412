"""The steps of a search on a live engine: each is a handle of a part, from which the next ones start.

Nothing is left behind: who closes it in the middle waits for the parts that still run to tell their
handles, and drops these, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from math import exp
from statistics import fmean
from typing import Protocol

from thinkfold.control.search import State
from thinkfold.control.verifier import Verifier
from thinkfold.engine.messages import EngineStats
from thinkfold.engine.samples import SEEDS, Question, Sampled, summed
from thinkfold.errors import NotFoundError, RequestFailedError, ThinkfoldError
from thinkfold.types import (
    CompletionOutput,
    FinishReason,
    Judged,
    Outcome,
    Phase,
    RequestOutput,
    SearchParams,
    ThinkingEndReason,
    TokenStats,
    Until,
    Verdict,
)
from thinkfold.types.search import PROBE_TOKENS

_AGAIN_S = 0.02  # until a part that has not begun is cancelled again
FULL, ROOMY = 0.95, 0.80  # of the pool held: branches pause above the one, go on below the other


class Branching(Sampled, Protocol):
    """What a search needs of an engine beside samples."""

    def extend(
        self,
        handle: str,
        until: Until | None = None,
        *,
        n: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
        end_thinking: ThinkingEndReason | None = None,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def drop(self, handle: str, namespace: tuple[str, ...] = ()) -> None: ...
    async def pause(self, request_id: str, choice: int | None = None) -> None: ...
    async def resume(self, request_id: str, choice: int | None = None) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class _Part:
    """A part that runs, and how promising it is."""

    worth: float
    task: asyncio.Task[RequestOutput]
    paused: bool = False


class Thoughts:
    """`control.search.Steps` of one question. `close` it in any case."""

    def __init__(self, engine: Branching, question: Question, params: SearchParams, verifier: Verifier | None) -> None:
        self._engine, self._question, self._params, self._verifier = engine, question, params, verifier
        self._seed = secrets.randbits(62) if question.sampling.seed is None else question.sampling.seed
        self._paths: dict[str, CompletionOutput] = {}  # of states: everything from the first token on
        self._replies: dict[str, CompletionOutput] = {}  # of states that have answered
        self._worth: dict[str, float] = {}
        self._handles: set[str] = set()
        self._parts: dict[str, _Part] = {}
        self._told: list[RequestOutput] = []  # the last output of each part
        self.paused = 0
        self.probe_tokens = 0

    async def root(self) -> State:
        return State("", "", 0)

    async def extend(self, state: State, count: int, min_tokens: int, max_tokens: int) -> list[State]:
        asked, until = self._question, Until(self._params.step, min_tokens, max_tokens)
        seed = (self._seed + zlib.crc32(state.key.encode())) % SEEDS
        if state.key:
            outputs = self._extend(state, "n", until, n=count, seed=seed)
        else:
            name = f"{asked.request_id}-n"
            sampling = replace(asked.sampling, n=count, seed=seed)
            outputs = (
                name,
                self._engine.generate(
                    asked.prompt,
                    sampling,
                    asked.thinking,
                    asked.fold,
                    request_id=name,
                    namespace=asked.namespace,
                    until=until,
                    service=asked.service,
                ),
            )
        before = self._paths.get(state.key)
        output = await self._run(*outputs, self._worth.get(state.key, 0.0))
        return [self._state(f"{state.key}.{news.index}".lstrip("."), before, news) for news in output.outputs]

    async def score(self, states: Sequence[State]) -> list[Verdict] | None:
        if self._params.scored_by == "confidence":
            self._worth |= {state.key: state.confidence for state in states}
            return None
        if self._verifier is not None:
            judged = [Judged(self._paths[state.key].text, state.text) for state in states]
            found = await self._verifier.score(self._question.text, judged, self._params.timeout_s)
        else:
            found = await asyncio.gather(*map(self._probe, states))
        self._worth |= {state.key: one.score or 0.0 for state, one in zip(states, found, strict=True)}
        return found

    async def finish(self, state: State, max_tokens: int | None) -> tuple[str, int]:
        path = self._replies[state.key] = self._paths[state.key]
        if path.handle is None:
            return path.text, 0
        old, before = path.handle.id, path.num_output_tokens
        until = None if max_tokens is None else Until(max_tokens=max_tokens)
        output = await self._run(*self._extend(state, "a", until, close=True), self._worth[state.key])
        path.merge(output.outputs[0])
        await self._drop(old)
        if path.finish_reason is FinishReason.BOUNDARY:  # the tokens of the search are spent
            path.finish_reason = FinishReason.LENGTH
        return path.text, path.num_output_tokens - before

    async def drop(self, state: State) -> None:
        path = self._paths.pop(state.key, None)
        if path is not None and path.handle is not None:
            await self._drop(path.handle.id)

    async def close(self) -> None:
        """End what runs and forget every handle."""
        while self._parts:
            for name, part in list(self._parts.items()):
                with contextlib.suppress(ThinkfoldError):  # it has not begun, or just ended
                    await self._engine.cancel(name, keep_partial=False)
                await asyncio.wait({part.task}, timeout=_AGAIN_S)
        for handle in list(self._handles):
            await self._drop(handle)

    def output(self, outcome: Outcome, key: str | None = None) -> RequestOutput:
        """The news of all of them; with `key`, the last ones: the path of that state is the reply."""
        shown = CompletionOutput(0, phase=Phase.THINKING) if key is None else replace(self._replies[key], handle=None)
        costs = summed([output.costs for output in self._told])
        return replace(
            self._told[0],
            request_id=self._question.request_id,
            outputs=[shown],
            costs=costs,
            finished=key is not None,
            outcome=outcome,
        )

    async def _probe(self, state: State) -> Verdict:
        """The geometric mean probability of the answer that the model would give now, or has begun to give."""
        path = self._paths[state.key]
        if state.ended:
            written = path.num_output_tokens - path.num_thinking_tokens
            return _probable(path.stats[-min(PROBE_TOKENS, max(1, written)) :])
        until = Until(max_tokens=PROBE_TOKENS)
        try:
            output = await self._run(*self._extend(state, "p", until, temperature=0.0, close=True), 0.0)
        except NotFoundError:
            return Verdict(None, "its state was driven out")
        (news,) = output.outputs
        self.probe_tokens += news.num_output_tokens - path.num_output_tokens
        if news.handle is not None:
            await self._drop(news.handle.id)
        return _probable(news.stats)

    def _extend(
        self,
        state: State,
        what: str,
        until: Until | None,
        *,
        n: int = 1,
        seed: int | None = None,
        temperature: float | None = None,
        close: bool = False,
    ) -> tuple[str, AsyncGenerator[RequestOutput, None]]:
        """A part that goes on from a state, and its name; `close` ends thinking at once."""
        path, asked = self._paths[state.key], self._question
        if path.handle is None:
            raise NotFoundError(f"the state {state.key} of the search has ended")
        name = f"{asked.request_id}-{what}{state.key}"
        return name, self._engine.extend(
            path.handle.id,
            until,
            n=n,
            temperature=temperature,
            seed=seed,
            end_thinking=ThinkingEndReason.SEARCH if close and path.phase is Phase.THINKING else None,
            request_id=name,
            namespace=asked.namespace,
        )

    async def _run(self, name: str, outputs: AsyncGenerator[RequestOutput, None], worth: float) -> RequestOutput:
        """A part to its end. It runs in a task of its own, so that its handles are told whoever stops waiting."""
        part = self._parts[name] = _Part(worth, asyncio.create_task(self._collect(name, outputs)))
        part.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        output = await asyncio.shield(part.task)
        if output.error is not None:
            raise RequestFailedError(output.error)
        return output

    async def _collect(self, name: str, outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        total: RequestOutput | None = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._handles |= {news.handle.id for news in output.outputs if news.handle is not None}
                    if total is None:
                        total = output
                    else:
                        total.merge(output)
                    await self._ease()
        finally:
            del self._parts[name]
            await self._ease()
        assert total is not None
        self._told.append(total)
        return total

    async def _ease(self) -> None:
        """While memory is short, only promising parts run; the most promising one always does."""
        running = sorted((part.worth, name) for name, part in self._parts.items() if not part.paused)
        waiting = sorted((part.worth, name) for name, part in self._parts.items() if part.paused)
        pages = self._engine.stats().kv_pages
        used = pages.held / pages.total if pages.total else 0.0
        with contextlib.suppress(ThinkfoldError):  # it has just ended, or not begun
            if used > FULL and len(running) > 1:
                await self._engine.pause(running[0][1])
                self._parts[running[0][1]].paused = True
                self.paused += 1
            elif waiting and (used < ROOMY or not running):
                self._parts[waiting[-1][1]].paused = False
                await self._engine.resume(waiting[-1][1])

    def _state(self, key: str, before: CompletionOutput | None, news: CompletionOutput) -> State:
        path = news.copy_for(0)
        if before is not None:
            path = replace(before.copy_for(0))
            path.merge(news)
        self._paths[key] = path
        ended = path.phase is not Phase.THINKING or path.handle is None
        sure = fmean(one.confidence for one in news.stats) if news.stats else 0.0
        tokens = path.num_output_tokens - (0 if before is None else before.num_output_tokens)
        return State(key, path.reasoning, tokens, ended, sure)

    async def _drop(self, handle: str) -> None:
        self._handles.discard(handle)
        with contextlib.suppress(ThinkfoldError):  # it was driven out, or the engine has died
            await self._engine.drop(handle, self._question.namespace)


def _probable(stats: Sequence[TokenStats]) -> Verdict:
    return Verdict(exp(fmean(one.logprob for one in stats))) if stats else Verdict(None, "no answer was drawn")
