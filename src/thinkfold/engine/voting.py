"""Runs a vote over live samples: what they do goes to the rules, what the rules say goes to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from thinkfold.control.ballot import VoteClass
from thinkfold.control.facts import read_probe
from thinkfold.control.rule import Probe, Probed
from thinkfold.control.schedule import MAX_PROBE_TOKENS
from thinkfold.control.voting import (
    CancelTraces,
    CompareAnswers,
    Compared,
    EndTraceThinking,
    StartTraces,
    Ticked,
    TraceFailed,
    TraceFinished,
    VoteAction,
    VoteObservation,
    Voting,
    WindowFilled,
)
from thinkfold.engine.last_call import LastCall
from thinkfold.engine.samples import Sample, Samples
from thinkfold.engine.steering import Steersman
from thinkfold.types import AnswerClass, RequestOutput, VoteParams, VoteState

WINDOW_EVERY = 64  # tokens of a sample between two looks at its confidence


async def run_vote(
    samples: Samples,
    params: VoteParams,
    steersman: Steersman,
    call: LastCall,
    *,
    in_flight: bool,
    tick_tokens: int | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the state of the vote whenever it changes, at last with the sample to show. `samples` are closed."""
    run = _Vote(samples, params, steersman, call, in_flight=in_flight, tick_tokens=tick_tokens)
    try:
        await run.begin()
        told = None
        while run.voting.result is None:
            await run.take(await samples.next())
            if run.state != told and run.voting.result is None:
                told = run.state
                yield samples.output(told)
        await samples.ended()
        shown = run.voting.result.trace
        yield samples.output(run.state, samples.all[shown or 0], finished=True)
    finally:
        await samples.close()


class _Vote:
    def __init__(
        self,
        samples: Samples,
        params: VoteParams,
        steersman: Steersman,
        call: LastCall,
        *,
        in_flight: bool,
        tick_tokens: int | None,
    ) -> None:
        self.voting = Voting(params, steersman.equality(), in_flight=in_flight and steersman.can_look)
        self._samples, self._params, self._steersman, self._call = samples, params, steersman, call
        self._tick = tick_tokens or self.voting.tick_tokens
        self._next_tick = self._tick
        self._probes: dict[int, str | None] = {}  # the last answer of each sample
        self._windows: dict[int, int] = {}  # output tokens at the last look at a sample's confidence
        self._told: set[int] = set()
        self._settled = False  # in flight: one sample writes, nobody is asked any more
        self.state = VoteState(params.n, 0, 0, 0, 0, 0)

    async def begin(self) -> None:
        """The first wave starts."""
        actions = self.voting.start()
        self.state = self._standing()
        await self.carry_out(actions)

    async def take(self, sample: Sample) -> None:
        """News of one sample."""
        if sample.ended:
            if sample.number not in self._told:
                self._told.add(sample.number)
                await self._observe(_ending(sample))
        else:
            await self._look_at_window(sample)
        thinking = [each for each in self._running() if each.thinks]
        if self.voting.wants_ticks and thinking and not self._settled:
            progress = min(each.output.num_thinking_tokens for each in thinking if each.output)
            if progress >= self._next_tick:
                self._next_tick = (progress // self._tick + 1) * self._tick
                await self._probe_all(thinking)

    async def carry_out(self, actions: Sequence[VoteAction]) -> None:
        for action in actions:
            match action:
                case StartTraces():
                    self._samples.start(action.count)
                case CancelTraces():
                    await self._samples.cancel(action.traces)
                case EndTraceThinking():
                    self._settled = True
                    await self._samples.end_thinking(action.trace)
                case CompareAnswers():
                    await self._observe(Compared(await self._call.ask(self._samples, action.prompt)))

    def _running(self) -> list[Sample]:
        return [self._samples.all[number] for number in self.voting.live]

    async def _observe(self, seen: VoteObservation) -> None:
        """Comparing answers may take long, so it is done in a thread."""
        actions, self.state = await asyncio.to_thread(self._step, seen)
        await self.carry_out(actions)

    def _step(self, seen: VoteObservation) -> tuple[list[VoteAction], VoteState]:
        return self.voting.observe(seen), self._standing()

    def _standing(self) -> VoteState:
        result, live = self.voting.result, len(self.voting.live)
        if result is None:
            found = self.voting.tally()
            votes = sum(one.count for one in found.classes) + found.abstained
            started, cancelled = self.voting.started, self.voting.cancelled
            classes = _classes(found.classes)
            return VoteState(self._params.n, started, live, votes, cancelled, found.abstained, classes, found.share)
        return VoteState(
            n=self._params.n,
            started=result.started,
            running=live,
            finished=result.finished,
            cancelled=result.cancelled,
            abstained=result.abstained,
            classes=_classes(result.classes),
            share=result.share,
            probability=result.probability,
            answer=result.answer,
            rule=result.rule,
            sample=result.trace,
            by_reply=result.by_reply,
        )

    async def _look_at_window(self, sample: Sample) -> None:
        if sample.output is None or sample.confidence is None or sample.confidence.full_window is None:
            return
        written = sample.output.num_output_tokens
        if written - self._windows.get(sample.number, 0) >= WINDOW_EVERY:
            self._windows[sample.number] = written
            await self._observe(WindowFilled(sample.number, sample.confidence.full_window))

    async def _probe_all(self, thinking: Sequence[Sample]) -> None:
        """Ask all at once. Where a probe is dropped, and of samples that write, the last answer stays."""

        async def ask(sample: Sample) -> None:
            at = sample.output.num_thinking_tokens if sample.output else 0
            seen = await self._steersman.look(sample.request_id, sample.choice, Probe(MAX_PROBE_TOKENS), at)
            if isinstance(seen, Probed):
                self._probes[sample.number] = read_probe(seen.text)

        await asyncio.gather(*map(ask, thinking))
        await self._observe(Ticked(dict(self._probes)))


def _classes(found: Sequence[VoteClass]) -> tuple[AnswerClass, ...]:
    return tuple(AnswerClass(one.answer, one.count, one.weight, str(one.rung)) for one in found)


def _ending(sample: Sample) -> VoteObservation:
    if not sample.answered:
        return TraceFailed(sample.number)
    assert sample.output is not None and sample.confidence is not None
    sure = sample.confidence
    bottom, lowest = (sure.bottom, sure.lowest) if sample.output.stats else (None, None)
    return TraceFinished(sample.number, sample.output.text, bottom, lowest)
