"""What a live response tells its rules: observations from its news, answers from its probes. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from thinkfold.control.rule import AtBoundary, BoundaryKind, Observation, Peeked, Probed, Wrote
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.types import CompletionOutput, Phase, ProbeResult

PROBE_STOPS = ("\n", "}.", "}$")  # an answer ends here; one that ends otherwise is cut afterwards
WROTE_EVERY = 32
KEPT_MARGINS = 64  # a boundary is told within a few tokens
_STRENGTH = {kind: strength for strength, kind in enumerate(BoundaryKind)}


class Observer:
    """Turns the news of one choice into observations while it thinks.

    A boundary waits for the row behind it, which is that of the next token. Where tokens were
    injected the margins around them are not known.
    """

    def __init__(self) -> None:
        self._margins: deque[float] = deque(maxlen=KEPT_MARGINS)
        self._waiting: dict[int, BoundaryKind] = {}  # by output tokens before it
        self._text: list[str] = []
        self._ids: list[int] = []

    def read(self, news: CompletionOutput) -> list[Observation]:
        """Observations in order of position; none outside thinking."""
        if len(news.stats) == len(news.token_ids):
            for one in news.stats:
                self._margins.append(one.margin)
        else:
            self._margins.extend([math.nan] * len(news.token_ids))
        if news.phase is not Phase.THINKING or news.finish_reason is not None:
            self._waiting.clear()
            return []
        self._text.append(news.reasoning)
        self._ids += news.token_ids
        for boundary in news.boundaries:
            kinds = BoundaryKind(boundary.kind), self._waiting.get(boundary.index, BoundaryKind.SENTENCE)
            self._waiting[boundary.index] = max(kinds, key=_STRENGTH.__getitem__)
        found: list[Observation] = []
        if len(self._ids) >= WROTE_EVERY:
            found.append(Wrote(news.num_thinking_tokens, tuple(self._ids)))
            self._ids.clear()
        if not self._waiting:  # most calls: one token, and nothing ends there
            return found
        for index in sorted(index for index in self._waiting if index < news.num_output_tokens):
            behind = news.num_output_tokens - index
            margin = self._margins[-behind] if behind <= len(self._margins) else math.nan
            at = max(0, news.num_thinking_tokens - behind)
            found.append(AtBoundary(at, self._waiting.pop(index), margin, "".join(self._text)))
            self._text.clear()
        return found


def peeked(result: ProbeResult, at: int) -> Peeked:
    """What a peek after `at` thinking tokens showed."""
    return Peeked(at, result.stats[0].entropy, result.computed_tokens)


def probed(result: ProbeResult, at: int, vocabulary: Vocabulary) -> Probed:
    """What a probe after `at` thinking tokens answered."""
    text, used = answer_part(vocabulary, result.token_ids)
    logprobs = [one.logprob for one in result.stats[:used]]
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
    return Probed(at, text, mean, result.computed_tokens)


def answer_part(vocabulary: Vocabulary, token_ids: Sequence[int]) -> tuple[str, int]:
    """Text of a probe up to the token that closes the answer, and how many tokens that takes."""
    depth = 0
    for index, token_id in enumerate(token_ids):
        for byte in vocabulary.token_bytes(token_id):
            depth += {ord("{"): 1, ord("}"): -1}.get(byte, 0)
            if depth < 0 or byte == ord("\n"):
                return vocabulary.text(token_ids[: index + 1]), index + 1
        if token_id in vocabulary.eos_ids:
            return vocabulary.text(token_ids[:index]), index
    return vocabulary.text(token_ids), len(token_ids)
