"""Runs best of N over live samples: each that has finished goes to a verifier, whose scores go to the rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from thinkfold.control.best_of import (
    KILL_STEPS,
    BestOf,
    BestOfAction,
    BestOfObservation,
    CandidateFinished,
    CandidateScored,
    ScoreTrace,
    StepScored,
)
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.verifier import Verifier
from thinkfold.control.voting import CancelTraces, StartTraces, TraceFailed
from thinkfold.engine.samples import Sample, Samples
from thinkfold.types import BestOfParams, BestOfState, Judged, RequestOutput, SampleScore, Verdict


async def run_best_of(
    samples: Samples, params: BestOfParams, verifier: Verifier, equality: Equality
) -> AsyncGenerator[RequestOutput, None]:
    """Yield where it stands whenever that changes, at last with the sample to show. `samples` are closed."""
    run = _BestOf(samples, params, verifier, equality)
    try:
        await run.carry_out(run.rules.start())
        told = None
        while run.rules.result is None:
            await run.take(await samples.next())
            if run.rules.result is None and (state := run.state()) != told:
                told = state
                yield samples.output(told)
        await samples.ended()
        yield samples.output(run.state(), samples.all[run.rules.result.trace or 0], finished=True)
    finally:
        await run.close()


class _BestOf:
    def __init__(self, samples: Samples, params: BestOfParams, verifier: Verifier, equality: Equality) -> None:
        self.rules = BestOf(params, equality)
        self._samples, self._params, self._verifier = samples, params, verifier
        self._told: set[int] = set()
        self._steps: dict[int, int] = {}  # paragraphs of a sample at the last look at it
        self._asking: dict[asyncio.Task[None], int] = {}
        self._heard: dict[int, list[BestOfObservation]] = {}
        self._verdicts: dict[int, Verdict] = {}  # of finished samples

    async def take(self, sample: Sample) -> None:
        """News of one sample, or of the verifier's about it."""
        for seen in self._heard.pop(sample.number, []):
            await self._observe(seen)
        if sample.ended and sample.number not in self._told:
            self._told.add(sample.number)
            await self._observe(_ending(sample))
        elif not sample.ended and self._params.reads == "steps":
            self._look_at_steps(sample)

    async def carry_out(self, actions: Sequence[BestOfAction]) -> None:
        for action in actions:
            match action:
                case StartTraces():
                    self._samples.start(action.count)
                case CancelTraces():
                    await self._samples.cancel(action.traces)
                case ScoreTrace():
                    self._ask(self._samples.all[action.trace], None)

    def state(self) -> BestOfState:
        rules, params, result = self.rules, self._params, self.rules.result
        rows = [(c.number, extract(c.reply).answer) for c in rules.candidates if c.number in self._verdicts]
        scores = tuple(SampleScore(number, answer, *self._verdicts[number]) for number, answer in rows)
        return BestOfState(
            n=params.n,
            verifier=self._verifier.name,
            reads=params.reads,
            timeout_s=params.timeout_s,
            started=rules.started,
            running=len(rules.live),
            finished=len(rules.candidates),
            cancelled=rules.cancelled,
            scores=scores,
            misses=sum(one.score is None for one in scores),
            answer=None if result is None else result.answer,
            rule=None if result is None else result.rule,
            sample=None if result is None else result.trace,
        )

    async def close(self) -> None:
        """Nobody waits for the verifier any more, and what still runs ends."""
        for task in self._asking:
            task.cancel()
        await self._samples.close()

    async def _observe(self, seen: BestOfObservation) -> None:
        """Comparing answers may take long, so it is done in a thread."""
        await self.carry_out(await asyncio.to_thread(self.rules.observe, seen))

    def _look_at_steps(self, sample: Sample) -> None:
        """Ask about thinking behind its newest paragraph, one question of a sample at a time."""
        if sample.output is None or not sample.thinks or sample.number in self._asking.values():
            return
        steps = sum(boundary.kind == "paragraph" for boundary in sample.output.boundaries)
        if steps >= max(KILL_STEPS, self._steps.get(sample.number, 0) + 1):
            self._steps[sample.number] = steps
            self._ask(sample, steps)

    def _ask(self, sample: Sample, steps: int | None) -> None:
        """Ask about a sample: a finished one, or one that has thought so many `steps`."""
        assert sample.output is not None
        thinking = "" if self._params.reads == "answer" else sample.output.reasoning
        judged = Judged(sample.output.text if steps is None else "", thinking)
        task = asyncio.create_task(self._hear(sample.number, judged, steps))
        self._asking[task] = sample.number
        task.add_done_callback(self._asking.pop)

    async def _hear(self, number: int, judged: Judged, steps: int | None) -> None:
        (verdict,) = await self._verifier.score(self._samples.question.text, [judged], self._params.timeout_s)
        if steps is None:
            self._verdicts[number] = verdict
        seen = CandidateScored(number, verdict.score) if steps is None else StepScored(number, steps, verdict.score)
        self._heard.setdefault(number, []).append(seen)
        self._samples.tell(number)


def _ending(sample: Sample) -> BestOfObservation:
    if not sample.answered:
        return TraceFailed(sample.number)
    assert sample.output is not None
    return CandidateFinished(sample.number, sample.output.text, sample.output.num_output_tokens)
