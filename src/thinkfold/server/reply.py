"""Adds up the outputs of one HTTP request, and says what it cost. Knows no API's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import cast

from thinkfold.errors import RequestFailedError, ThinkfoldError
from thinkfold.server.folds import segment_states
from thinkfold.server.policy import echo
from thinkfold.server.replies import Bill, Ending, ThinkfoldReply, TimeCosts, Usage
from thinkfold.server.serving import Serving
from thinkfold.types import (
    CompletionOutput,
    Costs,
    FinishReason,
    Fold,
    FoldPolicy,
    Limits,
    Outcome,
    Phase,
    RequestOutput,
    Segment,
    ThinkingEndReason,
    ThinkingPolicy,
    TokenLogprobs,
)


@dataclass(slots=True)
class Run:
    """Text of one phase without a break; it stays in pieces until it is asked for."""

    phase: Phase
    parts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Choice:
    """One choice so far. A model that thinks again after its answer began has more than two runs."""

    index: int
    runs: list[Run] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    num_output_tokens: int = 0
    num_thinking_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    thinking_end_reason: ThinkingEndReason | None = None

    @property
    def reasoning(self) -> str:
        return self._joined(Phase.THINKING)

    @property
    def text(self) -> str:
        return self._joined(Phase.ANSWER)

    def write(self, news: CompletionOutput) -> None:
        """Keep the texts of `news`."""
        for phase, text in ((Phase.THINKING, news.reasoning), (Phase.ANSWER, news.text)):
            if text and self.runs and self.runs[-1].phase is phase:
                self.runs[-1].parts.append(text)
            elif text:
                self.runs.append(Run(phase, [text]))

    def _joined(self, phase: Phase) -> str:
        return "".join(run.text for run in self.runs if run.phase is phase)

    def ending(self) -> Ending:
        """How the choice ended, as every API shows it."""
        return {
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "thinking_end_reason": self.thinking_end_reason,
        }


class Reply:
    """The choices of `num_prompts` engine requests of `n` branches each."""

    def __init__(self, num_prompts: int, n: int, *, keep_text: bool, serving: Serving) -> None:
        self.serving = serving
        self._n = n
        self._keep_text = keep_text
        self._unfinished = num_prompts
        self._costs: dict[int, Costs] = {}
        self._policies: tuple[ThinkingPolicy, FoldPolicy, Limits] | None = None
        self.choices = [Choice(index) for index in range(num_prompts * n)]
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self._failure: ThinkfoldError | None = None

    @property
    def begun(self) -> bool:
        """Whether the engine has told anything."""
        return self._policies is not None

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    @property
    def failure(self) -> ThinkfoldError | None:
        """The error that it ended with, if it did."""
        return None if self.error is None else self._failure or RequestFailedError(self.error)

    def add(self, prompt: int, output: RequestOutput) -> Iterator[tuple[Choice, CompletionOutput]]:
        """Take in one output; yields each choice with its news."""
        self._costs[prompt] = output.costs
        self._policies = output.policy, output.fold, output.limits
        self.error = output.error or self.error
        self._failure = output.failure or self._failure
        self.outcome = output.outcome or self.outcome
        self._unfinished -= output.finished
        for news in output.outputs:
            choice = self.choices[prompt * self._n + news.index]
            self._take(choice, news)
            yield choice, news

    def _take(self, choice: Choice, news: CompletionOutput) -> None:
        if news.discarded:
            choice.runs, choice.logprobs = [], []
        if self._keep_text:
            choice.write(news)
            choice.logprobs += news.logprobs
        choice.segments += news.segments
        choice.folds += news.folds
        choice.num_output_tokens = 0 if news.discarded else news.num_output_tokens
        choice.num_thinking_tokens = 0 if news.discarded else news.num_thinking_tokens
        choice.finish_reason = news.finish_reason
        choice.stop_reason = news.stop_reason
        choice.thinking_end_reason = news.thinking_end_reason

    @property
    def longest(self) -> int:
        """Output tokens of the longest choice."""
        return max(choice.num_output_tokens for choice in self.choices)

    def costs(self) -> Costs:
        """Summed over the prompts."""
        total = Costs()
        for costs in self._costs.values():
            for f in fields(Costs):
                setattr(total, f.name, getattr(total, f.name) + getattr(costs, f.name))
        return total

    def usage(self) -> Usage:
        """OpenAI's usage object with ours in it; each prompt counts once, outputs add up, also of samples not shown."""
        costs, (completion, reasoning) = self.costs(), self.written()
        return {
            "prompt_tokens": costs.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": costs.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": costs.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
            "thinkfold": self.bill(),
        }

    def written(self) -> tuple[int, int]:
        """Output tokens, and thinking tokens among them; where samples decided, also those that are not shown."""
        if self.outcome is not None:
            costs = self.costs()
            return costs.thinking_tokens + costs.answer_tokens, costs.thinking_tokens
        output = sum(choice.num_output_tokens for choice in self.choices)
        return output, sum(choice.num_thinking_tokens for choice in self.choices)

    def bill(self) -> Bill:
        """The three costs, and what limits, prices and kept answers add."""
        costs = self.costs()
        return {**three_costs(costs), **self.serving.usage(costs)}

    def thinkfold(self) -> ThinkfoldReply:
        """Our own object: the effective policies and what became of segments."""
        assert self._policies is not None
        states = [state for c in self.choices for state in segment_states(c.index, c.segments, c.folds)]
        shown: ThinkfoldReply = {"policy": echo(*self._policies), "segments": states}
        shown["policy"]["control"] = self.serving.control_shown()
        shown = {**shown, **self.serving.shown()}
        if self.outcome is not None:
            shown[self.outcome.field] = asdict(self.outcome)
        return shown


def three_costs(costs: Costs) -> Bill:
    """Tokens, KV memory and time (seconds), and what folding did."""
    return {
        "tokens": {
            "prompt": costs.prompt_tokens,
            "cached": costs.cached_tokens,
            "computed_prompt": costs.computed_prompt_tokens,
            "thinking": costs.thinking_tokens,
            "answer": costs.answer_tokens,
            "copied": costs.copied_tokens,
            "injected": costs.injected_tokens,
            "discarded": costs.discarded_tokens,
            "recomputed": costs.recomputed_tokens,
            "probe": costs.probe_tokens,
        },
        "kv": {
            "byte_seconds": costs.kv_byte_seconds,
            "peak_entries": costs.kv_peak_entries,
            "swapped_bytes": costs.swapped_bytes,
            "preemptions": costs.preemptions,
        },
        "time": cast(TimeCosts, {name: getattr(costs, name) for name in TimeCosts.__annotations__}),
        "folds": costs.folds,
        "folds_refused": costs.folds_refused,
        "folded_tokens": costs.folded_tokens,
        "quantised_tokens": costs.quantised_tokens,
    }
