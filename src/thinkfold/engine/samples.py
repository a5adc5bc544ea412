"""Samples of one prompt, started in waves and told as they are written. Knows no votes.

A wave is one request of the engine whose choices fork off one prefill; a later wave finds the
prompt in the prefix cache. A wave runs until all of its samples have ended or were cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Protocol

from thinkfold.control.trace_confidence import MAX_WINDOW, TraceConfidence, window_for
from thinkfold.errors import ConflictError, NotFoundError, ParameterError
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    FoldParams,
    Outcome,
    Phase,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingEndReason,
    ThinkingParams,
    Until,
)

_ONCE = ("prompt_tokens", "cached_tokens")  # of the first request only
SEEDS = 2**62
_PART = re.compile(r"-(?:s\d+|[np][\d.]*|aside)$")  # what decisions append to the name of their question
_NEXT_TO_NOTHING = 1e-9  # of money: thinking ends at once


def question_of(request_id: str) -> str:
    """The question to which a request belongs: a sample of a vote or a part of a search, or nobody's but its own."""
    return _PART.sub("", request_id)


class Sampled(Protocol):
    """What samples need of an engine."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        thinking: ThinkingParams | None = None,
        fold: FoldParams | None = None,
        *,
        request_id: str | None = None,
        namespace: tuple[str, ...] = (),
        until: Until | None = None,
        service: Service | None = None,
        control: ControlParams | None = None,
        aside: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def cancel(self, request_id: str, choice: int | None = None, *, keep_partial: bool = True) -> None: ...

    async def end_thinking(
        self, request_id: str, choice: int | None = None, *, reason: ThinkingEndReason = ThinkingEndReason.CONTROL
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Question:
    """What all samples are asked, and how they are drawn. `text` is the question as a verifier reads it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    thinking: ThinkingParams | None = None
    fold: FoldParams | None = None
    control: ControlParams | None = None
    request_id: str = ""
    namespace: tuple[str, ...] = ()
    service: Service | None = None
    text: str = ""

    def check(self, field: str) -> None:
        """Raise ParameterError for what makes several samples one."""
        if self.sampling.n != 1:
            raise ParameterError("n", f"goes without {field}, which has its own n")
        if self.sampling.temperature == 0.0:
            raise ParameterError("temperature", f"must be above 0 for {field}: greedy samples are all the same")


@dataclass(slots=True)
class Sample:
    """One sample so far, all of its news in one output; None before the first."""

    number: int
    request_id: str
    choice: int
    output: CompletionOutput | None = None
    confidence: TraceConfidence | None = None

    @property
    def ended(self) -> bool:
        return self.output is not None and self.output.finish_reason is not None

    @property
    def answered(self) -> bool:
        """Whether it has ended with an answer."""
        found = self.output
        failed = (None, FinishReason.ERROR, FinishReason.ABORT)
        return found is not None and found.finish_reason not in failed and bool(found.text.strip())

    @property
    def thinks(self) -> bool:
        return self.output is not None and not self.ended and self.output.phase is Phase.THINKING


class Samples:
    """Always `close` them: that ends what still runs."""

    def __init__(self, engine: Sampled, question: Question, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._began = clock()
        self.question = question
        self.all: list[Sample] = []
        self._seed = secrets.randbits(62) if question.sampling.seed is None else question.sampling.seed
        self._waves: list[asyncio.Task[None]] = []
        self._last: dict[int, RequestOutput] = {}  # by wave
        self._aside: list[Costs] = []
        self._news: asyncio.Queue[Sample | BaseException] = asyncio.Queue()

    def start(self, count: int) -> None:
        """One more wave."""
        first = len(self.all)
        name = f"{self.question.request_id}-s{first}"
        self.all += [Sample(first + choice, name, choice) for choice in range(count)]
        self._waves.append(asyncio.create_task(self._run(len(self._waves), self.all[first:])))

    async def next(self) -> Sample:
        """The next sample with news. Raises what its wave raised."""
        found = await self._news.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def tell(self, number: int) -> None:
        """Something has happened to a sample beside what it writes: it comes up as news."""
        self._news.put_nowait(self.all[number])

    async def cancel(self, numbers: Sequence[int]) -> None:
        """End samples; their tokens are discarded."""
        for sample in (self.all[number] for number in numbers):
            with contextlib.suppress(NotFoundError):  # it has just ended
                await self._engine.cancel(sample.request_id, sample.choice, keep_partial=False)

    async def end_thinking(self, number: int) -> None:
        """Let a sample write its answer now."""
        sample = self.all[number]
        with contextlib.suppress(NotFoundError, ConflictError):  # it does so already
            await self._engine.end_thinking(sample.request_id, sample.choice, reason=ThinkingEndReason.VOTE)

    async def ended(self) -> None:
        """All waves have told their end, so that costs are final."""
        await asyncio.gather(*self._waves)

    async def close(self) -> None:
        for wave in self._waves:
            wave.cancel()
        await asyncio.gather(*self._waves, return_exceptions=True)

    async def aside(self, prompt: Sequence[int], max_tokens: int) -> str:
        """What the model says to another prompt, greedily and without thinking; empty unless it ends by itself.

        All of its tokens are the question's `probe_tokens`.
        """
        asked, costs, text, reason = self.question, Costs(), "", None
        outputs = self._engine.generate(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            ThinkingParams(enabled=False),
            request_id=f"{asked.request_id}-aside",
            namespace=asked.namespace,
            service=self._left(),
            aside=True,
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    costs = output.costs
                    for news in output.outputs:
                        text, reason = text + news.text, news.finish_reason
        finally:
            self._aside.append(costs.as_probe())
        return text if reason is FinishReason.STOP else ""

    def output(self, outcome: Outcome, chosen: Sample | None = None, *, finished: bool = False) -> RequestOutput:
        """The news of all of them: where the decision stands and, at the end, the sample to show as choice 0."""
        first, last = self._last[min(self._last)], self._last[max(self._last)]
        shown = CompletionOutput(0, phase=Phase.THINKING)
        if chosen is not None and chosen.output is not None:
            shown = replace(chosen.output, index=0)
        errors = [output.error for output in self._last.values() if output.error]
        return replace(
            last,
            request_id=self.question.request_id,
            outputs=[shown],
            costs=self.costs(),
            limits=first.limits,
            finished=finished,
            error=errors[0] if finished and errors and not any(s.answered for s in self.all) else None,
            outcome=outcome,
        )

    def costs(self) -> Costs:
        return summed([*(output.costs for _, output in sorted(self._last.items())), *self._aside])

    def _left(self) -> Service | None:
        """What earlier waves leave of the deadline and the cost of them all."""
        service = self.question.service
        if service is None or not self._last:
            return service
        deadline, cost = service.deadline_ms, service.max_cost
        if deadline is not None:
            deadline = max(1, deadline - round(1000 * (self._clock() - self._began)))
        if cost is not None:
            cost = max(_NEXT_TO_NOTHING, cost - service.prices.cost(self.costs()))
        return replace(service, deadline_ms=deadline, max_cost=cost)

    async def _run(self, wave: int, samples: Sequence[Sample]) -> None:
        asked = self.question
        sampling = replace(asked.sampling, n=len(samples), seed=(self._seed + samples[0].number) % SEEDS)
        outputs = self._engine.generate(
            asked.prompt,
            sampling,
            asked.thinking,
            asked.fold,
            request_id=samples[0].request_id,
            namespace=asked.namespace,
            service=self._left(),
            control=asked.control,
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._last[wave] = output
                    for news in output.outputs:
                        self._take(samples[news.index], news, output)
        except Exception as error:
            self._news.put_nowait(error)
            raise

    def _take(self, sample: Sample, news: CompletionOutput, output: RequestOutput) -> None:
        if sample.output is None:
            sample.output = news
            budget = output.policy.budget
            sample.confidence = TraceConfidence(window_for([budget]) if budget else MAX_WINDOW)
        else:
            sample.output.merge(news)
        assert sample.confidence is not None
        for one in news.stats:
            sample.confidence.push(one.confidence)
        self._news.put_nowait(sample)


def summed(bills: Sequence[Costs]) -> Costs:
    """What several requests for one prompt cost: it counts once, as the first has it, memory by its peak."""
    total = Costs()
    for number, bill in enumerate(bills):
        for name in (f.name for f in fields(Costs)):
            mine, more = getattr(total, name), getattr(bill, name)
            if name == "kv_peak_entries":
                setattr(total, name, max(mine, more))
            elif number == 0 or name not in _ONCE:
                setattr(total, name, mine + more)
    return total
