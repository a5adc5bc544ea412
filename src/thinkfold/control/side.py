"""What becomes of the tokens of a probe: a few, drawn beside a branch, until one of its stops. Knows no batch."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.text.detokenizer import Detokenizer
from thinkfold.text.stop_strings import StopStrings
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.types import FinishReason, Phase, ProbeResult, TokenLogprobs, TokenStats


class SideControl:
    """Ends after `limit` tokens, at an end token or behind a stop string. It never injects and never folds."""

    segment_ends: Sequence[int] = ()
    answer_start: int | None = None

    def __init__(self, vocabulary: Vocabulary, phase: Phase, limit: int, stop: tuple[str, ...]) -> None:
        self.phase = phase
        self.finish_reason: FinishReason | None = None
        self._limit = limit
        self._eos_ids = vocabulary.eos_ids
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopStrings(stop)
        self._result = ProbeResult()
        self._text: list[str] = []

    def accept(self, token_id: int, stats: TokenStats, logprobs: TokenLogprobs | None) -> None:
        """One drawn token; `finish_reason` is set when it is the last one."""
        result = self._result
        result.token_ids.append(token_id)
        result.stats.append(stats)
        if logprobs is not None:
            result.logprobs.append(logprobs)
        if token_id in self._eos_ids:
            self._finish(FinishReason.STOP)
            return
        safe, matched = self._stops.push(self._detokenizer.push(token_id))
        self._text.append(safe)
        if matched is not None:
            result.stop_reason = matched
            self.finish_reason = result.finish_reason = FinishReason.STOP
        elif len(result.token_ids) >= self._limit:
            self._finish(FinishReason.LENGTH)

    def result(self, computed: int) -> ProbeResult:
        """What was drawn so far; `computed` tokens went through the model for it."""
        self._result.text = "".join(self._text)
        self._result.computed_tokens = computed
        return self._result

    def injection(self) -> tuple[int, ...]:
        return ()

    def must_wait(self, inflight: int) -> bool:
        return len(self._result.token_ids) + inflight >= self._limit

    def ban_eos(self, inflight: int) -> bool:
        return False

    def allowed(self) -> bytes | None:
        return None

    def _finish(self, reason: FinishReason) -> None:
        self._text.append(self._stops.flush())
        self.finish_reason = self._result.finish_reason = reason
