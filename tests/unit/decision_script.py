"""Scripted samples and probes for tests of decisions over several samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from scripted import language

from thinkfold.control.rule import Probed
from thinkfold.engine.last_call import LastCall
from thinkfold.engine.samples import Question
from thinkfold.engine.steering import Steersman
from thinkfold.text.prompts import PromptRenderer
from thinkfold.types import (
    Boundary,
    CompletionOutput,
    Costs,
    FinishReason,
    Phase,
    RequestOutput,
    SamplingParams,
    ThinkingEndReason,
    ThinkingPolicy,
)

POLICY = ThinkingPolicy(True, None, "default")
ASKED = Question((1, 2, 3), SamplingParams(seed=1), request_id="q", text="What is it?")


class Replies:
    """An engine whose i-th sample thinks `lengths[i]` tokens and then answers `texts[i]`, one token a turn for all.

    Every tenth token of thinking ends a paragraph.
    """

    def __init__(self, texts: Sequence[str], lengths: Sequence[int] = (), *, fails: Exception | None = None) -> None:
        self.texts, self.lengths = list(texts), list(lengths or [5] * len(texts))
        self.fails = fails
        self.running = 0
        self.seeds: list[int | None] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.ended: list[tuple[str, int | None, ThinkingEndReason]] = []

    async def generate(
        self, prompt, sampling, thinking=None, fold=None, *, request_id, namespace=(), service=None, control=None
    ):
        if self.fails is not None:
            raise self.fails
        self.running += 1
        try:
            async for output in self._wave(prompt, sampling, request_id):
                yield output
        finally:
            self.running -= 1

    async def _wave(self, prompt, sampling, request_id):
        first = int(request_id.rpartition("-s")[2])
        self.seeds.append(sampling.seed)
        live = dict.fromkeys(range(sampling.n), 0)
        costs = Costs(prompt_tokens=len(prompt), cached_tokens=1, computed_prompt_tokens=2 if first == 0 else 1)
        while live:
            await asyncio.sleep(0)
            news = []
            for choice in list(live):
                live[choice] += 1
                told = live[choice]
                out = CompletionOutput(choice, phase=Phase.THINKING, num_output_tokens=told, num_thinking_tokens=told)
                if (request_id, choice) in self.cancelled:
                    out.finish_reason, out.discarded = FinishReason.ABORT, True
                elif told > self.lengths[first + choice] or (request_id, choice, ThinkingEndReason.VOTE) in self.ended:
                    out.text, out.finish_reason = self.texts[first + choice], FinishReason.STOP
                    costs.answer_tokens += 1
                else:
                    out.reasoning = "w"
                    out.boundaries = [] if told % 10 else [Boundary("paragraph", told)]
                costs.thinking_tokens += out.finish_reason is None
                if out.finish_reason is not None:
                    del live[choice]
                news.append(out)
            yield RequestOutput(request_id, news, POLICY, costs, finished=not live)

    async def cancel(self, request_id, choice=None, *, keep_partial=True):
        assert not keep_partial, "nothing of a sibling is kept"
        self.cancelled.append((request_id, choice))

    async def end_thinking(self, request_id, choice=None, *, reason=ThinkingEndReason.CONTROL):
        self.ended.append((request_id, choice, reason))


class Looks(Steersman):
    """Every probe gives one answer."""

    def __init__(self, answer: str = "7}", **more) -> None:
        super().__init__(None, language()[2], (), "pebble", **more)  # type: ignore[arg-type]
        self.answer, self.asked = answer, 0

    async def look(self, name, choice, action, at):
        self.asked += 1
        return Probed(at, self.answer, -0.1, 20)


def last_call() -> LastCall:
    """Asks in the words of the embedded reasoner."""
    tokenizer, _, family = language()
    return LastCall(PromptRenderer(tokenizer, normalize=False), family)


def boxed(*answers: int) -> list[str]:
    return [f"It is \\boxed{{{answer}}}." for answer in answers]
