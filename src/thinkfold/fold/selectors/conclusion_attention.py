"""thinkfold's own: the conclusion and what the future will look at, copied as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinkfold.fold.compaction import CONCLUSION, check_budget, choose, importance
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class ConclusionAttention:
    """The last `conclusion` tokens before each end of a stretch of thinking in every head that has room, then the
    largest RMS attention × ‖v‖; exact copies.

    A fold is made of whole pages, so an end seldom is the fold's own, and `Segments.ends` matters: without it the fold
    keeps tokens before its last page's end and loses half of a result.
    Meant for a budget table calibrated over layers and heads (`compaction.budget_table`); a uniform one works too.
    Source: this project. RMS attention scores a key in Attention Matching (Zweiger et al., arXiv 2602.16284); value
    norms protect reasoning in VaSE (arXiv 2606.03928).
    """

    conclusion: int = CONCLUSION

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        return Summary(choose(importance(segments), budget, self.conclusion, segments.ends))
