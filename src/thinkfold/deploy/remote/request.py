"""One request over a remote server: its choices, its bill and its news, as a core would tell them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from thinkfold.deploy.remote.choice import Choice, Line
from thinkfold.deploy.remote.deadline import due
from thinkfold.deploy.remote.meter import Meter
from thinkfold.deploy.remote.turns import Turns
from thinkfold.engine.branch_controls import make_control
from thinkfold.errors import NotFoundError, ThinkfoldError
from thinkfold.types import CompletionOutput, Costs, EngineRequest, FinishReason, RequestOutput, ThinkingEndReason


@dataclass(frozen=True, slots=True)
class Desk:
    """What all requests share. `tell` takes the news of a request, `drawing` counts choices that draw."""

    line: Line
    turns: Turns
    entry_bytes: int
    clock: Callable[[], float]
    tell: Callable[[RequestOutput], None]
    drawing: Callable[[], int]


@dataclass(slots=True)
class _Told:
    choices: set[int] = field(default_factory=set)  # whose end has been told
    error: str | None = None
    failure: ThinkfoldError | None = None


class RemoteRequest:
    """`run` it; its last output has `finished`, whatever happens."""

    def __init__(self, desk: Desk, request: EngineRequest) -> None:
        self.request = request
        self._desk = desk
        self._native = _native_budget(desk.line, request)
        self.choices = [self._choice(index) for index in range(request.sampling.n)]
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        self._meter = Meter(request, desk.entry_bytes, desk.clock())
        self._told = _Told()

    @property
    def finished(self) -> bool:
        return len(self._told.choices) == len(self.choices)

    async def ended(self) -> None:
        """Wait until nothing of it runs."""
        await asyncio.wait(self._tasks)

    def live(self, choice: int | None) -> list[Choice]:
        """The choice, or all, that has not ended. Raises NotFoundError if there is none."""
        found = [each for each in self.choices if not each.ended and choice in (None, each.index)]
        if not found:
            what = "any more" if choice is None else f"as a running choice {choice}"
            raise NotFoundError(f"{self.request.request_id!r} is not there {what}")
        return found

    def cancel(self, choices: Sequence[Choice], *, keep: bool = True) -> None:
        """End choices now; without `keep` nothing of them is kept. Their streams are closed."""
        for choice in choices:
            if keep:
                choice.control.finish(FinishReason.ABORT)
            else:
                choice.control.discard()
            self._tasks[choice.index].cancel()
            self._moved(choice)

    def tick(self) -> None:
        """Charge the time since the last call, and end thinking that would leave too little for the answer."""
        if self.finished:
            return
        now = self._desk.clock()
        self._meter.tick(self.choices, self._desk.drawing(), now)
        reason = due(self.request, self.choices, self._meter.count(self.choices), now - self.request.arrival_time)
        for choice in self.choices if reason is not None else ():
            if choice.thinks:
                choice.control.end_thinking(reason or ThinkingEndReason.DEADLINE)

    @property
    def costs(self) -> Costs:
        """Its bill until now."""
        return self._meter.count(self.choices)

    def count_probe(self, tokens: int) -> None:
        """A probe has computed `tokens`."""
        self._meter.costs.probe_tokens += tokens

    def _choice(self, index: int) -> Choice:
        line, request = self._desk.line, self.request
        own = request if self._native is None else replace(request, thinking=replace(request.thinking, budget=None))
        control = make_control(line.language, own, index)
        choice = Choice(line, request, index, control, self._moved)
        choice.budget = self._native
        return choice

    async def _run(self, choice: Choice) -> None:
        async with self._desk.turns.turn(self.request.tier):
            await choice.run()

    def _moved(self, choice: Choice) -> None:
        """A choice has news."""
        if choice.index in self._told.choices:
            return
        self.tick()
        news = choice.control.take()
        if choice.ended:
            self._told.choices.add(choice.index)
            news = news or CompletionOutput(index=choice.index, finish_reason=FinishReason.ERROR)
            self._note_error(choice)
        if news is None:
            return
        self._desk.turns.charge(self.request.tier, len(news.token_ids))
        news.stats, choice.stats = choice.stats, []
        news.logprobs, choice.logprobs = choice.logprobs, []
        self._name_native_end(choice, news)
        self._desk.tell(self._output([news]))

    def _note_error(self, choice: Choice) -> None:
        error = choice.error
        if error is None or self._told.error is not None:
            return
        self._told.error = f"choice {choice.index}: {error}"
        self._told.failure = error if isinstance(error, ThinkfoldError) else None

    def _name_native_end(self, choice: Choice, news: CompletionOutput) -> None:
        """The server has written the end marker in the budget's name, which most do not say."""
        spent = choice.budget is not None and (choice.spent or choice.used >= choice.budget)
        if spent and news.thinking_end_reason is ThinkingEndReason.NATURAL:
            news.thinking_end_reason = ThinkingEndReason.BUDGET

    def _output(self, news: list[CompletionOutput]) -> RequestOutput:
        request, told = self.request, self._told
        return RequestOutput(
            request_id=request.request_id,
            outputs=news,
            policy=request.thinking,
            fold=request.fold,
            limits=request.limits,
            costs=copy(self.costs),
            finished=self.finished,
            error=told.error if self.finished else None,
            failure=told.failure if self.finished else None,
        )


def _native_budget(line: Line, request: EngineRequest) -> int | None:
    """The budget that the server keeps itself: it has no closing words."""
    policy = request.thinking
    native = line.dialect.native_budget and policy.enabled and not line.language.closing_ids
    return policy.budget if native else None
