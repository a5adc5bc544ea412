"""First and last tokens, whatever they say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import check_budget, choose
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class Streaming:
    """The segment's first `sinks` tokens and its last ones; exact copies.

    Source: StreamingLLM (Xiao et al., arXiv 2309.17453), within a segment. The sinks of the whole context are no part
    of a segment: they stay raw under every selector.
    """

    sinks: int = 4

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        position = torch.arange(segments.tokens, device=segments.keys.device)
        score = (position + segments.tokens * (position < self.sinks)).float()
        return Summary(choose(score.expand(segments.keys.shape[:-1]), budget))
