"""How sure a trace was of its own tokens: group confidence (DeepConf, arXiv 2508.15260).

The confidence of a token is `TokenStats.confidence`: the negative mean log-prob of the 20 most
likely tokens on raw logits. Only comparable within one model.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

MIN_WINDOW = 256
MAX_WINDOW = 2_048
BOTTOM_SHARE = 0.10


def window_for(lengths: Sequence[int]) -> int:
    """Tokens of a group: an eighth of the median length of finished traces, within [256, 2048]."""
    if not lengths:
        return MAX_WINDOW
    return min(MAX_WINDOW, max(MIN_WINDOW, math.floor(median(lengths) / 8)))


class TraceConfidence:
    """Group means over the last `window` tokens, after each token; O(1) a token."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._recent: deque[float] = deque()
        self._sum = 0.0
        self._groups = array("d")
        self._total = 0.0
        self._count = 0

    def push(self, confidence: float) -> None:
        """One more token. A value that is no number counts as the mean so far."""
        if not math.isfinite(confidence):
            confidence = self.mean if self._count else 0.0
        self._count += 1
        self._total += confidence
        self._recent.append(confidence)
        self._sum += confidence
        if len(self._recent) > self._window:
            self._sum -= self._recent.popleft()
        if len(self._recent) == self._window:
            self._groups.append(self._sum / self._window)

    @property
    def mean(self) -> float:
        """Over the whole trace; NaN before the first token."""
        return self._total / self._count if self._count else math.nan

    @property
    def full_window(self) -> float | None:
        """The current group's mean; None until there are `window` tokens."""
        return self._groups[-1] if self._groups else None

    @property
    def lowest(self) -> float:
        """The lowest group mean; of a trace shorter than a window its mean."""
        return min(self._groups) if self._groups else self.mean

    @property
    def bottom(self) -> float:
        """Mean of the lowest tenth of the group means; of a trace shorter than a window its mean."""
        if not self._groups:
            return self.mean
        return fmean(sorted(self._groups)[: max(1, int(BOTTOM_SHARE * len(self._groups)))])


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks; `share` in [0, 1]. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
