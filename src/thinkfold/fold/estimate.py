"""How many entries of thinking are stored: one estimate, for the bound of the pool and for admission. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from thinkfold.types import FoldProfile

OPEN_SHARE = 0.6  # of a span's mean length is open at any time; long spans are open for longer


@dataclass(frozen=True, slots=True)
class FoldShape:
    """What folds leave: mean tokens of a `span`, the share of tokens whose fold is `refused`, tokens that are `open`.

    Without `open_tokens` it is what an average moment holds: a share of a span.
    """

    span: float
    refused: float = 0.0
    open_tokens: float | None = None

    @classmethod
    def most(cls, numbers: FoldProfile) -> FoldShape:
        """At the worst moment: the open segment as long as it can be, spans as long as the middle of their range."""
        return cls(middle(numbers), open_tokens=numbers.max_segment_tokens)

    def entries(self, numbers: FoldProfile, thinking: float) -> float:
        """Entries that are left of `thinking` tokens which are folded as soon as they may be."""
        held = OPEN_SHARE * self.span if self.open_tokens is None else self.open_tokens
        raw = numbers.keep_first_tokens + max(numbers.fold_delay, numbers.keep_raw_tokens) + held
        left = self.refused + (1.0 - self.refused) * min(1.0, numbers.entries / self.span)
        return min(thinking, raw) + max(0.0, thinking - raw) * left


def middle(numbers: FoldProfile) -> float:
    """The middle of a profile's range of segments, in tokens."""
    return (numbers.min_segment_tokens + numbers.max_segment_tokens) / 2
