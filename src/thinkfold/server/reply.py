"""Adds up the outputs of one HTTP request, and says what it cost. Knows no API's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from thinkfold.server.policy import echo
from thinkfold.types import (
    CompletionOutput,
    Costs,
    FinishReason,
    RequestOutput,
    ThinkingEndReason,
    ThinkingPolicy,
    TokenLogprobs,
)


@dataclass(slots=True)
class Choice:
    """One choice so far. Texts stay in pieces until they are asked for."""

    index: int
    reasoning_parts: list[str] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_output_tokens: int = 0
    num_thinking_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    thinking_end_reason: ThinkingEndReason | None = None

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def ending(self) -> dict[str, Any]:
        """How the choice ended, as every API shows it."""
        return {
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "thinking_end_reason": self.thinking_end_reason,
        }


class Reply:
    """The choices of `num_prompts` engine requests of `n` branches each."""

    def __init__(self, num_prompts: int, n: int, *, keep_text: bool) -> None:
        self._n = n
        self._keep_text = keep_text
        self._unfinished = num_prompts
        self._costs: dict[int, Costs] = {}
        self._policy: ThinkingPolicy | None = None
        self.choices = [Choice(index) for index in range(num_prompts * n)]
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def add(self, prompt: int, output: RequestOutput) -> Iterator[tuple[Choice, CompletionOutput]]:
        """Take in one output; yields each choice with its news."""
        self._costs[prompt] = output.costs
        self._policy = output.policy
        self.error = output.error or self.error
        self._unfinished -= output.finished
        for news in output.outputs:
            choice = self.choices[prompt * self._n + news.index]
            self._take(choice, news)
            yield choice, news

    def _take(self, choice: Choice, news: CompletionOutput) -> None:
        if self._keep_text:
            choice.reasoning_parts.append(news.reasoning)
            choice.text_parts.append(news.text)
            choice.logprobs += news.logprobs
        choice.num_output_tokens = news.num_output_tokens
        choice.num_thinking_tokens = news.num_thinking_tokens
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

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; each prompt counts once, outputs add up."""
        costs = self.costs()
        completion = sum(choice.num_output_tokens for choice in self.choices)
        reasoning = sum(choice.num_thinking_tokens for choice in self.choices)
        return {
            "prompt_tokens": costs.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": costs.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": costs.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def thinkfold(self) -> dict[str, Any]:
        """Our own object: the effective policy and the three costs."""
        assert self._policy is not None
        return {"thinking": echo(self._policy), "costs": asdict(self.costs())}
