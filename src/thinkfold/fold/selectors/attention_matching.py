"""Attention Matching: a subset of keys with fitted mass and fitted values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinkfold.fold.compaction import check_budget, choose, rms_attention, segment_share
from thinkfold.fold.fit import fit_pooled
from thinkfold.fold.segments import Segments, Summary, take


@dataclass(frozen=True, slots=True)
class AttentionMatching:
    """The keys with the largest RMS attention; β and values of all of them are fitted to the segment's mass and output.

    Source: Zweiger et al., "Fast KV compaction via attention matching", arXiv 2602.16284, the variant with highest
    attention keys. Here β starts from the mean number of tokens a key stands for, may grow to 9, and values are pulled
    to the keys' own by a ridge, since there are hundreds of queries and not tens of thousands.
    """

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        chosen = choose(rms_attention(segments.queries, segments.keys, segments.scale), budget)
        start = (segments.tokens / budget.clamp(min=1)).log().to(segments.keys)
        start = start.unsqueeze(-1).expand(chosen.shape).masked_fill(chosen < 0, -torch.inf)
        keys, values = take(segments.keys, chosen), take(segments.values, chosen)
        nothing = chosen[..., :0]
        share = segment_share(segments)
        return Summary(nothing, fit_pooled(segments, nothing, share, keys, values, start, refit=True))
