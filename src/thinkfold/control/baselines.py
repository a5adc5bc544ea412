"""What others would have done with recorded samples: rules to compare votes with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinkfold.control.ballot import Tally, tally
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.replay import Record
from thinkfold.control.trace_confidence import percentile
from thinkfold.control.vote_stops import MIN_PROBABILITY, MIN_SHARE, beta_probability


@dataclass(frozen=True, slots=True)
class Compared:
    """Whether the chosen answer is right, all tokens, those of the longest chain of work, and samples begun."""

    correct: bool
    tokens: int
    critical_path: int
    started: int


def majority(records: Sequence[Record]) -> Compared:
    """The plain majority of all samples, which run side by side."""
    tokens = [record.output_tokens for record in records]
    return Compared(_is_right(_count(records), records), sum(tokens), max(tokens), len(records))


def one_by_one(records: Sequence[Record]) -> Compared:
    """Adaptive consistency (arXiv 2305.11860): samples one after the other until the Beta rule holds."""
    found, used = Tally((), 0), 0
    for used in range(1, len(records) + 1):
        found = _count(records[:used])
        if found.classes and beta_probability(*[*found.counts, 0][:2]) >= MIN_PROBABILITY:
            break
    tokens = sum(record.output_tokens for record in records[:used])
    return Compared(_is_right(found, records), tokens, tokens, used)


def deepconf(records: Sequence[Record], warm_up: int, kept: float) -> Compared:
    """DeepConf's online rule (arXiv 2508.15260).

    `warm_up` samples end; of their lowest group confidences the share `kept` is above the threshold. Then all
    others run, each until it ends or its full window is below that; only whole ones vote, with the weight of their
    bottom-10 % confidence. It stops as soon as one answer has 0.95 of the weight.
    """
    first, others = records[:warm_up], records[warm_up:]
    lows = [record.lowest for record in first if record.lowest is not None]
    threshold = percentile(lows, 1.0 - kept) if lows else float("-inf")
    ends = [_end(record, threshold) for record in others]
    voters, began = list(first), max(record.output_tokens for record in first)
    now, found = 0, _weigh(voters)
    if found.share < MIN_SHARE:
        for end, number in sorted((end, number) for number, end in enumerate(ends)):
            now = end
            if end == others[number].output_tokens:
                voters.append(others[number])
                found = _weigh(voters)
                if found.share >= MIN_SHARE:
                    break
    tokens = sum(record.output_tokens for record in first) + sum(min(end, now) for end in ends)
    return Compared(_is_right(found, voters), tokens, began + now, len(records) if now else warm_up)


def _end(record: Record, threshold: float) -> int:
    """Tokens until the first full window below the threshold, or all."""
    return next((at for at, mean in record.windows if mean < threshold), record.output_tokens)


def _count(records: Sequence[Record]) -> Tally:
    return tally([extract(record.reply).answer for record in records], [1.0] * len(records), Equality())


def _weigh(records: Sequence[Record]) -> Tally:
    weights = [record.bottom if record.bottom is not None and record.bottom > 0 else 1.0 for record in records]
    return tally([extract(record.reply).answer for record in records], weights, Equality())


def _is_right(found: Tally, records: Sequence[Record]) -> bool:
    return bool(found.classes) and records[found.classes[0].representative].correct
