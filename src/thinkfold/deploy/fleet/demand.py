"""The KV that a pool's requests will hold at their peaks, by prediction; learned from those that have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinkfold.engine.commands import Extend
from thinkfold.scheduler.forecast import LengthForecast
from thinkfold.types import EngineRequest, FinishReason, RequestOutput

SHARE = 0.75  # of requests whose output is not longer than what is predicted
PACE = 0.125  # how fast the share of its output that a request holds at its peak is learned


@dataclass(slots=True)
class Need:
    """One request: `choices` of at most `limit` tokens each, `tokens` written so far by the longest."""

    prompt: int
    choices: int
    limit: int
    expected: int
    tokens: int = 0


class Demand:
    """Predicts for one pool. While nothing is known a request is taken to think as long as it may, and to answer."""

    def __init__(self) -> None:
        self._lengths = LengthForecast()
        self._held = 1.0  # entries at the peak, as a share of the output tokens: less where thinking is folded

    def need(self, request: EngineRequest | Extend) -> Need:
        """What a request that is about to start will take."""
        if isinstance(request, Extend):
            most = request.until.max_tokens if request.until is not None else None
            expected = most or self._lengths.quantile(SHARE) or 0
            return Need(0, request.n, expected, expected)
        limit, thinking = request.sampling.max_tokens or 1, request.thinking
        most = limit if thinking.budget is None else min(limit, thinking.budget + thinking.answer_reserve)
        return Need(len(request.prompt_token_ids), request.sampling.n, limit, self._expected(0, most))

    def entries(self, need: Need) -> int:
        """KV entries at its peak."""
        return need.prompt + int(self._held * need.choices * max(need.expected, need.tokens))

    def progress(self, need: Need, output: RequestOutput) -> None:
        """News of a request: one that outlives its prediction gets another."""
        need.tokens = max([need.tokens, *(news.num_output_tokens for news in output.outputs)])
        if need.tokens >= need.expected < need.limit:
            need.expected = self._expected(need.tokens, need.limit)

    def learn(self, need: Need, output: RequestOutput, running: Iterable[Need]) -> None:
        """A request has ended; those cut off by somebody say nothing."""
        reasons = {news.finish_reason for news in output.outputs}
        if output.error is not None or not reasons <= {FinishReason.STOP, FinishReason.LENGTH} or not need.tokens:
            return
        cut = reasons == {FinishReason.LENGTH}
        self._lengths.end(need.tokens, [each.tokens for each in running], cut=cut)
        held = (output.costs.kv_peak_entries - need.prompt) / (need.choices * need.tokens)
        self._held += PACE * (min(max(held, 0.0), 1.0) - self._held)

    def _expected(self, tokens: int, limit: int) -> int:
        found = self._lengths.quantile(SHARE, tokens)
        return limit if found is None else min(found, limit)
