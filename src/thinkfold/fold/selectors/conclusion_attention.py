"""thinkfold's own: the conclusion and what the future will look at, copied as it is; mass for heads that average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import CONCLUSION, check_budget, choose, importance
from thinkfold.fold.fit import remainder
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class ConclusionAttention:
    """The last `conclusion` tokens before each end of a stretch of thinking in every head that has room, then the
    largest RMS attention × ‖v‖; exact copies. In heads with `mass`, so many of the entries are pooled.

    A fold is made of whole pages, so an end seldom is the fold's own, and `Segments.ends` matters: without it the fold
    keeps tokens before its last page's end and loses half of a result.
    Some heads look at nothing in particular: they average over all that was said, and what counts is how much there is.
    No number of exact copies carries that; one pooled entry with its mass does. In other heads it only disturbs, so
    `mass` is a table, one number a head (layer · kv_heads + head), counted by `thinkfold calibrate`; empty means none.
    Meant for a budget table calibrated over layers and heads (`compaction.budget_table`); a uniform one works too.
    Source: this project. RMS attention scores a key in Attention Matching (Zweiger et al., arXiv 2602.16284), whose
    mass fit β comes from; value norms protect reasoning in VaSE (arXiv 2606.03928).
    """

    conclusion: int = CONCLUSION
    mass: Sequence[int] = ()

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        scores = importance(segments)
        if not any(self.mass):
            return Summary(choose(scores, budget, self.conclusion, segments.ends))
        pooled = torch.tensor(self.mass).view(budget.shape).minimum(budget)
        exact = choose(scores, budget - pooled, self.conclusion, segments.ends)
        return Summary(exact, remainder(segments, exact, pooled))
