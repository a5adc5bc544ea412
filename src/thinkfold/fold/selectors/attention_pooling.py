"""Latents by softmax-weighted pooling: each stretch of the segment becomes one entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinkfold.fold.compaction import check_budget, rms_attention, segment_share
from thinkfold.fold.fit import fit_pooled, log_counts, pool, stretches
from thinkfold.fold.segments import Segments, Summary


@dataclass(frozen=True, slots=True)
class AttentionPooling:
    """Equal stretches; key and value of each are the mean under the attention its tokens draw, β is fitted.

    Source: the pooled memories of the Compressive Transformer (Rae et al., arXiv 1911.05507), with the softmax weights
    of attention pooling (Lee et al., Set Transformer, arXiv 1810.00825) taken from the reference queries.
    """

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """See `Selector.select`."""
        check_budget(budget, segments)
        membership = stretches(segments.tokens, budget.to(segments.keys.device)).to(segments.keys)
        drawn = rms_attention(segments.queries, segments.keys, segments.scale).unsqueeze(-2)
        weights = membership * drawn
        keys, values = pool(segments.keys, weights), pool(segments.values, weights)
        start = log_counts(membership).expand(keys.shape[:-1])
        nothing = start[..., :0].long()
        share = segment_share(segments)
        return Summary(nothing, fit_pooled(segments, nothing, share, keys, values, start, refit=False))
