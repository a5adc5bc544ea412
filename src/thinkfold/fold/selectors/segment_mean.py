"""Means of equal stretches with the log of their length as mass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinkfold.fold.compaction import check_budget
from thinkfold.fold.fit import log_counts, pool, stretches
from thinkfold.fold.segments import Pooled, Segments, Summary


@dataclass(frozen=True, slots=True)
class SegmentMean:
    """Each of `budget` equal stretches becomes its mean key, mean value and β = log of its tokens; no query is needed.

    Source: the residual entries of ResKV (arXiv 2607.29591: mean key, mean value, log count), over stretches of text.
    """

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        membership = stretches(segments.tokens, budget.to(segments.keys.device)).to(segments.keys)
        keys, values = pool(segments.keys, membership), pool(segments.values, membership)
        bias = log_counts(membership).expand(keys.shape[:-1])
        return Summary(bias[..., :0].long(), Pooled(keys, values, bias))
